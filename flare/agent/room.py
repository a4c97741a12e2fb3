"""How much the cache may take: what is there, what can be evicted, what is kept for bytes on their way.

Evicted are core directories, executables and what can be resumed, the least recently used first, but nothing
that a group, a transfer or an upload uses. A blob that no core directory links any more goes before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from flare.agent.folders import delete, files_below, is_locked
from flare.agent.pins import Pins
from flare.agent.waiting import ask_disk, look
from flare.errors import StorageError
from flare.paths import Paths
from flare.values import dataclass

SPARE_BYTES = 256 * 1024 * 1024  # left free on the disk: a full file system breaks more than a transfer
STAT_BLOCK = 512  # bytes; what st_blocks counts in
PIECE = 4096  # bytes; what file systems give out at a time, so that a file of one byte takes as many
# Seconds that a look at the whole cache is gone by. The next one sees what nobody kept room for, such as
# markers, and what people put there.
SUMS_HOLD = 60.0

logger = logging.getLogger("flare.agent")


@dataclass(frozen=True, slots=True)
class Usage:
    """What takes room in the cache, in bytes on the disk; linked files count once.

    Args:
        used: cores, blobs, executables, and files on their way.
        disk_free: on its file system, less what is left free for others.
        evictable: what `used` would shrink by if everything were evicted that nobody uses.
        evictable_disk: what the file system would get back then; ranks may hold links to the same files.
        blobs: blobs that no core directory links.
        resumable: what transfers that failed left for the next ones.
        promised: what is kept for bytes on their way.
    """

    used: int
    disk_free: int
    evictable: int
    evictable_disk: int
    blobs: int
    resumable: int
    promised: int


@dataclass(slots=True)
class _Found:
    """One inode below the cache: its bytes and links."""

    size: int
    links: int
    here: int = 0
    evictable: int = 0
    blob: int = 0


@dataclass(eq=False, slots=True)
class Reservation:
    """Room that is kept for bytes on their way until the block ends, less what is on the disk already.

    Args:
        size: bytes that are still to come.
    """

    size: int
    _files: dict[int, tuple[int, int]] = field(default_factory=dict)
    _holder: set[Reservation] | None = None

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give back what did not come; again does nothing."""
        if self._holder is not None:
            self._holder.discard(self)
            self._holder = None

    @contextlib.contextmanager
    def filling(self, descriptor: int, expected: int) -> Iterator[None]:
        """Count what comes into a file that is open for the length of the block.

        Args:
            expected: how many bytes of the reservation are this file's.
        """
        self._files[descriptor] = (expected, _on_disk(descriptor))
        try:
            yield
        finally:
            del self._files[descriptor]
            self.size -= expected

    @property
    def outstanding(self) -> int:
        """Bytes that have not come yet."""
        came = 0
        for descriptor, (expected, before) in self._files.items():
            came += min(max(_on_disk(descriptor) - before, 0), expected)
        return max(self.size - came, 0)


