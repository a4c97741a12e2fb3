"""SIGTERM and SIGHUP for commands that clean up behind themselves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the block as Ctrl-C does; the exit code is 128 and the signal's number.

    Otherwise a closed terminal leaves the half of a large copy behind. A signal that the caller ignores
    (`nohup`) stays ignored.
    """
    numbers = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
