"""Signals that belong to an event loop, and what becomes of them after it."""

from __future__ import annotations

import signal
import subprocess
import sys

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
