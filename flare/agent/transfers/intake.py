"""One transfer from beginning to end: what is here, what is missing, fetch it, publish it, mark it.

The primary's header, index and digest table come first: they say what is to be checked, and how. Then the
small files, each over one stream, and larger ones over all streams, one at a time; the primary last, so that
a directory that has one has the others too.
The marker is written when every wanted byte was checked and is on the disk, and never before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence

from flare.agent.file_requests import worker_failure
from flare.agent.node import Node
from flare.agent.places import PART_MARKER, Entry, Place
from flare.agent.room import Reservation
from flare.agent.transfers.partial import Partial, kept_bytes
from flare.agent.transfers.plan import Plan, WantedFile, check_primary, make_plan
from flare.agent.transfers.receiving import Receiver, worst_of
from flare.agent.transfers.route import Route
from flare.agent.transfers.running import Progress
from flare.agent.transfers.shelf import Shelf
from flare.agent.transfers.stock import Stock
from flare.agent.transfers.survey import Survey
from flare.agent.waiting import ask_disk, in_thread, made_in_thread, settled
from flare.cores.marker import AGENT_MARKER, FileStamp
from flare.cores.primary import Primary, load_primary_isolated
from flare.cores.safetensors import PREFIX_LENGTH, header_length
from flare.errors import (
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
from flare.values import dataclass
from flare.wire.messages import FileRanges, TransferReply
from flare_workers.blocks import BLOCK_SIZE
from flare_workers.jobs import WorkerError
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
        self._shelf = Shelf(node.cache, order.entry, order.package, self._stock)
        self._survey = Survey(node, order.entry, self._stock, self._shelf, progress)
        self._exchanging = False  # the primary there is another publisher's, over the same index

    async def run(self) -> TransferReply:
        """Do it.

        Raises:
            IntegrityError: a byte was wrong; the core directory is gone.
            FlareError: it failed otherwise. The file that was coming is gone, unless it can be resumed; so is
                the directory, unless somebody else has files there: then those that came whole stay, too.
        """
        began = time.monotonic()
        with self._cache.pins.pinned(str(self._order.entry)):
            try:
                try:
                    await self._carry_out()
                except OSError as problem:  # the disk is full, or somebody changes the cache by hand
                    raise describe_os_error(problem, "Cannot keep the core in the cache") from problem
            except IntegrityError as problem:
                with self._progress.clearing_up(problem):
                    await in_thread(self._forget_partials)
                    removed = await self._shelf.remove()
                if not removed:
                    raise IntegrityError(f"{problem.message} {_STAYS}") from None
                raise
            except BaseException as problem:
                with self._progress.clearing_up(problem):
                    if isinstance(problem, StorageError):
                        await in_thread(self._forget_partials)
                    await self._shelf.leave(take_back=not self._order.resume)
                raise
            finally:
                self._stock.close()
                await self._receiver.close()
            await in_thread(self._forget_partials)
        return TransferReply(
            bytes=self._progress.transferred, seconds=time.monotonic() - began, verified=True
        )

    async def _carry_out(self) -> None:
        await in_thread(self._stock.read)
        head, primary, table = await self._primary()
        try:
            package, entry = self._order.package, self._order.entry
            plan = await in_thread(make_plan, primary, table, package, entry.rank, self._order.asked)
            missing = await self._survey.missing(
                plan, new_primary=head is not None, lend_primary=not self._exchanging
            )
            with await self._make_room(plan, missing) as room:
                small = [
                    file
                    for file in plan.companions
                    if file.path in self._survey.new and file.size <= BLOCK_SIZE
                ]
                await self._fetch_small(small, room)
                for file in plan.files:
                    wanted = missing[file.path]
                    if wanted is None or file.path in self._shelf.marks:
                        continue
                    if file is plan.primary:
                        await in_thread(self._shelf.sync)
                    # From here on `_fetch` lets go of what it was given.
                    partial, head = (head, None) if file is plan.primary else (None, head)
                    await self._fetch(file, wanted, partial, room)
        except BaseException as problem:
            if head is not None:
                await self._let_go(head, problem)
            raise
        await in_thread(self._shelf.sync)
        await in_thread(self._shelf.mark, AGENT_MARKER if plan.complete else PART_MARKER)

    async def _let_go(self, partial: Partial, problem: BaseException) -> None:
        """Keep what came of a file for the next transfer, if that may go on with it.

        Not where a worker hangs in a write to it that nobody can stop: the name goes, and the bytes with the
        worker.
        """
        keep = _may_keep(problem) and not self._node.pool.still_writes(partial.descriptor)
        with self._progress.clearing_up(problem):
            await in_thread(partial.close, keep=keep)

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
            raise self._survey.conflict(name)
        try:
            primary = await load_primary_isolated(path)
            table = await in_thread(primary.digests)
        except (CoreError, TrustError, IntegrityError) as problem:
            raise IntegrityError(
                f"The core in this node's cache is damaged and was removed: {problem.message} Push it again."
            ) from None
        if primary.fingerprint != package.publisher and primary.index_sha256.hex() == package.index_sha256:
            # The same model, signed by somebody else: only the primary's bytes differ.
            await self._cache.check_idle(self._order.entry, own_pins=1)
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
            await self._let_go(head, problem)
            if isinstance(problem, FlareError) and str(head.location) in problem.message:
                sentence = problem.message.replace(str(head.location), f"{name} from {source}")
                raise type(problem)(sentence) from None
            raise

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
        reservation = await self._cache.room.reserve(room, files=len(missing))
        self._progress.total = self._progress.transferred + needed
        return reservation

    # -- what is missing -------------------------------------------------------------------------

    async def _fetch_small(self, files: Sequence[WantedFile], room: Reservation) -> None:
        """Bring new files of one block at most, a stream for each: they are over before others could help."""
        waiting = iter(files)

        async def work(stream: int) -> None:
            for file in waiting:
                partial = await self._open_partial(file.path, file.size, resume=False)
                try:
                    with room.filling(partial.descriptor, file.wanted.total):
                        await self._receiver.receive_small(file, partial, stream)
                        await in_thread(self._place_small, file, partial)
                except BaseException as problem:
                    await self._let_go(partial, problem)
                    raise
                await in_thread(partial.discard)

        try:
            async with asyncio.TaskGroup() as group:
                for stream in range(min(self._receiver.streams, len(files))):
                    group.create_task(work(stream))
        except BaseExceptionGroup as problems:
            raise worst_of(problems) from None

    def _place_small(self, file: WantedFile, partial: Partial) -> None:
        """Publish a file whose one block was checked, and is on the disk."""
        digest = file.digests or hashlib.sha256().digest()
        if self._stock.place(file.path).digest:
            _check_name(file.path, digest)
        self._shelf.publish(file, partial, FileStamp.of(os.fstat(partial.descriptor)))

    async def _open_partial(self, path: str, size: int, *, resume: bool | None = None) -> Partial:
        order = self._order
        index, resume = order.package.index_sha256, order.resume if resume is None else resume
        return await made_in_thread(
            lambda: Partial(self._cache, order.entry, path, size, index_sha256=index, resume=resume),
            lambda made: made.close(keep=True),
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
                if self._exchanging and file.path == self._order.package.files[0]:
                    await self._shelf.replace(file, partial, stamp, own_pins=1)
                elif tops_up:
                    await self._shelf.replace(file, partial, stamp, own_pins=None)
                else:
                    await in_thread(self._shelf.publish, file, partial, stamp)
        except BaseException as problem:
            await self._let_go(partial, problem)
            raise
        await in_thread(partial.discard)

    async def _copy_lent(self, file: WantedFile, partial: Partial, missing: Ranges) -> Ranges:
        """Begin with what another directory lends; return what is missing then."""
        has = file.wanted.difference(missing)
        try:
            await self._copy(file, partial, has, self._survey.lent[file.path])
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
            copying = asyncio.ensure_future(ask_disk(partial.copy_from, descriptor, runs))
            try:
                await asyncio.shield(copying)
            finally:
                partial.given_up = True
                await settled(copying)
            await self._survey.digest(file, has, partial.descriptor)
        finally:
            os.close(descriptor)

    async def _go_on(self, file: WantedFile, partial: Partial, missing: Ranges) -> Ranges:
        """Return what is missing beside what an earlier transfer left, which is digested again."""
        kept = partial.kept.intersection(missing)
        try:
            await self._survey.digest(file, kept, partial.descriptor)
        except IntegrityError:
            logger.warning("%s: what an earlier transfer left is damaged; it starts over", file.path)
            await in_thread(partial.start_over)
            return missing
        return missing.difference(kept)

    async def _settle(self, file: WantedFile, partial: Partial) -> FileStamp:
        """Put a file on the disk; check the name of one that is named by its digest."""
        try:
            if self._stock.place(file.path).digest:
                _check_name(file.path, await self._node.digest(partial.descriptor, file.path, file.size))
            else:
                await self._receiver.sync(file.path, partial)
        except WorkerError as problem:
            raise worker_failure(problem) from None
        return FileStamp.of(os.fstat(partial.descriptor))

    def _forget_partials(self) -> None:
        shutil.rmtree(self._cache.resuming / str(self._order.entry), ignore_errors=True)


def _check_name(path: str, digest: bytes) -> None:
    """Refuse a file that is named by another digest than its own."""
    if f"{digest.hex()}.safetensors" != path:
        raise IntegrityError(
            f"{path} arrived with the SHA-256 {digest.hex()}, which is not what its name says. The core was "
            "removed; export it again."
        )


def _may_keep(problem: BaseException) -> bool:
    """Tell whether what came before a failure is worth keeping: not when it was wrong or takes room."""
    return not isinstance(problem, IntegrityError | StorageError | CoreError | TrustError | ConflictError)
