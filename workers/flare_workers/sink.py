"""One worker's part of a file: writes at its own offsets, past the page cache where the filesystem can.

What has been written is not left to crowd out a GPU that shares its memory with the system. A block that lies
right is written directly: it costs no copy and no page. Anything else, and every block on a filesystem that
cannot do that, goes through the page cache, from which it is dropped behind the writer. docs/architecture.md
has the figures.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress

from flare_workers.direct import UNIT, DirectFile
from flare_workers.jobs import STORAGE, WorkerError
from flare_workers.system_calls import SYNC_WAIT_AFTER, SYNC_WAIT_BEFORE, SYNC_WRITE, sync_file_range

# A stream leaves at most two of these dirty or cached behind it: 64 streams hold 1 GiB.
PAGE_CACHE_WINDOW = 8 << 20
_NO_SPACE = {
    errno.ENOSPC: "the filesystem is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than this process may write",
}


class Sink:
    """Writes to disjoint offsets of a file that other workers write to as well.

    Args:
        descriptor: Open for writing; not closed here.
        name: The file's name in messages.
        total: How many bytes this job will write.
        drop_cache: Whether the page cache is avoided, and left where it cannot be.
        on_written: Gets how many bytes of the job are in the file, whenever that changes and in any thread.
    """

    def __init__(
        self,
        descriptor: int,
        name: str,
        total: int,
        *,
        drop_cache: bool,
        on_written: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._written = 0
        self._on_written = on_written
        self._descriptor = descriptor
        self._name = name
        self._total = total
        self._drop_cache = drop_cache
        self._direct = DirectFile.open(descriptor, self._count) if drop_cache else None
        self._window: tuple[int, int] | None = None
        self._flushing: tuple[int, int] | None = None

    def expect(self, position: int, length: int) -> None:
        """Say that the next writes fill a run of the file from its start to its end.

        Raises:
            WorkerError: As `write`.
        """
        self._settle()
        if self._direct is not None:
            self._direct.expect(position, length)

    def write(self, data: memoryview, position: int) -> None:
        """Write everything at `position`; or begin to, and see to it with the next call.

        Args:
            data: At a page's start in memory, if it is to be written directly. Left alone until the next
                call returns.
            position: In the file.

        Raises:
            WorkerError: `storage`, of this piece or the one before; when the disk is full, it says how many
                bytes are missing.
        """
        self._settle()
        if self._direct is None or position % UNIT or len(data) % UNIT:
            self._write_cached(data, position)
        else:
            self._direct.start(data, position)

    def _settle(self) -> None:
        """See the direct write that is under way to its end."""
        if self._direct is None or (ended := self._direct.settle()) is None:
            return
        if ended.error is not None:
            if ended.error.errno != errno.EINVAL:
                raise self._cannot_write(ended.error) from ended.error
            self.close()  # the filesystem opens files so, and then wants what we cannot give
        if ended.written < len(ended.data):
            self._write_cached(ended.data[ended.written :], ended.position + ended.written)

    def _count(self, count: int) -> None:
        self._written += count
        self._on_written(self._written)

    def _write_cached(self, data: memoryview, position: int) -> None:
        start = 0
        while start < len(data):
            try:
                count = os.pwrite(self._descriptor, data[start:], position + start)
            except OSError as error:
                raise self._cannot_write(error) from error
            start += count
            self._count(count)
        if self._drop_cache:
            self._follow(position, len(data))

    def finish(self, *, sync: bool) -> None:
        """See to the last write, and let go of the last pages; with `sync`, put the data on the disk first.

        Raises:
            WorkerError: `storage`.
        """
        self._settle()
        if sync:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                raise self._cannot_write(error) from error
        if self._drop_cache:
            for window in (self._flushing, self._window):
                if window is not None:
                    self._flush(window, wait=False)
            self._flushing = self._window = None

    def close(self) -> None:
        """Wait for a write that is under way, and give back what the sink opened itself."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()

    def _follow(self, position: int, length: int) -> None:
        start, end = self._window or (position, position)
        if position - end > PAGE_CACHE_WINDOW:  # small holes stay inside a window; a large one ends it
            self._turn()
            start = position
        self._window = (start, position + length)
        if position + length - start >= PAGE_CACHE_WINDOW:
            self._turn()

    def _turn(self) -> None:
        """Start writing the newest window to the disk, and wait for the one before it."""
        if self._flushing is not None:
            self._flush(self._flushing, wait=True)
        if self._window is not None:
            start, end = self._window
            self._sync(start, end, SYNC_WRITE)
        self._flushing, self._window = self._window, None

    def _flush(self, window: tuple[int, int], *, wait: bool) -> None:
        start, end = window
        flags = SYNC_WAIT_BEFORE | SYNC_WRITE | SYNC_WAIT_AFTER if wait else SYNC_WRITE
        self._sync(start, end, flags)
        drop_pages(self._descriptor, start, end - start)

    def _sync(self, start: int, end: int, flags: int) -> None:
        try:
            sync_file_range(self._descriptor, start, end - start, flags)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> WorkerError:
        if error.errno not in _NO_SPACE:
            return WorkerError(STORAGE, f"cannot write {self._name}: {error.strerror}")
        left = self._total - self._written
        what = f"cannot write {self._name}: {_NO_SPACE[error.errno]}; {left} bytes of this stream are missing"
        if error.errno != errno.ENOSPC:  # what the filesystem has free says nothing of other limits
            return WorkerError(STORAGE, f"{what}. Raise that limit and try again")
        free = 0
        with suppress(OSError):
            status = os.fstatvfs(self._descriptor)
            free = status.f_bavail * status.f_frsize
        return WorkerError(
            STORAGE,
            f"{what} and the filesystem has {free} bytes free. Make room for {max(left - free, 1)} more and"
            " try again",
        )


def drop_pages(descriptor: int, position: int, length: int) -> None:
    """Let clean pages leave the page cache; only a hint, so that it cannot fail."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, position, length, os.POSIX_FADV_DONTNEED)
