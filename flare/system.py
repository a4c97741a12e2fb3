"""What the standard library lacks for processes that own other processes and talk to them on loopback."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

from flare.errors import UnsupportedError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

LOCK_PATIENCE = 0.2  # seconds; a look takes microseconds, unless the looker is put to sleep in it
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int) -> None:
    if not sys.platform.startswith("linux"):
        raise UnsupportedError("Owning ranks needs Linux. Run the agent on a Linux host.")
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def set_parent_death_signal(signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process `signal_number` when the thread that forked it ends.

    A parent that died before this call is not noticed: compare os.getppid() afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def become_subreaper() -> None:
    """Become the parent of every orphaned descendant, so that none escapes to init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def lock_shared(descriptor: int) -> None:
    """Take a file's shared lock, which several may hold, or find that it cannot be had.

    Tries for a moment: who looks whether anybody holds a lock has the exclusive one for an instant.

    Raises:
        BlockingIOError: somebody holds the exclusive lock, and longer than that.
    """
    import fcntl  # not on Windows, where this module is imported all the same

    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_PATIENCE / 40)
        else:
            return


def take_signals(loop: AbstractEventLoop, numbers: Iterable[int], take: Callable[[int], None]) -> None:
    """Have the loop call `take` with every signal of these numbers, and ignore those that come after it.

    asyncio's own handlers go when the loop is closed: a signal that comes then, while the process tidies up
    behind itself, would end it with that signal in place of its exit status.

    Args:
        loop: runs in the main thread, from which this is called.
    """
    numbers = tuple(numbers)

    def came(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(take, number)

    def ignore() -> None:
        # The interpreter gives up handlers while it ends, but leaves what is ignored.
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    for number in numbers:
        signal.signal(number, came)
    atexit.register(ignore)


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
