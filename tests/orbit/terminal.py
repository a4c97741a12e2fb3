"""A command on a terminal of its own, as a person has it: what is typed, and what Ctrl-C does."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

CTRL_C = "\x03"
REACTION = 0.5  # seconds; a machine that is busy needs them to begin to read


@dataclass(slots=True)
class Terminal:
    """One end of a pseudo-terminal and the command at its other end."""

    process: subprocess.Popen[bytes]
    descriptor: int
    text: str = field(default="")

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C as late as a person would.

        Python's input() does not hear a signal that comes in the instant before it begins to read.
        """
        time.sleep(REACTION)
        self.type(CTRL_C)

    def wait_for(self, wanted: str, seconds: float = 30) -> None:
        """Read until `wanted` stands on the screen."""
        deadline = time.monotonic() + seconds
        while wanted not in self.text:
            assert self._read(deadline - time.monotonic()), f"{wanted!r} never came; what came:\n{self.text}"

    def end(self, seconds: float = 30) -> int:
        """Wait for the command's end, and return its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline - time.monotonic()):
            pass
        assert time.monotonic() < deadline, f"it did not end; what came:\n{self.text}"
        return self.process.wait(timeout=seconds)

    def _read(self, seconds: float) -> bool:
        """Read what comes next; False at the end, or when nothing came in time."""
        if not select.select([self.descriptor], [], [], max(seconds, 0))[0]:
            return False
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:  # the last process closed the other end
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal(argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Run a command whose standard streams and controlling terminal are a terminal of its own."""
    ours, theirs = pty.openpty()
    # setsid gives it the terminal, so that Ctrl-C is a signal and not a character.
    process = subprocess.Popen(
        ["setsid", "--ctty", *argv],
        env={**environment, "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)
