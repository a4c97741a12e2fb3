"""Signals that belong to an event loop, and what becomes of them after it; locks that are looked at."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flare.system import LOCK_PATIENCE, lock_shared

SCRIPT = """
import asyncio, os, signal, sys, time
from flare.system import take_signals

taken = []

async def main():
    loop = asyncio.get_running_loop()
    took = asyncio.Event()

    def take(number):
        taken.append(number)
        took.set()

    take_signals(loop, (signal.SIGTERM, signal.SIGHUP), take)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        took.clear()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(took.wait(), 10)

asyncio.run(main())
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.01)

class Late:
    def __del__(self, kill=os.kill, own=os.getpid(), number=int(signal.SIGTERM)):
        kill(own, number)  # the interpreter is about to be gone

sys.late = Late()
print(*map(int, taken))
sys.exit(3)
"""


def test_a_signal_after_the_loop_is_ignored() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.split() == [
        str(int(number)) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)
    ]
    assert done.returncode == 3


def test_a_look_at_a_lock_does_not_make_it_fail(tmp_path: Path) -> None:
    """Whoever looks whether anybody holds a lock has it for an instant, and may be put to sleep in it."""
    looker, locker = (os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2))
    try:
        fcntl.flock(looker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        threading.Timer(LOCK_PATIENCE / 4, fcntl.flock, (looker, fcntl.LOCK_UN)).start()
        lock_shared(locker)
        with pytest.raises(BlockingIOError):
            fcntl.flock(looker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(looker)
        os.close(locker)


def test_a_lock_that_is_held_is_not_waited_for(tmp_path: Path) -> None:
    holder, locker = (os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2))
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            lock_shared(locker)
    finally:
        os.close(holder)
        os.close(locker)
