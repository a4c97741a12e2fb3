"""Writes past the page cache (O_DIRECT), each beside the work on what comes after it.

A direct write returns when the disk has the bytes. A stream that waited for that would leave its CPU idle
half of the time, so a thread waits instead: the system call runs without the interpreter's lock.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from flare_workers.system_calls import allocate, is_in_memory

UNIT = 4096  # positions and lengths: what any disk's sectors and any page divide
# Taken from the filesystem at once: several writers of one file wait for each other only where a block has no
# place on the disk yet. What a job that failed leaves taken and empty is at most this.
ALLOCATION = 32 << 20
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)


@dataclass(slots=True)
class Write:
    """One write, under way or ended.

    Attributes:
        data: Left alone by everyone until it ended.
        position: In the file.
        written: How many bytes of it are in the file.
        error: Why that are not all.
    """

    data: memoryview
    position: int
    written: int = 0
    error: OSError | None = None


class DirectFile:
    """A file that is written directly, one piece at a time.

    Args:
        descriptor: Opened for direct writes; closed by `close`.
        on_written: Gets each write's bytes once they are in the file, in another thread.
    """

    def __init__(self, descriptor: int, on_written: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._on_written = on_written
        self._allocated = self._end = 0  # of the run that is being written
        self._can_allocate = True
        self._orders: SimpleQueue[Write | None] = SimpleQueue()
        self._ended: SimpleQueue[Write] = SimpleQueue()
        self._under_way = False
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, descriptor: int, on_written: Callable[[int], None]) -> DirectFile | None:
        """Open a file again: the flag belongs to what open returns, which others share.

        Returns:
            None where the system or the filesystem cannot, or where the file is memory anyway.
        """
        if not hasattr(os, "O_DIRECT") or is_in_memory(descriptor):
            return None
        try:
            direct = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return None
        return cls(direct, on_written)

    def expect(self, position: int, length: int) -> None:
        """Say that the next writes will fill a run of the file. Nothing may be under way."""
        self._allocated, self._end = position, position + length

    def start(self, data: memoryview, position: int) -> None:
        """Begin to write. Nothing may be under way."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_orders, name="direct writes", daemon=True)
            self._thread.start()
        self._under_way = True
        self._orders.put(Write(data, position))

    def settle(self) -> Write | None:
        """Wait for the write that is under way, if one is, and return it."""
        if not self._under_way:
            return None
        self._under_way = False
        return self._ended.get()

    def close(self) -> None:
        """Wait for what is under way, and close the file."""
        self.settle()
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
        os.close(self._descriptor)

    def _write_orders(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._allocate(order.position + len(order.data))
                order.written = os.pwrite(self._descriptor, order.data, order.position)
                self._on_written(order.written)
            except OSError as error:
                order.error = error
            self._ended.put(order)

    def _allocate(self, end: int) -> None:
        """Have places on the disk up to `end`."""
        while self._can_allocate and self._allocated < end <= self._end:
            length = min(ALLOCATION, self._end - self._allocated)
            try:
                allocate(self._descriptor, self._allocated, length)
            except OSError as error:
                if error.errno not in _CANNOT_ALLOCATE:
                    raise
                self._can_allocate = False  # then each write takes its own
            self._allocated += length
