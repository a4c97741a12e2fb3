"""What a transfer puts into the core directory, says of it in a marker, and takes back when it fails."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath

from flare.agent.cache import Cache
from flare.agent.folders import delete
from flare.agent.places import PART_MARKER, Entry
from flare.agent.removing import drop_blob, take_damaged, take_unfinished
from flare.agent.transfers.holding import speaks_of
from flare.agent.transfers.partial import Partial
from flare.agent.transfers.plan import WantedFile
from flare.agent.transfers.stock import Stock
from flare.agent.waiting import in_thread
from flare.cores.marker import FileStamp, MarkedFile, Marker, read_marker
from flare.errors import BusyError, ConflictError, FlareError
from flare.files import fsync_folder
from flare.trust.grants import Package


class Shelf:
    """A core directory that a transfer fills.

    Args:
        cache: the node's.
        entry: the directory.
        package: the core.
        stock: what was there already.

    Attributes:
        marks: what is verified of each file that lies there.
    """

    def __init__(self, cache: Cache, entry: Entry, package: Package, stock: Stock) -> None:
        self._cache = cache
        self._entry = entry
        self._package = package
        self._folder = cache.entry_folder(entry)
        self._stock = stock
        self._blobs: set[str] = set()  # that this transfer brought
        self._unsynced: set[Path] = set()  # folders that got files
        self._fetched = False
        self.marks: dict[str, MarkedFile] = {}

    def publish(self, file: WantedFile, partial: Partial, stamp: FileStamp) -> None:
        """Give a file that is new its name; `sync` puts the name on the disk. Blocks.

        Args:
            partial: its data is on the disk.
            stamp: what it looked like then.

        Raises:
            ConflictError: somebody else sent another one.
            StorageError: it cannot be linked.
        """
        place = self._stock.place(file.path)
        self._cache.begin_writing(place)
        self._fetched = True
        if place.digest:
            self._blobs.add(file.path)
            self._unsynced.add(self._cache.paths.blobs)
        self._cache.publish(partial.location, place, sync=False)
        self._check(file.path, partial)
        self._stock.brought.add(file.path)
        self._unsynced.update(self._folder / parent for parent in PurePosixPath(file.path).parents)
        self.marks[file.path] = MarkedFile(stamp, file.marked_ranges)

    def sync(self) -> None:
        """Put the names of published files on the disk. Blocks.

        Raises:
            OSError: they cannot be.
        """
        for folder in self._unsynced:
            fsync_folder(folder)
        self._unsynced.clear()

    async def replace(
        self, file: WantedFile, partial: Partial, stamp: FileStamp, own_pins: int | None
    ) -> None:
        """Put a file in the place of one that is there; see `Cache.replace`."""
        self._fetched = True
        await self._cache.replace(partial.location, self._stock.place(file.path), own_pins=own_pins)
        await in_thread(self._check, file.path, partial)
        self.marks[file.path] = MarkedFile(stamp, file.marked_ranges)

    def _check(self, path: str, partial: Partial) -> None:
        if (self._folder / path).stat().st_ino != os.fstat(partial.descriptor).st_ino:
            raise ConflictError(f"Somebody else sent {path} at the same time. Push it again.")

    def mark(self, name: str) -> None:
        """Write a marker, unless the one that is there says as much already. Blocks.

        Args:
            name: the marker's file.

        Raises:
            StorageError: it cannot be written.
        """
        there = read_marker(self._folder / name)
        marks = self.marks
        if there is not None and speaks_of(there, self._package):
            same = all(there.files.get(path) == mark for path, mark in marks.items())
            if same and not self._fetched:
                return
            kept = {path: mark for path, mark in there.files.items() if there.holds_for(self._folder, path)}
            marks = {**kept, **marks}
        self._cache.mark(
            self._entry, Marker(self._package.index_sha256, marks, self._package.publisher), name
        )

    async def leave(self, *, take_back: bool) -> None:
        """End a transfer that failed.

        Args:
            take_back: whether what came goes, unless somebody else has files there: then it is whole and
                verified, and is said to be.
        """
        doomed = None
        await in_thread(self._reach_disk)
        if take_back:
            doomed = take_unfinished(self._cache, self._entry, self._stock.brought, own_pins=1)
        if doomed is not None:
            await in_thread(delete, doomed)
        elif self.marks:
            with contextlib.suppress(FlareError, OSError):  # the failure that ended the transfer says more
                await in_thread(self.sync)
                await in_thread(self.mark, PART_MARKER)
        await in_thread(self._forget_blobs)

    def _reach_disk(self) -> None:
        """Wait until the disk takes changes: those that follow hold everybody up if it hangs. Blocks."""
        self._cache.new_arrival().unlink(missing_ok=True)

    async def remove(self) -> bool:
        """Remove the directory: a byte was wrong; return False where somebody else uses it.

        It is unverified then.
        """
        await in_thread(self._reach_disk)
        try:
            # The check and the renaming happen without an await, so that no pin can come in between.
            doomed = take_damaged(self._cache, self._folder, None, own_pins=1)
        except BusyError:
            return False
        if doomed is not None:
            await in_thread(delete, doomed)
        await in_thread(self._forget_blobs)
        return True

    def _forget_blobs(self) -> None:
        for name in self._blobs:
            drop_blob(self._cache, name)
