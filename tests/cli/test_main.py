"""The root of the command line: finding commands, errors as sentences, exit codes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from flare.cli import main as root
from flare.errors import IntegrityError, NotFoundError
from flare.version import VERSION
from tests.cores.making import gguf_core


def flare(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flare", *words],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip


def test_version() -> None:
    result = flare("--version")
    assert (result.returncode, result.stdout) == (0, f"flare {VERSION}\n")


def test_help_lists_every_command() -> None:
    result = flare("--help")
    assert result.returncode == 0
    for name in root.COMMANDS:
        assert f"  {name}" in result.stdout


def test_help_does_not_recommend_a_code_in_argv() -> None:
    shown = flare("--help").stdout
    assert "flare orbit pair HOST...      asks for each host's code" in shown
    assert "CODE" not in shown


@pytest.mark.parametrize("name", list(root.COMMANDS))
def test_every_command_has_help(name: str) -> None:
    result = flare(name, "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage: flare" in result.stdout


def test_an_unknown_command_names_the_nearest() -> None:
    result = flare("obrit")
    assert result.returncode == 2
    assert "Did you mean `flare orbit`?" in result.stderr


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("orbit", "run", "--nam", "x"), "No such option '--nam'. Did you mean '--name'?", "flare orbit run"),
        (("orbit", "pair"), "Missing argument 'HOST...'.", "flare orbit pair"),
        (
            ("publisher", "shwo"),
            "There is no command `shwo`. Did you mean `flare publisher show`?",
            "flare publisher",
        ),
        (("agent", "foo"), "There is no command `foo`. `flare agent --help` lists them.", "flare agent"),
        (("status",), "There is no command `status`. Did you mean `flare orbit status`?", "flare"),
        (("ls",), "There is no command `ls`. Did you mean `flare orbit ls`?", "flare"),
        (
            ("orbit", "push", "./a", "--to", "a", "b"),
            "Got unexpected extra argument (b). Names behind --to are joined by commas: --to maxwell,hertz.",
            "flare orbit push",
        ),
        (
            ("orbit", "run", "./a", "--nodes", "a", "b"),
            (
                "Got unexpected extra argument (b). Names behind --nodes are joined by commas: "
                "--nodes maxwell,hertz."
            ),
            "flare orbit run",
        ),
        (
            ("orbit", "statsu"),
            "There is no command `statsu`. Did you mean `flare orbit status`?",
            "flare orbit",
        ),
    ],
)
def test_wrong_words_look_like_every_other_error(words: tuple[str, ...], error: str, hint: str) -> None:
    result = flare(*words)
    assert (result.returncode, result.stdout) == (2, "")
    first, usage, last = result.stderr.splitlines()
    assert first == f"flare: error: {error}"
    assert usage.startswith(f"Usage: {hint} ")
    assert last == f"`{hint} --help` explains it."


def test_a_group_without_a_command_shows_its_help() -> None:
    result = flare("orbit")
    assert result.returncode == 2
    assert "error" not in result.stderr
    assert "Pair nodes with this controller" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = flare("completion", shell)
    assert result.returncode == 0
    assert "_FLARE_COMPLETE" in result.stdout
    explained = flare("completion", "--help").stdout
    folder = re.search(rf"flare completion {shell} > (\S+)/", explained)
    assert folder is not None
    assert f"mkdir -p {folder[1]}" in explained


def test_completion_completes() -> None:
    result = flare(
        environment={"_FLARE_COMPLETE": "bash_complete", "COMP_WORDS": "flare or", "COMP_CWORD": "1"}
    )
    assert "orbit" in result.stdout


def run_failing(
    problem: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    @click.command()
    def failing() -> None:
        raise problem

    monkeypatch.setattr(root, "cli", failing)
    with pytest.raises(SystemExit) as caught:
        root.main([])
    code = caught.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "code", "text"),
    [
        (NotFoundError("No group \x1b[31m."), 11, "flare: error: No group \\x1b[31m."),
        (IntegrityError("Block 3 of x."), 6, "Block 3 of x."),
        (ExceptionGroup("g", [ValueError("v"), NotFoundError("Inner.")]), 11, "Inner."),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "/cache"), 9, "the disk is full"),
        (PermissionError(13, "Permission denied", "/cache"), 9, "permission denied"),
        (ZeroDivisionError("oops"), 1, "a fault in flare itself: ZeroDivisionError"),
        (click.UsageError("Bad words."), 2, "Bad words."),
    ],
)
def test_errors_become_sentences(
    problem: BaseException,
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, printed = run_failing(problem, capsys, monkeypatch)
    assert status == code
    assert text in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", sorted(root.COMMANDS.keys() - root.RUNS_EVERYWHERE))
def test_windows_is_refused_in_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    module = root.COMMANDS[name][0]
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as caught:
        root.main([name, "--help"])
    assert caught.value.code == 14
    assert capsys.readouterr().err == (
        f"flare: error: `flare {name}` does not run on Windows: a controller needs Linux or macOS, a node "
        "Linux.\n"
    )
    assert module not in sys.modules


def test_what_runs_on_windows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as caught:
        root.main(["completion", "zsh"])
    assert caught.value.code == 0
    assert "_FLARE_COMPLETE" in capsys.readouterr().out


def test_the_root_imports_nothing_heavy() -> None:
    heavy = "cryptography asyncio aiohttp rich pynvml numpy gguf tomlkit fcntl resource pwd"
    code = (
        "import pathlib, sys; before = set(sys.modules); import flare.cli.main; "  # 3.13's pathlib has pwd
        f"print([m for m in {heavy.split()!r} if m in sys.modules.keys() - before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m flare --help | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--version >&-", 0, ""),
        ("orbit pair 127.0.0.1:1 --code - <&-", 2, "The join code is empty."),
        ("orbit attach nothing 2>&-", 11, ""),
        ("orbit attach nothing <&- >&- 2>&-", 11, ""),
        ("--version > /dev/full", 9, "flare: error: Failed: the disk is full."),
    ],
)
def test_streams_that_are_closed_or_full(words: str, code: int, text: str, tmp_path: Path) -> None:
    command = ["bash", "-c", f"exec {sys.executable} -m flare {words}"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env=environment
    )
    assert (result.returncode, result.stdout) == (code, "")
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_while_the_command_line_is_still_imported(tmp_path: Path) -> None:
    code = (
        "import runpy, sys, types\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'flare.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "runpy.run_module('flare', run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, "flare: interrupted.\n")


def unread(
    *words: str, streams: tuple[str, ...] = ("stdout",), environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command whose output nobody reads; return its exit code and what it said on the other stream."""
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "flare", *words],
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        stdout=writing if "stdout" in streams else subprocess.PIPE,
        stderr=writing if "stderr" in streams else subprocess.PIPE,
    )
    os.close(writing)
    return result.returncode, f"{result.stdout or ''}{result.stderr or ''}"


