"""The keeper: real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flare import keeper

ESCAPE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]):
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""


class Kept:
    def __init__(self, argv: list[str], tmp_path: Path) -> None:
        self.control, theirs = socket.socketpair()
        with (tmp_path / "out").open("wb") as output:
            self.process = subprocess.Popen(
                keeper.command(theirs.fileno(), argv),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        self._received = b""

    def line(self, seconds: float = 60) -> str:
        while b"\n" not in self._received:
            assert select.select([self.control], [], [], seconds)[0], "the keeper said nothing"
            data = self.control.recv(4096)
            if not data:
                return ""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def keep(stack: contextlib.ExitStack, argv: list[str], tmp_path: Path) -> Kept:
    kept = Kept(argv, tmp_path)
    stack.callback(kept.close)
    return kept


def is_gone(process: int, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            return True
        if state == b"Z":
            return True
        time.sleep(0.02)
    return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


def read_when_there(path: Path) -> str:
    until(lambda: path.exists() and bool(path.read_text()))
    return path.read_text()


def test_tells_how_it_ended(closing: contextlib.ExitStack, tmp_path: Path) -> None:
    kept = keep(closing, [sys.executable, "-c", "import sys; print('hello'); sys.exit(3)"], tmp_path)
    assert kept.line().startswith("started ")
    assert kept.line() == "exited 3"
    assert kept.line() == "gone"
    assert kept.process.wait(60) == 0
    assert (tmp_path / "out").read_text() == "hello\n"


def test_program_that_is_not_there(closing: contextlib.ExitStack, tmp_path: Path) -> None:
    kept = keep(closing, [str(tmp_path / "nothing")], tmp_path)
    assert kept.line() == "failed No such file or directory"
    assert kept.process.wait(60) == 1


def test_terminate_reaches_the_leader_alone(closing: contextlib.ExitStack, tmp_path: Path) -> None:
    program = (
        "import time, signal, sys; signal.signal(15, lambda *_: sys.exit(7));"
        "print(1, flush=True); time.sleep(60)"
    )
    kept = keep(closing, [sys.executable, "-c", program], tmp_path)
    kept.line()
    read_when_there(tmp_path / "out")
    kept.control.sendall(keeper.TERMINATE)
    assert kept.line() == "exited 7"


def test_kill_reports_the_signal(closing: contextlib.ExitStack, tmp_path: Path) -> None:
    kept = keep(closing, ["sleep", "60"], tmp_path)
    kept.line()
    kept.control.sendall(keeper.KILL)
    assert kept.line() == f"exited -{signal.SIGKILL}"
    assert kept.line() == "gone"


def test_escaped_grandchild_dies_with_the_leader(closing: contextlib.ExitStack, tmp_path: Path) -> None:
    kept = keep(closing, [sys.executable, "-c", ESCAPE, str(tmp_path / "pid"), "0"], tmp_path)
    kept.line()
    escaped = int(read_when_there(tmp_path / "pid"))
    assert kept.line() == "exited 0"
    assert kept.line() == "gone"
    assert is_gone(escaped, 0.1)


def test_starter_gone_takes_everything(closing: contextlib.ExitStack, tmp_path: Path) -> None:
    kept = keep(closing, [sys.executable, "-c", ESCAPE, str(tmp_path / "pid"), "600"], tmp_path)
    leader = int(kept.line().split()[1])
    escaped = int(read_when_there(tmp_path / "pid"))
    kept.control.close()
    assert kept.process.wait(60) == 0
    assert is_gone(leader, 0.1)
    assert is_gone(escaped, 0.1)


def test_killed_keeper_takes_the_leader(closing: contextlib.ExitStack, tmp_path: Path) -> None:
    kept = keep(closing, ["sleep", "600"], tmp_path)
    leader = int(kept.line().split()[1])
    kept.process.kill()
    kept.process.wait(60)
    assert is_gone(leader)


def test_signals_for_the_group_do_not_end_the_keeper(closing: contextlib.ExitStack, tmp_path: Path) -> None:
    program = (
        "import signal, time; signal.signal(15, lambda *_: print('asked', flush=True));"
        "print('ready', flush=True)\nwhile True: time.sleep(60)"
    )
    kept = keep(closing, [sys.executable, "-c", program], tmp_path)
    kept.line()
    output = tmp_path / "out"
    until(lambda: output.read_text() == "ready\n")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(kept.process.pid, number)
    # Who obeys an order has taken the signals before it; and its program still lives, unasked by them.
    kept.control.sendall(keeper.TERMINATE)
    until(lambda: output.read_text() == "ready\nasked\n")
    kept.control.sendall(keeper.KILL)
    assert kept.line() == f"exited -{signal.SIGKILL}"
    assert kept.line() == "gone"


def test_descriptors_reach_the_program_and_leave_the_keeper(
    closing: contextlib.ExitStack, tmp_path: Path
) -> None:
    read_end, write_end = os.pipe()
    control, theirs = socket.socketpair()
    closing.callback(control.close)
    program = f"import os; os.write({write_end}, b'key'); os.close({write_end}); import time; time.sleep(60)"
    process = subprocess.Popen(
        keeper.command(theirs.fileno(), [sys.executable, "-c", program]),
        pass_fds=[theirs.fileno(), write_end],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read() == b"key"  # ends although keeper and program both live on
    assert process.poll() is None
    control.close()
    assert process.wait(60) == 0


def test_wrong_command_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, keeper.__file__, "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage" in done.stderr
