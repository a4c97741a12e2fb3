"""One transfer from beginning to end: what is here, what is missing, fetch it, publish it, mark it.

The primary's header, index and digest table come first: they say what is to be checked, and how. Then one
file at a time, each over all streams; the primary last, so that a directory that has one has the others too.
The marker is written when every wanted byte was checked and is on the disk, and never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

from flare.agent.cache import PART_MARKER, Entry, Place
from flare.agent.file_requests import worker_failure
from flare.agent.folders import delete
from flare.agent.node import Node
from flare.agent.room import Reservation
from flare.agent.transfers.holding import speaks_of
from flare.agent.transfers.partial import Partial, kept_bytes
from flare.agent.transfers.plan import Plan, WantedFile, check_primary, make_plan
from flare.agent.transfers.receiving import Receiver
from flare.agent.transfers.route import Route
from flare.agent.transfers.running import Progress
from flare.agent.transfers.stock import Stock
from flare.agent.transfers.waiting import in_thread, settled
from flare.cores.marker import AGENT_MARKER, FileStamp, MarkedFile, Marker, read_marker
from flare.cores.primary import Primary, load_primary_isolated
from flare.cores.safetensors import PREFIX_LENGTH, header_length
from flare.errors import (
    BusyError,
    ConflictError,
    CoreError,
    FlareError,
    IntegrityError,
    NotFoundError,
    StorageError,
    TrustError,
)
from flare.files import describe_os_error
from flare.trust.grants import Package
from flare.wire.messages import FileRanges, TransferReply
from flare_workers.jobs import CORRUPT, Hash, WorkerError
from flare_workers.ranges import Ranges

_STAYS = "Another group or transfer uses that directory, so it stays, unverified: end that, then push again."

logger = logging.getLogger("flare.agent")


@dataclass(frozen=True, slots=True)
class Order:
    """A TRANSFER that passed its checks.

    Args:
        package: the core.
        entry: the directory it goes to.
        route: the way to the source.
        asked: what is wanted, as the request says it.
        resume: whether verified blocks outlive a failure.
    """

    package: Package
    entry: Entry
    route: Route
    asked: tuple[FileRanges, ...]
    resume: bool


class Intake:
    """One transfer.

    Args:
        node: this node.
        order: what is wanted.
        progress: kept up to date.
    """

    def __init__(self, node: Node, order: Order, progress: Progress) -> None:
        self._node = node
        self._cache = node.cache
        self._order = order
        self._progress = progress
        self._folder = node.cache.entry_folder(order.entry)
        self._receiver = Receiver(node, order.route, progress)
        self._stock = Stock(node.cache, order.entry, order.package)
        self._lent: dict[str, Place] = {}
        self._marks: dict[str, MarkedFile] = {}
        self._blobs: set[str] = set()  # that this transfer brought
        self._fetched = False
        self._exchanging = False  # the primary there is another publisher's, over the same index

    async def run(self) -> TransferReply:
        """Do it.

        Raises:
            IntegrityError: a byte was wrong; the core directory is gone.
            FlareError: it failed otherwise. The file that was coming is gone, unless it can be resumed; so is
                the directory, unless somebody else has files there: then those that came whole stay, too.
        """
        began = time.monotonic()
        with self._cache.pinned(str(self._order.entry)):
            try:
                try:
                    await self._carry_out()
                except OSError as problem:  # the disk is full, or somebody changes the cache by hand
                    raise describe_os_error(problem, "Cannot keep the core in the cache") from problem
            except IntegrityError as problem:
                await in_thread(self._forget_partials)
                removed = await self._remove_entry()
                await in_thread(self._forget_blobs)
                if not removed:
                    raise IntegrityError(f"{problem.message} {_STAYS}") from None
                raise
            except BaseException as problem:
                if isinstance(problem, StorageError):
                    await in_thread(self._forget_partials)
                await self._leave()
                raise
            finally:
                self._stock.close()
                await self._receiver.close()
            await in_thread(self._forget_partials)
        return TransferReply(
            bytes=self._progress.transferred, seconds=time.monotonic() - began, verified=True
        )

    async def _leave(self) -> None:
        """Take back what came, or say what of it is verified where somebody else has files there."""
        doomed = None
        if not self._order.resume:
            doomed = self._cache.take_unfinished(self._order.entry, self._stock.brought, own_pins=1)
        if doomed is not None:
            await in_thread(delete, doomed)
        elif self._marks:
            with contextlib.suppress(FlareError):  # the failure that ended the transfer says more
                await in_thread(self._mark, PART_MARKER)
        await in_thread(self._forget_blobs)

    async def _remove_entry(self) -> bool:
        """Remove the core directory; return False where somebody else uses it: then it is unverified."""
        try:
            # The check and the renaming happen without an await, so that no pin can come in between.
            doomed = self._cache.take_damaged(self._folder, None, own_pins=1)
        except BusyError:
            return False
        if doomed is not None:
            await in_thread(delete, doomed)
        return True

    async def _carry_out(self) -> None:
        await in_thread(self._stock.read)
        head, primary, table = await self._primary()
        try:
            package, entry = self._order.package, self._order.entry
            plan = await in_thread(make_plan, primary, table, package, entry.rank, self._order.asked)
            missing = {file.path: await self._missing(file) for file in plan.companions}
            missing[plan.primary.path] = (
                await self._missing(plan.primary) if head is None else await self._lack(plan.primary)
            )
            with await self._make_room(plan, missing) as room:
                for file in plan.files:
                    wanted = missing[file.path]
                    if wanted is None:
                        continue
                    partial, head = (head, None) if file is plan.primary else (None, head)
                    await self._fetch(file, wanted, partial, room)
        except BaseException as problem:
            if head is not None:
                await in_thread(head.close, keep=_may_keep(problem))
            raise
        await in_thread(self._mark, AGENT_MARKER if plan.complete else PART_MARKER)

    # -- what is here ----------------------------------------------------------------------------

    async def _primary(self) -> tuple[Partial | None, Primary, bytes]:
        """Return the primary and its digest table, and the file that they were fetched into, if they were."""
        package = self._order.package
        name = package.files[0]
        size = await in_thread(self._stock.find, name)
        if size is None and await self._stock.name_primary():
            size = package.length
        if size is None:
            return await self._fetch_primary()
        path = self._folder / name
        if size != package.length:
            raise self._conflict(name)
        try:
            primary = await load_primary_isolated(path)
            table = await in_thread(primary.digests)
        except (CoreError, TrustError, IntegrityError) as problem:
            raise IntegrityError(
                f"The core in this node's cache is damaged and was removed: {problem.message} Push it again."
            ) from None
        if primary.fingerprint != package.publisher and primary.index_sha256.hex() == package.index_sha256:
            # The same model, signed by somebody else: only the primary's bytes differ.
            self._cache.check_idle(self._order.entry, own_pins=1)
            self._exchanging = True
            return await self._fetch_primary()
        # Another core is refused and left alone, whatever it is.
        check_primary(primary, package, f"What {self._order.entry} holds on this node")
        return None, primary, table

    async def _fetch_primary(self) -> tuple[Partial, Primary, bytes]:
        package, receiver = self._order.package, self._receiver
        name, source = package.files[0], self._order.route.source
        head = await self._open_partial(name, package.length)
        try:
            prefix = await receiver.read(name, package.length, 0, PREFIX_LENGTH)
            end = PREFIX_LENGTH + header_length(prefix, f"{name} from {source}")
            if end > package.length:
                raise CoreError(f"{name} from {source} is cut off: its header ends at byte {end}.")
            await in_thread(head.write, prefix)
            await receiver.receive_unchecked(head, PREFIX_LENGTH, end - PREFIX_LENGTH)
            primary = await load_primary_isolated(head.location)
            check_primary(primary, package, f"The core on {source}")
            await receiver.receive_unchecked(head, primary.digests_offset, primary.index.digests_length)
            return head, primary, await in_thread(primary.digests)
        except BaseException as problem:
            await in_thread(head.close, keep=_may_keep(problem))
            if isinstance(problem, FlareError) and str(head.location) in problem.message:
                sentence = problem.message.replace(str(head.location), f"{name} from {source}")
                raise type(problem)(sentence) from None
            raise

    async def _missing(self, file: WantedFile) -> Ranges | None:
        """Return what is to be fetched of a file; None when the directory's file holds all that is wanted.

        Raises:
            ConflictError: a file of that name has another size.
            IntegrityError: its bytes are not the signed ones.
        """
        place = self._stock.place(file.path)
        size = await in_thread(self._stock.find, file.path, file.wanted)
        if size is None:
            return await self._lack(file)
        if size != file.size:
            raise self._conflict(file.path)
        marked = await in_thread(self._stock.marked, file.path)
        if marked is not None:
            has = Ranges.whole(file.covered) if marked.ranges is None else Ranges.of(marked.ranges)
            if not has.covers(file.wanted):
                return file.wanted.difference(has)
            self._marks[file.path] = marked
            self._progress.verified += file.wanted.total
            return None
        descriptor = self._cache.open(place)
        try:
            stamp = FileStamp.of(os.fstat(descriptor))
            await self._digest(file, file.wanted, descriptor)
        finally:
            os.close(descriptor)
        self._marks[file.path] = MarkedFile(stamp, file.marked_ranges)
        return None

    async def _lack(self, file: WantedFile) -> Ranges:
        """Return what is to be fetched of a file that is not there: all but what another directory lends."""
        lent = await in_thread(self._stock.lend, file)
        if lent is None:
            return file.wanted
        self._lent[file.path], has = lent
        return file.wanted.difference(has)

    def _conflict(self, path: str) -> ConflictError:
        return ConflictError(
            f"{self._order.entry} on this node holds another file named {path}. Remove that directory from "
            "the node's cache, then push again."
        )

    async def _digest(self, file: WantedFile, ranges: Ranges, descriptor: int) -> None:
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
            drop_cache=True,
        )
        try:
            await self._node.pool.run(job, files=[descriptor], on_progress=tell)
        except WorkerError as problem:
            self._progress.verified = before
            if problem.code != CORRUPT:
                raise worker_failure(problem) from None
            if self._stock.place(file.path).digest:
                self._cache.remove_blob(file.path)
            raise IntegrityError(
                f'Block {problem.block} of "{file.path}" in this node\'s cache is not the one that its '
                "publisher signed. The core was removed from the cache; check the disk, then push it again."
            ) from None

    async def _make_room(self, plan: Plan, missing: Mapping[str, Ranges | None]) -> Reservation:
        """Keep room for everything that is to come, and say how much that is."""
        needed = room = 0
        for file in plan.files:
            wanted = missing[file.path]
            if wanted is None:
                continue
            kept = Ranges()
            if self._order.resume and wanted.runs:
                kept = await in_thread(
                    kept_bytes,
                    self._cache,
                    self._order.entry,
                    file.path,
                    file.size,
                    self._order.package.index_sha256,
                )
            needed += wanted.difference(kept).total
            room += file.wanted.difference(kept).total
        reservation = await self._cache.room.reserve(room)
        self._progress.total = self._progress.transferred + needed
        return reservation

    # -- what is missing -------------------------------------------------------------------------

    async def _open_partial(self, path: str, size: int) -> Partial:
        return await in_thread(
            Partial,
            self._cache,
            self._order.entry,
            path,
            size,
            index_sha256=self._order.package.index_sha256,
            resume=self._order.resume,
        )

    async def _fetch(
        self, file: WantedFile, missing: Ranges, head: Partial | None, room: Reservation
    ) -> None:
        """Bring a file to its place.

        Args:
            missing: what has to come; the rest of `file.wanted` is here already.
            head: the primary's partial file, which has its header and digest table.
            room: what the whole transfer needs.
        """
        partial = head or await self._open_partial(file.path, file.size)
        try:
            has = file.wanted.difference(missing)
            tops_up = head is None and self._cache.size_of(self._stock.place(file.path)) is not None
            with room.filling(partial.descriptor, file.wanted.difference(partial.kept).total):
                if tops_up:
                    await self._copy(file, partial, has, self._stock.place(file.path))
                elif has.runs:
                    missing = await self._copy_lent(file, partial, missing)
                rest = await self._go_on(file, partial, missing)
                await self._receiver.receive(file, partial, rest)
                stamp = await self._settle(file, partial)
                self._fetched = True
                await self._publish(file, partial, tops_up)
        except BaseException as problem:
            await in_thread(partial.close, keep=_may_keep(problem))
            raise
        await in_thread(partial.discard)
        self._marks[file.path] = MarkedFile(stamp, file.marked_ranges)

    async def _copy_lent(self, file: WantedFile, partial: Partial, missing: Ranges) -> Ranges:
        """Begin with what another directory lends; return what is missing then."""
        has = file.wanted.difference(missing)
        try:
            await self._copy(file, partial, has, self._lent[file.path])
        except (IntegrityError, NotFoundError) as problem:
            logger.warning("%s: another directory's copy is of no use: %s", file.path, problem.message)
            self._progress.total = (self._progress.total or 0) + has.total
            return file.wanted
        return missing

    async def _copy(self, file: WantedFile, partial: Partial, has: Ranges, source: Place) -> None:
        """Begin with what a published file has: it is never written to, another core may share it."""
        descriptor = self._cache.open(source)
        try:
            tops_up = source == self._stock.place(file.path)
            head = ((0, file.start),) if file.start and tops_up else ()
            runs = (*head, *file.on_disk(has))
            copying = asyncio.ensure_future(asyncio.to_thread(partial.copy_from, descriptor, runs))
            try:
                await asyncio.shield(copying)
            finally:
                partial.given_up = True
                await settled(copying)
            await self._digest(file, has, partial.descriptor)
        finally:
            os.close(descriptor)

    async def _go_on(self, file: WantedFile, partial: Partial, missing: Ranges) -> Ranges:
        """Return what is missing beside what an earlier transfer left, which is digested again."""
        kept = partial.kept.intersection(missing)
        try:
            await self._digest(file, kept, partial.descriptor)
        except IntegrityError:
            logger.warning("%s: what an earlier transfer left is damaged; it starts over", file.path)
            await in_thread(partial.start_over)
            return missing
        return missing.difference(kept)

    async def _settle(self, file: WantedFile, partial: Partial) -> FileStamp:
        """Put a file on the disk; check the name of one that is named by its digest."""
        try:
            if self._stock.place(file.path).digest:
                found = await self._node.digest(partial.descriptor, file.path, file.size)
                if f"{found.hex()}.safetensors" != file.path:
                    raise IntegrityError(
                        f"{file.path} arrived with the SHA-256 {found.hex()}, which is not what its name "
                        "says. The core was removed; export it again."
                    )
            else:
                await self._receiver.sync(file.path, partial)
        except WorkerError as problem:
            raise worker_failure(problem) from None
        return FileStamp.of(os.fstat(partial.descriptor))

    async def _publish(self, file: WantedFile, partial: Partial, tops_up: bool) -> None:
        place = self._stock.place(file.path)
        exchanges = self._exchanging and file.path == self._order.package.files[0]
        if tops_up or exchanges:
            await self._cache.replace(partial.location, place, own_pins=1 if exchanges else None)
        else:
            self._cache.begin_writing(place)
            if place.digest:
                self._blobs.add(file.path)
            await in_thread(self._cache.publish, partial.location, place)
        there = (self._folder / file.path).stat()
        if there.st_ino != os.fstat(partial.descriptor).st_ino:
            raise ConflictError(f"Somebody else sent {file.path} at the same time. Push it again.")
        if not tops_up and not exchanges:
            self._stock.brought.add(file.path)

    def _mark(self, name: str) -> None:
        """Write a marker, unless the one that is there says as much already."""
        there = read_marker(self._folder / name)
        package = self._order.package
        if there is not None and speaks_of(there, package):
            same = all(there.files.get(path) == mark for path, mark in self._marks.items())
            if same and not self._fetched:
                return
            marks = {path: mark for path, mark in there.files.items() if there.holds_for(self._folder, path)}
            self._marks = {**marks, **self._marks}
        marker = Marker(package.index_sha256, self._marks, package.publisher)
        self._cache.mark(self._order.entry, marker, name)

    def _forget_blobs(self) -> None:
        for name in self._blobs:
            self._cache.drop_blob(name)

    def _forget_partials(self) -> None:
        shutil.rmtree(self._cache.resuming / str(self._order.entry), ignore_errors=True)


def _may_keep(problem: BaseException) -> bool:
    """Tell whether what came before a failure is worth keeping: not when it was wrong or takes room."""
    return not isinstance(problem, IntegrityError | StorageError | CoreError | TrustError | ConflictError)
