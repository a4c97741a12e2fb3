"""What the spawner and the workers do alike at the start of their lives."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_TITLE_LIMIT = 200  # characters; a file's name may be longer than what a process list can show
_HIGHEST_DESCRIPTOR = 1 << 20


def die_with_parent(parent: int) -> None:
    """Be killed when the parent dies, and end at once if it already has.

    Other systems than Linux have no such signal: there the end of the control socket does the same, once it
    is looked at.

    Args:
        parent: The parent's process id, as the parent saw it before it forked.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def leave_signals_to_parent() -> None:
    """Ignore what a terminal or systemd sends: the main process decides.

    SIGTTOU too: workers are no foreground processes, and what they write to a terminal must not stop them.
    """
    signal.set_wakeup_fd(-1)
    for name in ("INT", "TERM", "HUP", "PIPE", "XFSZ", "TTOU"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def leave_no_core_file() -> None:
    """A worker that crashes must not write its keys to the disk."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def keep_only(descriptor: int) -> None:
    """Close every descriptor but standard error and this one; standard input and output become /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, _HIGHEST_DESCRIPTOR)


def set_title(text: str) -> None:
    """Show `flare: text` in the process list; what cannot be printed becomes a question mark."""
    import setproctitle

    shown = "".join(character if character.isprintable() else "?" for character in text[:_TITLE_LIMIT])
    setproctitle.setproctitle(f"flare: {shown}")
