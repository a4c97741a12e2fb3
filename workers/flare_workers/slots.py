"""The table that the main process, the spawner and the workers share: how far each job is.

It is an anonymous shared mapping made before the spawner is forked: no name, no file, gone with the last
process. It holds numbers only, never a key. Every field is one aligned 64-bit word that one side writes, so a
reader never sees half of a value.
"""

from __future__ import annotations

import mmap
import time
from enum import IntEnum

SLOT_LIMIT = 512  # eight destinations of 64 streams each; a word-table of this size is 32 KiB
_WORDS = 8  # one cache line a slot, so that workers do not slow each other down
_DONE, _STATE, _HEARTBEAT, _CANCEL = range(4)


class SlotState(IntEnum):
    """Written by the worker, except for FREE."""

    FREE = 0  # no worker; set by the pool before a worker is asked for and after its death was reported
    IDLE = 1  # the worker waits for a job; after its start and after each job
    BUSY = 2  # it carries one out; after it read the order


class Slots:
    """All slots.

    Args:
        count: How many workers there can be.
    """

    def __init__(self, count: int = SLOT_LIMIT) -> None:
        self.count = count
        self._map = mmap.mmap(-1, count * _WORDS * 8)
        self._words = memoryview(self._map).cast("Q")

    def __getitem__(self, index: int) -> Slot:
        if not 0 <= index < self.count:
            raise IndexError(f"there is no slot {index}; there are {self.count}")
        return Slot(self._words[index * _WORDS : (index + 1) * _WORDS])


class Slot:
    """One worker's line in the table."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @property
    def bytes_done(self) -> int:
        """Bytes of the job's ranges, in order, that were sent, or verified and written; by the worker."""
        return int(self._words[_DONE])

    @bytes_done.setter
    def bytes_done(self, value: int) -> None:
        self._words[_DONE] = value

    @property
    def state(self) -> SlotState:
        """What the worker does."""
        return SlotState(self._words[_STATE])

    @state.setter
    def state(self, value: SlotState) -> None:
        self._words[_STATE] = value

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the worker said that it is alive: at least once a second, unless a disk holds it.

        0 until a silence is over that it announced.
        """
        return max(time.monotonic_ns() - int(self._words[_HEARTBEAT]), 0) / 1e9

    def beat(self, ahead: float = 0.0) -> None:
        """Say that the worker is alive, and will not be heard of for some seconds."""
        self._words[_HEARTBEAT] = time.monotonic_ns() + int(ahead * 1e9)

    def cancel(self, job_number: int) -> None:
        """Ask the worker to give up this job, and not a later one; by the pool."""
        self._words[_CANCEL] = job_number

    def is_cancelled(self, job_number: int) -> bool:
        """Whether this job was asked to be given up."""
        return bool(self._words[_CANCEL] == job_number)

    def reset(self) -> None:
        """Make the slot ready for another worker."""
        for word in range(_WORDS):
            self._words[word] = 0
