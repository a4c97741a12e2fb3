"""`flare agent install`: the agent as a systemd service of this account.

A Python program is installed already, so what the unit records is the path of its `flare` script; updating
the package and installing again restarts the service with the new version.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from flare.errors import ConfigError, FlareError, UnsupportedError
from flare.files import write_atomic
from flare.printable import printable
from flare.values import dataclass

UNIT = "flare-agent.service"
COMMAND_TIMEOUT = 90.0  # seconds: a restart waits for ranks to end and for the new agent to be ready


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the installation.

    Args:
        command: its words.
        needed: whether the installation fails with it; else `remedy` is told as a warning.
        remedy: what the person can do when it fails.
    """

    command: tuple[str, ...]
    needed: bool
    remedy: str


USER_MANAGER = ("systemctl", "--user", "show-environment")  # asks it something, and changes nothing

STEPS = (
    Step(
        ("systemctl", "--user", "daemon-reload"),
        True,
        "Without a user manager (a login over `su` has none) try it from a fresh login, or run `flare agent` "
        "under a supervisor of your own.",
    ),
    Step(("systemctl", "--user", "enable", UNIT), True, f"Look at `systemctl --user status {UNIT}`."),
    Step(
        ("systemctl", "--user", "restart", UNIT),
        True,
        f"`journalctl --user -u {UNIT} -n 20` says why the agent did not start.",
    ),
    Step(
        ("loginctl", "enable-linger"),
        False,
        "Without it the agent ends at the last logout: run `sudo loginctl enable-linger $USER`.",
    ),
)


def unit_path(config_home: Path) -> Path:
    """Return where the unit file belongs, for an account's configuration folder (~/.config)."""
    return config_home / "systemd" / "user" / UNIT


def unit_text(executable: Sequence[str], options: Sequence[str]) -> str:
    """Return the unit file.

    Args:
        executable: the words that start the installed flare.
        options: of `flare agent`, such as --listen.
    """
    template = files("flare").joinpath("systemd", UNIT).read_text()
    return template.replace("@EXECUTABLE@", _words(executable)).replace("@OPTIONS@", _words(options))


def _words(words: Sequence[str]) -> str:
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    """Return a word as a unit file takes it.

    Raises:
        ConfigError: no unit file can hold it.
    """
    if any(character < " " or character == "\x7f" for character in word):
        raise ConfigError(f'"{printable(word)}" has a control character, which no unit file can hold.')
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    plain = all(character.isalnum() or character in "/._-:[]=@" for character in word)
    return escaped if word and plain else f'"{escaped}"'


def write_unit(path: Path, text: str) -> None:
    """Write the unit file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode(), mode=0o644)


def require_systemd(listen: str) -> None:
    """Refuse a host or a login where nothing could run the service; nothing was written yet.

    Args:
        listen: the agent's address, for the command that works without systemd.

    Raises:
        UnsupportedError: there is no systemctl, or no user manager answers it.
    """
    if shutil.which("systemctl") is None:
        why = "There is no systemctl on PATH"
    elif (problem := _run(USER_MANAGER)) is not None:
        why = f"No systemd user manager answers this login ({problem.rstrip('.')}; one over `su` has none)"
    else:
        return
    raise UnsupportedError(
        f"{why}, so the agent cannot be installed as a service. Run `flare agent --listen '{listen}'` in a "
        "terminal or under a supervisor of your own, and `flare agent join-code` in another terminal."
    )


def run_steps() -> list[str]:
    """Load, enable and restart the service, and ask for linger; return warnings.

    Raises:
        FlareError: a step that is needed failed.
    """
    warnings = []
    for step in STEPS:
        problem = _run(step.command)
        if problem is not None:
            sentence = f"`{' '.join(step.command)}` failed: {problem} {step.remedy}"
            if step.needed:
                raise FlareError(sentence)
            warnings.append(sentence)
    return warnings


def _run(command: Sequence[str]) -> str | None:
    """Run one command; return what is wrong, or None."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT, check=False
        )
    except FileNotFoundError:
        return "there is no such program."
    except subprocess.TimeoutExpired:
        return f"it did not end within {COMMAND_TIMEOUT:.0f} s."
    if done.returncode == 0:
        return None
    said = (
        printable(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1])
        if done.stderr.strip()
        else ""
    )
    return f"{said.rstrip('.')}." if said else f"exit status {done.returncode}."


def config_home() -> Path:
    """Return the account's configuration folder."""
    value = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(value) if value.startswith("/") else Path.home() / ".config"
