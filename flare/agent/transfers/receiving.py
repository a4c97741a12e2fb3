"""The bytes of one file over all streams at once, and what is done when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from flare.agent.file_requests import worker_failure
from flare.agent.node import Node
from flare.agent.transfers.partial import Partial
from flare.agent.transfers.plan import WantedFile
from flare.agent.transfers.route import Route, Stream, title
from flare.agent.transfers.running import Progress
from flare.agent.waiting import in_thread, settled
from flare.errors import FlareError, IntegrityError, StorageError
from flare.limits import MAX_RANGES
from flare_workers.jobs import Hash, Receive, WorkerError
from flare_workers.ranges import Ranges

# Seconds between two records of a resumable transfer: each costs an fsync, and a kill costs what came since.
CHECKPOINT_INTERVAL = 1.0
_HANGS = "The disk of this node's cache does not answer: check it, then push again."


class Receiver:
    """A transfer's streams.

    Args:
        node: this node.
        route: the way to the source.
        progress: of the transfer.
    """

    def __init__(self, node: Node, route: Route, progress: Progress) -> None:
        self._node = node
        self._route = route
        self._progress = progress
        self._stall_timeout = node.settings.agent.stall_timeout
        self._streams = [Stream(node, route, number) for number in range(route.streams)]

    @property
    def streams(self) -> int:
        """How many there are."""
        return len(self._streams)

    async def close(self) -> None:
        """End every connection."""
        for stream in self._streams:
            await stream.close()

    async def read(self, path: str, size: int, offset: int, length: int) -> bytes:
        """Return a few bytes of a file."""
        data = await self._streams[0].read(path, size, ((offset, length),), length)
        self._progress.transferred += length
        return data

    async def receive_unchecked(self, partial: Partial, offset: int, length: int) -> None:
        """Receive a part of the primary that is checked as a whole afterwards: header or digest table."""
        job = Receive(
            title=title(partial.path, 0, 1, self._route.source),
            name=partial.path,
            ranges=((offset, length),),
            size=partial.size,
            stall_timeout=self._stall_timeout,
        )
        await self._streams[0].receive(
            job,
            partial.path,
            ((offset, length),),
            partial.descriptor,
            label=f"Reading the header of {partial.path} {self._route.way(0)}",
            size=partial.size,
        )
        self._progress.transferred += length

    async def receive(self, file: WantedFile, partial: Partial, missing: Ranges) -> None:
        """Receive what is missing, in equal shares over the streams; each block is checked on arrival.

        Raises:
            FlareError: the first failure; the other streams were cancelled, and nobody writes any more.
        """
        if not missing.runs:
            return
        shares = missing.shares(self.streams)
        done = [0] * len(shares)
        keeping = None
        if partial.journal is not None:
            keeping = asyncio.create_task(self._keep_journal(file, partial, shares, done))
        try:
            async with asyncio.TaskGroup() as group:
                for number, share in enumerate(shares):
                    tell = self._teller(done, number)
                    group.create_task(self._receive_share(file, partial, share, (number, len(shares)), tell))
        except BaseExceptionGroup as problems:
            problem = self._explained(problems, partial)
            with self._progress.clearing_up(problem):
                if not isinstance(problem, IntegrityError | StorageError):
                    await self._last_record(file, partial, shares, done, keeping)
                await _end(keeping)
            raise problem from None
        except asyncio.CancelledError as problem:
            with self._progress.clearing_up(problem):
                await self._last_record(file, partial, shares, done, keeping)
            raise
        finally:
            await _end(keeping)

    async def receive_small(self, file: WantedFile, partial: Partial, stream: int) -> None:
        """Receive a file over one stream, and put it on the disk; nobody else may use that stream meanwhile.

        Args:
            stream: its number, from 0.

        Raises:
            FlareError: why it failed.
        """
        try:
            tell = self._teller([0], 0)
            await self._receive_share(file, partial, file.wanted, (0, 1), tell, small_over=stream)
        except StorageError as problem:
            raise self._with_rest(problem) from None

    def _teller(self, done: list[int], number: int) -> Callable[[int], None]:
        def tell(count: int) -> None:
            new = max(count - done[number], 0)
            done[number] += new
            self._progress.transferred += new
            self._progress.verified += new

        return tell

    async def _receive_share(
        self,
        file: WantedFile,
        partial: Partial,
        share: Ranges,
        which: tuple[int, int],
        tell: Callable[[int], None],
        small_over: int | None = None,
    ) -> None:
        number, count = which
        stream = number if small_over is None else small_over
        base = 0
        for first in range(0, len(share), MAX_RANGES):
            piece = Ranges(share.runs[first : first + MAX_RANGES])
            job = Receive(
                title=title(file.path, number, count, self._route.source),
                name=file.path,
                ranges=piece.runs,
                size=file.covered,
                digests=file.digests,
                file_offset=file.start,
                sync=small_over is not None,
                stall_timeout=self._stall_timeout,
            )
            await self._streams[stream].receive(
                job,
                file.path,
                file.on_disk(piece),
                partial.descriptor,
                label=f"Stream {number + 1}/{count} of {file.path} {self._route.way(stream)}",
                size=file.size,
                on_progress=lambda bytes_done, base=base: tell(base + bytes_done),  # type: ignore[misc]
            )
            base += piece.total

    def _explained(self, problems: BaseExceptionGroup[BaseException], partial: Partial) -> BaseException:
        """Return the failure that says most, with what else there is to say."""
        problem = worst_of(problems)
        if isinstance(problem, StorageError):
            return self._with_rest(problem)
        if isinstance(problem, FlareError) and self._node.pool.still_writes(partial.descriptor):
            # A stream that the disk does not hold may have failed first, because its peer gave up.
            return type(problem)(f"{problem.message} {_HANGS}")
        return problem

    def _with_rest(self, problem: StorageError) -> StorageError:
        left = (self._progress.total or 0) - self._progress.transferred
        return StorageError(f"{problem.message} {left} bytes of the whole transfer are still missing.")

    # -- the journal -----------------------------------------------------------------------------

    async def sync(self, path: str, partial: Partial) -> None:
        """Put a file's data on the disk, in a worker.

        Raises:
            WorkerError: it cannot be.
        """
        timeout = self._stall_timeout
        job = Hash(title=f"sync {path}", name=path, ranges=(), size=0, sync=True, stall_timeout=timeout)
        await self._node.pool.run(job, files=[partial.descriptor])

    async def _keep_journal(
        self, file: WantedFile, partial: Partial, shares: Sequence[Ranges], done: list[int]
    ) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_INTERVAL)
            await self._record(file, partial, shares, done)

    async def _record(
        self, file: WantedFile, partial: Partial, shares: Sequence[Ranges], done: list[int]
    ) -> None:
        """Put on the disk what was verified, and then say so in the journal."""
        assert partial.journal is not None
        runs = [run for share, count in zip(shares, done, strict=True) for run in share.first(count)]
        verified = Ranges.of(runs)
        if verified.difference(partial.journal.ranges).runs:
            try:
                await self.sync(file.path, partial)
            except WorkerError as problem:
                raise worker_failure(problem) from None
            await in_thread(partial.journal.add, verified)

    async def _last_record(
        self,
        file: WantedFile,
        partial: Partial,
        shares: Sequence[Ranges],
        done: list[int],
        keeping: asyncio.Task[None] | None,
    ) -> None:
        await _end(keeping)
        if keeping is None or self._node.pool.still_writes(partial.descriptor):
            return  # a disk that does not answer keeps nothing
        with contextlib.suppress(FlareError):  # the failure that ended the transfer says more
            await self._record(file, partial, shares, done)


async def _end(keeping: asyncio.Task[None] | None) -> None:
    if keeping is not None:
        keeping.cancel()
        await settled(keeping)


def worst_of(problems: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one of several failures that says most."""
    return min(_leaves(problems), key=lambda each: not isinstance(each, IntegrityError))


def _leaves(problems: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for problem in problems.exceptions:
        found += _leaves(problem) if isinstance(problem, BaseExceptionGroup) else [problem]
    return found