def _on_disk(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * STAT_BLOCK


class Room:
    """The room of one cache.

    Args:
        paths: where it lies.
        limit: the most bytes that it may take; None for what the disk has.
        arriving, resuming: where files on their way lie.
        pins: what is not evicted.
    """

    def __init__(self, paths: Paths, limit: int | None, arriving: Path, resuming: Path, pins: Pins) -> None:
        self._paths = paths
        self._limit = limit
        self._arriving = arriving
        self._resuming = resuming
        self._reservations: set[Reservation] = set()
        self._pins = pins
        self._deciding = asyncio.Lock()
        self._left = 0  # bytes below the limit at the last look, less all that was reserved since
        self._left_until = 0.0

    # -- looking ---------------------------------------------------------------------------------

    async def usage(self) -> Usage:
        """Look at everything that lies there."""
        # What is promised comes first: what arrives meanwhile is then counted twice, and not left out.
        return await look(self._look, self._pins.names, self._promised())

    def available(self, usage: Usage) -> int:
        """Return the bytes that the cache can still take, with what it would evict for them."""
        return max(self._most(usage), 0)

    def _promised(self) -> int:
        return sum(reservation.outstanding for reservation in self._reservations)

    def _free(self, usage: Usage) -> int:
        """Return what may be taken without evicting anything; less than nothing where too much is there."""
        free = usage.disk_free if self._limit is None else min(usage.disk_free, self._limit - usage.used)
        return free - usage.promised

    def _most(self, usage: Usage) -> int:
        """Return what may be taken once everything is evicted that nobody uses."""
        most = usage.disk_free + usage.evictable_disk
        if self._limit is not None:
            most = min(most, self._limit - usage.used + usage.evictable)
        return most - usage.promised

    def _look(self, pinned: frozenset[str], promised: int) -> Usage:
        paths = self._paths
        victims = set(self._unused(pinned))  # not their names: resuming/ has those of cores/
        found: dict[int, _Found] = {}
        resumable = 0
        # What is on its way comes first: a file that is published meanwhile is then seen at least once.
        for folder in (self._arriving, self._resuming, paths.cores, paths.blobs, paths.executables):
            for top in _children(folder):
                goes = top in victims
                for information in files_below(top):
                    size = information.st_blocks * STAT_BLOCK
                    file = found.setdefault(information.st_ino, _Found(size, information.st_nlink))
                    file.here += 1
                    file.evictable += goes
                    file.blob += folder == paths.blobs and top.name not in pinned
                    resumable += size if folder == self._resuming else 0
        used = evictable = evictable_disk = blobs = 0
        for file in found.values():
            used += file.size
            # A blob goes when nobody links it any more; ranks may, in their models/.
            if file.evictable + file.blob >= (file.links if file.blob else file.here):
                evictable += file.size
            if file.evictable + file.blob >= file.links:
                evictable_disk += file.size
            if file.blob == file.links:
                blobs += file.size
        return Usage(used, self._disk_free(), evictable, evictable_disk, blobs, resumable, promised)

    def _disk_free(self) -> int:
        return shutil.disk_usage(self._paths.cache).free - SPARE_BYTES

    def _unused(self, pinned: frozenset[str]) -> Iterator[Path]:
        """Yield what may be evicted, blobs aside."""
        for folder in (self._paths.cores, self._paths.executables, self._resuming):
            for path in _children(folder):
                if path.name not in pinned and not is_locked(path):
                    yield path

    # -- making ----------------------------------------------------------------------------------

    async def reserve(self, size: int, files: int = 1) -> Reservation:
        """Keep room for bytes that are to come; evict for it what nobody uses, as much as it takes.

        Nothing is evicted when that would not be enough.

        Args:
            size: bytes.
            files: in how many files they are.

        Returns:
            The reservation; it ends with its `with` block, or with `release`.

        Raises:
            StorageError: they do not fit; the message says how much does, and why.
        """
        async with self._deciding:  # two at once must not count on the same bytes
            on_disk = size + files * PIECE  # at most
            await self._make(size, on_disk)
            # For good, whether it comes or not: until the next look nobody counts what came.
            self._left -= on_disk
            reservation = Reservation(size, _holder=self._reservations)
            self._reservations.add(reservation)
            return reservation

    async def _make(self, missing: int, on_disk: int) -> None:
        # Looking at the whole cache takes long, and an upload may have thousands of files. So nothing is
        # counted as long as the disk has room, and the limit is far.
        if self._limit is None or (on_disk <= self._left and time.monotonic() < self._left_until):
            free = await ask_disk(self._disk_free)
            if max(free - self._promised(), 0) >= missing:
                return
        checked = False
        while True:
            usage = await self.usage()
            if self._limit is not None:
                self._left = self._limit - usage.used - usage.promised
                self._left_until = time.monotonic() + SUMS_HOLD
            if max(self._free(usage), 0) >= missing:
                return
            if not checked and self._most(usage) < missing:
                raise self._no_room(usage, missing)
            checked = True
            if not await self._evict_one():
                raise self._no_room(usage, missing)

    async def _evict_one(self) -> bool:
        """Evict what is least worth keeping; return False when there is nothing."""
        if await ask_disk(self._drop_unlinked_blobs):
            return True
        victim = self._least_recently_used()
        if victim is None:
            return False
        logger.info("evicting %s to make room", victim.name)
        # Choosing and renaming happen without an await, so that no pin can come in between.
        doomed = self.take_away(victim)
        await ask_disk(delete, doomed)
        return True

    def _least_recently_used(self) -> Path | None:
        found: list[tuple[float, Path]] = []
        for path in self._unused(self._pins.names):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.lstat().st_mtime, path))
        return min(found)[1] if found else None

    def _drop_unlinked_blobs(self) -> bool:
        dropped = False
        pinned = self._pins.names
        for path in _children(self._paths.blobs):
            if path.name in pinned:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_nlink == 1:
                    logger.info("evicting the blob %s to make room", path.name)
                    path.unlink()
                    dropped = True
        return dropped

    def take_away(self, path: Path) -> Path:
        """Rename a folder or file out of the cache, so that no half of it is ever seen."""
        doomed = self._arriving / f"evicted-{secrets.token_hex(8)}"
        path.rename(doomed)
        return doomed

    def _no_room(self, usage: Usage, missing: int) -> StorageError:
        by_limit = self._limit is not None and (
            self._limit - usage.used + usage.evictable < usage.disk_free + usage.evictable_disk
        )
        why = "" if by_limit else f" flare leaves {SPARE_BYTES >> 20} MiB of the disk free."
        if usage.promised:
            why += f" {usage.promised} bytes more are kept for other transfers and uploads that run now."
        remedy = (
            "Raise agent.cache_limit in config.toml, or stop groups that use cores there."
            if by_limit
            else "Free some space on that disk, or stop groups that use cores there."
        )
        return StorageError(
            f"The cache {self._paths.cache} has room for {self.available(usage)} bytes, but {missing} are "
            f"needed, even with everything evicted that nobody uses.{why} {remedy}"
        )


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
