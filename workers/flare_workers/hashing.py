"""File -> digests: what is on the disk, checked in a worker so that nothing else waits for it."""

from __future__ import annotations

import hashlib
import os

from flare_workers.blocks import BLOCK_SIZE, ShortFileError, read_at
from flare_workers.handover import DigestTable
from flare_workers.jobs import CORRUPT, STORAGE, Hash, Result, WorkerError
from flare_workers.sink import PAGE_CACHE_WINDOW, drop_pages
from flare_workers.stream import Watch
from flare_workers.system_calls import SYNC_WAIT_AFTER, SYNC_WAIT_BEFORE, SYNC_WRITE, sync_file_range

_PIECE = 256 << 10  # read and digested at once: stays in a core's cache


def digest_ranges(job: Hash, descriptor: int, table: DigestTable | None, watch: Watch) -> Result:
    """Carry out a Hash job.

    Raises:
        WorkerError: `corrupt`, `storage` or `cancelled`.
    """
    if job.sync:
        _sync(job, descriptor, watch)
    whole = hashlib.sha256() if job.whole else None
    buffer = memoryview(bytearray(_PIECE))
    done = 0
    for offset, length in job.ranges if table is not None or whole is not None else ():
        position, end = offset, offset + length
        while position < end:
            start = position
            block_end = min((position // BLOCK_SIZE + 1) * BLOCK_SIZE, end)
            block = hashlib.sha256() if table is not None else None
            while position < block_end:
                piece = _read(job, descriptor, buffer[: block_end - position], position)
                if block is not None:
                    block.update(piece)
                if whole is not None:
                    whole.update(piece)
                position += len(piece)
            if block is not None and table is not None and block.digest() != table.next():
                number = start // BLOCK_SIZE
                raise WorkerError(
                    CORRUPT, f"block {number} of {job.name} is not the one that was signed", block=number
                )
            done += position - start
            watch.slot.bytes_done = done
            watch.check()
            if job.drop_cache:
                drop_pages(descriptor, job.file_offset + start, position - start)
    if job.drop_cache:
        drop_pages(descriptor, 0, 0)  # all of it: the kernel read ahead of us, past the ranges' ends
    return Result(done, sha256=whole.digest() if whole is not None else None)


def _sync(job: Hash, descriptor: int, watch: Watch) -> None:
    """Put a file on the disk window by window, so that a slow disk with much to write is no hanging one."""
    try:
        for start in range(0, os.fstat(descriptor).st_size, PAGE_CACHE_WINDOW):
            # The next window is on its way while this one is waited for: the disk never idles.
            sync_file_range(descriptor, start + PAGE_CACHE_WINDOW, PAGE_CACHE_WINDOW, SYNC_WRITE)
            flags = SYNC_WAIT_BEFORE | SYNC_WRITE | SYNC_WAIT_AFTER
            sync_file_range(descriptor, start, PAGE_CACHE_WINDOW, flags)
            watch.check()
        watch.announce_sync()
        os.fsync(descriptor)
    except OSError as error:
        raise WorkerError(STORAGE, f"cannot put {job.name} on the disk: {error.strerror}") from error
    watch.check()


def _read(job: Hash, descriptor: int, buffer: memoryview, position: int) -> memoryview:
    try:
        return buffer[: read_at(descriptor, buffer, job.file_offset + position)]
    except ShortFileError as error:
        raise WorkerError(STORAGE, f"{job.name} is shorter than it should be: {error}") from error
    except OSError as error:
        raise WorkerError(STORAGE, f"cannot read {job.name}: {error.strerror}") from error
