"""One worker's part of a file: writes at its own offsets, past the page cache where the filesystem can.

What has been written is not left to crowd out a GPU that shares its memory with the system. A block that lies
right is written directly (O_DIRECT): it costs no copy and no page. Anything else, and every block on a
filesystem that cannot do that, goes through the page cache, from which it is dropped behind the writer.
docs/architecture.md has the figures.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from flare_workers.jobs import STORAGE, WorkerError

# A stream leaves at most two of these dirty or cached behind it: 64 streams hold 1 GiB.
PAGE_CACHE_WINDOW = 8 << 20
_DIRECT_UNIT = 4096  # positions and lengths of direct writes: what any disk's sectors and any page divide
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Sink:
    """Writes to disjoint offsets of a file that other workers write to as well.

    Args:
        descriptor: Open for writing; not closed here.
        name: The file's name in messages.
        total: How many bytes this job will write.
        drop_cache: Whether the page cache is avoided, and left where it cannot be.
    """

    def __init__(self, descriptor: int, name: str, total: int, *, drop_cache: bool) -> None:
        self._descriptor = descriptor
        self._name = name
        self._left = total
        self._drop_cache = drop_cache
        self._direct = _open_direct(descriptor) if drop_cache else None
        self._window: tuple[int, int] | None = None
        self._flushing: tuple[int, int] | None = None

    def write(self, data: memoryview, position: int) -> None:
        """Write everything at `position`.

        Args:
            data: At a page's start in memory, if it is to be written directly.
            position: In the file.

        Raises:
            WorkerError: `storage`; when the disk is full, it says how many bytes are missing.
        """
        start = first = self._write_directly(data, position)
        while start < len(data):
            start += self._write_some(self._descriptor, data[start:], position + start)
        if self._drop_cache and first < len(data):
            self._follow(position + first, len(data) - first)

    def _write_directly(self, data: memoryview, position: int) -> int:
        """Write past the page cache what can be; how many bytes that were."""
        if self._direct is None or position % _DIRECT_UNIT or len(data) % _DIRECT_UNIT:
            return 0
        try:
            return self._write_some(self._direct, data, position)
        except WorkerError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EINVAL:
                raise
            self.close()  # the filesystem opens files so, and then wants what we cannot give
            return 0

    def _write_some(self, descriptor: int, data: memoryview, position: int) -> int:
        try:
            written = os.pwrite(descriptor, data, position)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._left -= written
        return written

    def finish(self, *, sync: bool) -> None:
        """Let go of the last pages; with `sync`, put the file's data on the disk first.

        Raises:
            WorkerError: `storage`.
        """
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
        """Give back what the sink opened itself."""
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)

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
            _sync_file_range(self._descriptor, self._window, _WRITE)
        self._flushing, self._window = self._window, None

    def _flush(self, window: tuple[int, int], *, wait: bool) -> None:
        _sync_file_range(self._descriptor, window, _WAIT_BEFORE | _WRITE | _WAIT_AFTER if wait else _WRITE)
        drop_pages(self._descriptor, window[0], window[1] - window[0])

    def _cannot_write(self, error: OSError) -> WorkerError:
        if error.errno not in _NO_SPACE:
            return WorkerError(STORAGE, f"cannot write {self._name}: {error.strerror}")
        free = 0
        with suppress(OSError):
            status = os.fstatvfs(self._descriptor)
            free = status.f_bavail * status.f_frsize
        reason = {
            errno.ENOSPC: "the filesystem is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "the file would be larger than this process may write",
        }[error.errno]
        return WorkerError(
            STORAGE,
            f"cannot write {self._name}: {reason}; {self._left} bytes of this stream are missing and the"
            f" filesystem has {free} bytes free. Make room for {max(self._left - free, 1)} more and try"
            " again",
        )


def _open_direct(descriptor: int) -> int | None:
    """Open a file again for direct writes: the flag belongs to what open returns, which others share."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def drop_pages(descriptor: int, position: int, length: int) -> None:
    """Let clean pages leave the page cache; only a hint, so that it cannot fail."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, position, length, os.POSIX_FADV_DONTNEED)


def _load_sync_file_range() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast("Callable[..., int]", function)


_sync_file_range_call = _load_sync_file_range()


def _sync_file_range(descriptor: int, window: tuple[int, int], flags: int) -> None:
    """Start or await the writing of some pages. Errors are not lost: the fsync at the end reports them."""
    if _sync_file_range_call is not None:
        _sync_file_range_call(descriptor, window[0], window[1] - window[0], flags)