def test_output_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    core = gguf_core(tmp_path / "core", ranks=1)
    home = {"HOME": str(tmp_path)}
    assert flare("publisher", "create", "me", environment=home).returncode == 0
    for words in (
        ("--help",),
        ("--version",),
        ("orbit", "run", "--help"),
        ("completion", "bash"),
        ("core", "show", str(core)),
        ("core", "show", str(core), "--json"),
        ("core", "verify", str(core), "--json"),
        ("publisher", "show"),
        ("agent", "reset"),
    ):
        assert unread(*words, environment=home) == (141, ""), words


def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    for streams in (("stderr",), ("stdout", "stderr")):
        assert unread("orbit", "ls", streams=streams, environment=home) == (11, "")
        assert unread("orbit", "nonsense", streams=streams) == (2, "")
    code, text = unread("orbit", "ls", environment=home)
    assert code == 11
    assert text.startswith("flare: error: No node is paired yet.")


@pytest.mark.parametrize("grouped", [False, True])
def test_another_pipe_that_broke_is_an_error(
    grouped: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BrokenPipeError(errno.EPIPE, "Broken pipe")

    @click.group(cls=root.RootGroup, invoke_without_command=True)
    def failing() -> None:
        raise ExceptionGroup("g", [ExceptionGroup("h", [broken])]) if grouped else broken

    monkeypatch.setattr(root, "cli", failing)
    with pytest.raises(SystemExit) as caught:
        root.main([])
    assert caught.value.code == (1 if grouped else 9)
    assert "Broken pipe" in capsys.readouterr().err or grouped


def test_output_that_breaks_in_a_task_ends_quietly(tmp_path: Path) -> None:
    script = (
        "import asyncio, click\n"
        "from flare.cli import main as root, output\n"
        "@click.group(cls=root.RootGroup, invoke_without_command=True)\n"
        "def cli():\n"
        "    async def main():\n"
        "        async with asyncio.TaskGroup() as group:\n"
        "            for _ in range(2):\n"
        "                group.create_task(asyncio.to_thread(output.say, 'x'))\n"
        "    asyncio.run(main())\n"
        "root.cli = cli\n"
        "root.main([])\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
