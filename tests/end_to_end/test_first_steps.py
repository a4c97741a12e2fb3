"""What the quickstart does before and around its steps: missing packages, Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quickstart_steps

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NEEDED = ("bash", "dirname", "getconf", "grep", "id", "sort")


def checkout(folder: Path, machine: str, libc: str) -> tuple[Path, dict[str, str]]:
    """Copy the tools, and make a PATH of what all systems have; `uname` and `getconf` say as told."""
    (folder / "tools").mkdir()
    for name in ("common.sh", "quickstart"):
        shutil.copy(TOOLS / name, folder / "tools" / name)
    programs = folder / "bin"
    programs.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    (programs / "python3").symlink_to(sys.executable)
    says = {"uname": machine, "getconf": libc, "ldconfig": "libgomp.so.1"}
    for name, text in says.items():
        (programs / name).unlink(missing_ok=True)
        (programs / name).write_text(f"#!{programs}/bash\necho '{text}'\n")
        (programs / name).chmod(0o755)
    return folder / "tools/quickstart", {"PATH": str(programs), "HOME": str(folder)}


@pytest.mark.parametrize(
    ("machine", "libc"), [("aarch64", "glibc 2.39"), ("x86_64", "glibc 2.31"), ("x86_64", "")]
)
def test_what_building_the_engine_needs_is_named_at_once(tmp_path: Path, machine: str, libc: str) -> None:
    script, environment = checkout(tmp_path, machine, libc)
    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "quickstart: these system packages are missing; install them, then run this again:",
        "    sudo apt-get install cmake ninja-build g++",
    ]
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("machine", "libc", "built"),
    [("x86_64", "glibc 2.35", False), ("x86_64", "glibc 2.100", False), ("aarch64", "glibc 2.39", True)],
)
def test_a_ready_made_engine_needs_no_compiler(tmp_path: Path, machine: str, libc: str, built: bool) -> None:
    script, environment = checkout(tmp_path, machine, libc)
    if built:
        record = tmp_path / ".quickstart/data/flare/engines/llama.cpp/engine.json"
        record.parent.mkdir(parents=True)
        record.write_text("{}")
    command = f"cd {tmp_path} && . tools/common.sh && engine_packages"
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), script


def wait_for_file(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text().strip()


def interrupted(argv: list[str], folder: Path, environment: dict[str, str], *, group: bool = True) -> str:
    """Start a program, press Ctrl-C once `pid` is written, and return what it complained of.

    Args:
        folder: has `pid`: the process that must be gone in the end.
        group: whether all its processes get the signal, as from a terminal.
    """
    process = subprocess.Popen(
        argv,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pid = wait_for_file(folder / "pid")
        (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
        _, complaints = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, complaints
    assert not Path("/proc", pid).exists()
    return complaints


def steps(code: str, folder: Path, *, group: bool = True) -> str:
    """Run lines on the quickstart's steps and its `main`, interrupted."""
    program = f"import pathlib, quickstart_steps as steps\n{code}raise SystemExit(steps.main())\n"
    environment = {**os.environ, "PYTHONPATH": str(TOOLS)}
    return interrupted([sys.executable, "-c", program], folder, environment, group=group)


def test_ctrl_c_while_a_command_reads_its_input_ends_cleanly(tmp_path: Path) -> None:
    """The command has read its input, as `flare orbit pair` has its code, and is busy."""
    program = tmp_path / "flare"
    program.write_text(f"#!/bin/sh\ncat >{tmp_path}/read\necho $$ >{tmp_path}/pid\nexec sleep 60\n")
    program.chmod(0o755)
    code = (
        f"steps.FLARE = pathlib.Path({str(program)!r})\n"
        f"steps.run = lambda _: steps.flare(pathlib.Path({str(tmp_path / 'home')!r}), 'pair', text='code')\n"
    )
    assert steps(code, tmp_path, group=False) == "\nquickstart: interrupted; nothing is left running.\n"


def test_ctrl_c_during_the_download_prints_no_traceback(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text(
        f"#!/bin/bash\ntrap 'echo Traceback >&2; exit 1' INT\necho $$ >{tmp_path}/pid\n"
        "while true; do sleep 0.05; done\n"
    )
    pip.chmod(0o755)
    code = f"steps.sys.executable = {str(pip)!r}\nsteps.run = lambda _: steps.run_pip('download')\n"
    assert steps(code, tmp_path) == "\nquickstart: interrupted; nothing is left running.\n"


def test_what_pip_says_of_a_failure_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho 'ERROR: no route' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    monkeypatch.setattr(quickstart_steps, "run", lambda _: quickstart_steps.run_pip("download"))
    monkeypatch.setattr(sys, "argv", ["quickstart"])
    assert quickstart_steps.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("ERROR: no route\nquickstart: ")
    assert "download … ended with exit code 1." in said


def test_ctrl_c_while_the_environment_is_set_up_is_told(tmp_path: Path) -> None:
    script, environment = checkout(tmp_path, "x86_64", "glibc 2.39")
    programs = tmp_path / "bin"
    for name in ("cat", "cut", "mktemp", "rm", "sha256sum", "sleep"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    (programs / "python3").unlink()
    (programs / "python3").write_text(
        f"#!{programs}/bash\n"
        f'if [ "$2" = venv ]; then echo $$ >{tmp_path}/pid; exec sleep 60; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    (programs / "python3").chmod(0o755)
    (tmp_path / "pyproject.toml").write_text("")
    complaints = interrupted([str(script)], tmp_path, environment)
    assert complaints == "\nquickstart: interrupted; run it again to go on.\n"


def test_a_shell_that_does_as_keep_said_can_run_it_again(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TOOLS), "HOME": str(tmp_path / "controller")}
    code = f"import pathlib, quickstart_steps as steps\nsteps.BASE = pathlib.Path({str(tmp_path)!r})\n"
    command = [sys.executable, "-c", f"{code}print(steps.leftovers())"]
    kept = subprocess.Popen(["sleep", "60"], env=environment)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    finally:
        kept.kill()
        kept.wait()
    assert done.stdout == f"['{kept.pid} sleep 60 ']\n", done
