"""What is here of a core already, held against its signed digests, and so what a transfer has to fetch."""

from __future__ import annotations

import os

from flare.agent.file_requests import worker_failure
from flare.agent.node import Node
from flare.agent.places import Entry, Place
from flare.agent.removing import remove_blob
from flare.agent.transfers.plan import Plan, WantedFile
from flare.agent.transfers.running import Progress
from flare.agent.transfers.shelf import Shelf
from flare.agent.transfers.stock import Found, Stock
from flare.agent.waiting import in_thread
from flare.cores.marker import FileStamp, MarkedFile
from flare.errors import ConflictError, IntegrityError
from flare_workers.jobs import CORRUPT, Hash, WorkerError
from flare_workers.ranges import Ranges


class Survey:
    """Looks at what one transfer finds.

    Args:
        node: this node.
        entry: the directory that the transfer fills.
        stock: what is here of the core.
        shelf: is told what proved right.
        progress: kept up to date.

    Attributes:
        new: paths of files of which nothing is here.
        lent: where another directory has a part of a file.
    """

    def __init__(self, node: Node, entry: Entry, stock: Stock, shelf: Shelf, progress: Progress) -> None:
        self._node = node
        self._cache = node.cache
        self._entry = entry
        self._stock = stock
        self._shelf = shelf
        self._progress = progress
        self.new: set[str] = set()
        self.lent: dict[str, Place] = {}

    async def missing(self, plan: Plan, *, new_primary: bool, lend_primary: bool) -> dict[str, Ranges | None]:
        """Return what is to be fetched of each file; None when the directory's file holds all that is wanted.

        Args:
            new_primary: whether the primary comes anew, whatever lies there.
            lend_primary: whether another directory's may be its beginning then.

        Raises:
            ConflictError: a file has another size.
            IntegrityError: bytes are not the signed ones.
        """
        files = plan.companions if new_primary else plan.files
        found = await in_thread(lambda: [self._stock.look(file) for file in files])
        missing = {
            file.path: await self._missing(file, here) for file, here in zip(files, found, strict=True)
        }
        if new_primary:
            lent = await in_thread(self._stock.lent, plan.primary) if lend_primary else Found(None)
            missing[plan.primary.path] = self._lack(plan.primary, lent)
        return missing

    async def _missing(self, file: WantedFile, here: Found) -> Ranges | None:
        place = self._stock.place(file.path)
        if here.size is None:
            return self._lack(file, here)
        if here.size != file.size:
            raise self.conflict(file.path)
        if here.marked is not None:
            ranges = here.marked.ranges
            has = Ranges.whole(file.covered) if ranges is None else Ranges.of(ranges)
            if not has.covers(file.wanted):
                return file.wanted.difference(has)
            self._shelf.marks[file.path] = here.marked
            self._progress.verified += file.wanted.total
            return None
        descriptor = self._cache.open(place)
        try:
            stamp = FileStamp.of(os.fstat(descriptor))
            await self.digest(file, file.wanted, descriptor)
        finally:
            os.close(descriptor)
        self._shelf.marks[file.path] = MarkedFile(stamp, file.marked_ranges)
        return None

    def _lack(self, file: WantedFile, here: Found) -> Ranges:
        """Return what is to be fetched of a file that is not there: all but what another directory lends."""
        if here.lender is None:
            self.new.add(file.path)
        else:
            self.lent[file.path] = self._stock.borrow(here.lender, file.path)
        return file.wanted.difference(here.lent)

    def conflict(self, path: str) -> ConflictError:
        """Return the refusal of a directory that has a file of another size."""
        return ConflictError(
            f"{self._entry} on this node holds another file named {path}. Remove that directory from "
            "the node's cache, then push again."
        )

    async def digest(self, file: WantedFile, ranges: Ranges, descriptor: int) -> None:
        """Check bytes that this transfer did not bring itself.

        Raises:
            IntegrityError: a block is not the signed one.
        """
        if not ranges.runs:
            return
        before = self._progress.verified

        def tell(count: int) -> None:
            self._progress.verified = before + count

        job = Hash(
            title=f"verify {file.path}",
            name=file.path,
            ranges=ranges.runs,
            size=file.covered,
            digests=file.digests,
            file_offset=file.start,
            stall_timeout=self._node.settings.agent.stall_timeout,
            drop_cache=True,
        )
        try:
            await self._node.pool.run(job, files=[descriptor], on_progress=tell)
        except WorkerError as problem:
            self._progress.verified = before
            if problem.code != CORRUPT:
                raise worker_failure(problem) from None
            if self._stock.place(file.path).digest:
                await in_thread(remove_blob, self._cache, file.path)
            raise IntegrityError(
                f'Block {problem.block} of "{file.path}" in this node\'s cache is not the one that its '
                "publisher signed. The core was removed from the cache; check the disk, then push it again."
            ) from None
