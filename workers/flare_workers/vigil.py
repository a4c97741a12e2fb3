"""Whether a worker is still there: it says so in the shared table, and silence is what a hang looks like.

A worker that waits for a peer says every second that it is alive, and gives up by itself. One that waits for
a disk cannot, one that was stopped does not, and neither can answer. So the main process looks at the table.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from flare_workers.slots import Slot

LOOK_INTERVAL = 1.0  # seconds between two looks at a busy worker
# Seconds beyond a job's own limit. A worker that gives up by itself knows better why, and a busy machine may
# let it wait for a CPU.
MARGIN = 3.0
_HELD_UP = 2.0  # seconds that a look comes late when this process, and with it perhaps all, did not run
_STOPPED = ("T", "t")
_IN_KERNEL = "D"


class Vigil:
    """Watches over one job.

    Args:
        slot: the worker's.
        limit: Seconds of silence that are taken for a hang.
    """

    def __init__(self, slot: Slot, limit: float) -> None:
        self._slot = slot
        self._limit = limit
        self._since = self._looked = time.monotonic()

    def is_over(self) -> bool:
        """Look: whether the worker has been silent for too long.

        Time in which this process did not run either does not count: a machine that was paused, or a
        service that was frozen and thawed, has no hanging workers.
        """
        now = time.monotonic()
        if now - self._looked > LOOK_INTERVAL + _HELD_UP:
            self._since = now
        self._looked = now
        return min(self._slot.quiet_seconds, now - self._since) > self._limit


def explain_silence(pid: int) -> str:
    """Say what a silent worker waits for, as far as the system tells."""
    states = set()
    with suppress(OSError):  # it may have ended meanwhile, and not every system has these files
        for each in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                states.add(each.joinpath("stat").read_text().rpartition(")")[2].split()[0])
    if _IN_KERNEL in states:
        return "it waits for a disk"
    if states.intersection(_STOPPED):
        return "it was stopped by a signal or a debugger"
    return "the disk or the machine hangs"
