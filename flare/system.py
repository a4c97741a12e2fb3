"""What the standard library lacks for processes that own other processes and talk to them on loopback."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

from flare.errors import UnsupportedError

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


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
