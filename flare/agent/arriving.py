"""Files on their way into the cache: several streams may write disjoint ranges of one sparse file.

A file is published when every byte of it has come, and its data is on the disk. When a stream fails, the
others are let to end, and the whole file is removed: nothing partial stays.

A file that is being received belongs to one upload. Another upload of it, or of a file into a directory that
a transfer fills, cannot touch it: it is told to wait, and finds it there, or begins it when the first one
failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from flare.agent.cache import Cache
from flare.agent.inventory import Signed, signed_at
from flare.agent.places import Entry, Place
from flare.agent.room import Reservation
from flare.agent.waiting import ask_disk, in_thread, made_in_thread
from flare.errors import (
    BusyError,
    ConflictError,
    CoreError,
    FlareError,
    IntegrityError,
    RemoteProtocolError,
    TransferError,
    TrustError,
)
from flare.files import describe_os_error
from flare_workers.ranges import Ranges

QUIET_LIMIT = 600.0  # seconds without a stream: its controller has gone, and the bytes take room
# Seconds without a stream after which another upload may begin the file anew: between two streams of one
# upload lie a connection and a handshake. An upload that was slower than that waits for the other one then.
GIVEN_UP_AFTER = 10.0
LOOK_INTERVAL = 0.25  # seconds between two looks whether uploads into a directory ended
# A connection that broke inside a file's bytes carries no ERROR any more: its controller asks once more why.
TOLD_FOR = 60.0  # seconds that the reason is kept for it
MAX_TOLD = 256  # reasons that are kept; four uploads with 64 streams each that fail at once

logger = logging.getLogger("flare.agent")

Digest = Callable[[int, str, int], Awaitable[bytes]]
"""digest(descriptor, name, size): put the file on the disk and return its SHA-256, in a worker."""


class BroughtByOtherError(Exception):
    """Another upload, or a transfer, brings the file now."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class _File:
    """One file that is being received by one or more streams of one upload.

    Args:
        descriptor: the file that lies there, open for reading and writing; closed with this.
        room: what is kept for all of it, until it is closed.
    """

    def __init__(
        self,
        path: Path,
        descriptor: int,
        size: int,
        publisher: str | None,
        uploader: Hashable,
        room: Reservation,
    ) -> None:
        self.path = path
        self.size = size
        self.uploader = uploader
        self.publisher = publisher  # of the primary that this one is to take the place of another's
        self.active: list[Ranges] = []  # what streams write now
        self.done = Ranges()
        self.failed = False
        self.whole = False  # every byte came: it is digested and published, and nobody writes to it again
        self.problem: FlareError | None = None  # why, where the reason lies here
        self.quiet_since = 0.0
        self.descriptor = descriptor
        self._held = ExitStack()
        self._held.callback(os.close, self.descriptor)
        self._held.enter_context(room)
        self._held.enter_context(room.filling(self.descriptor, size))

    @property
    def moves(self) -> bool:
        """Whether its upload goes on, as far as anybody can tell."""
        return bool(self.active) or time.monotonic() - self.quiet_since < GIVEN_UP_AFTER

    @property
    def complete(self) -> bool:
        return self.done.total == self.size and not self.active

    def close(self) -> None:
        """Close and remove; a published file has its name elsewhere."""
        self.release()
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Close, and keep no room for it any more."""
        self._held.close()

    async def remove(self) -> None:
        """Close and remove, where the disk may take long or be what failed: nobody else waits for it."""
        self.release()
        await in_thread(self.path.unlink, missing_ok=True)


class Stream:
    """One peer's share of a file. Ends with exactly one of `finish` and `fail`."""

    def __init__(self, arrivals: Arrivals, place: Place, file: _File, ranges: Ranges) -> None:
        self._arrivals = arrivals
        self._place = place
        self._file = file
        self.ranges = ranges

    @property
    def descriptor(self) -> int:
        """The sparse file, open for writing."""
        return self._file.descriptor

    async def finish(self) -> None:
        """Say that every byte of the share was written; the last share publishes the file.

        Raises:
            IntegrityError: the content is not what the file's name says.
            TransferError: another share failed, so that the file was removed. Where its reason lies at this
                node, the error has that reason's class.
            ConflictError, StorageError: it cannot be published.
        """
        await self._arrivals.release(self._place, self._file, self.ranges)

    async def fail(self, problem: FlareError | None = None) -> None:
        """Say that the share did not come; the file goes when its last stream has ended.

        Args:
            problem: why, where the reason lies at this node; its upload is told when it asks again.
        """
        await self._arrivals.drop(self._place, self._file, self.ranges, problem)


async def signed_by(place: Place, size: int, publisher: str) -> bool:
    """Tell whether a published file is one that this publisher signed, as far as anybody signs it.

    Args:
        place: of a file that is there.
        size: its bytes.
        publisher: fingerprint, hex.

    Returns:
        False for a core's primary of another publisher, and for one that is damaged.
    """
    if place.entry is None or size != place.entry.length or "/" in place.path:
        return True
    found = await _signed(place)
    return found is not None and found.publisher == publisher


async def _signed(place: Place) -> Signed | None:
    """Return what a published primary says; None for one that is damaged."""
    try:
        return await signed_at(place.folder / place.path)
    except (CoreError, TrustError):
        return None


class Arrivals:
    """Every file that is being received.

    Args:
        cache: where they go.
        digest: digests a file in a worker.

    Attributes:
        is_fetched: tells whether a transfer fills a core directory now.
    """

    def __init__(self, cache: Cache, digest: Digest) -> None:
        self._cache = cache
        self._digest = digest
        self.is_fetched: Callable[[Entry], bool] = lambda entry: False
        self._files: dict[Place, _File] = {}
        self._failures: dict[tuple[Place, Hashable], tuple[float, FlareError]] = {}
        self._beginning = asyncio.Lock()
        self._removing: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        place: Place,
        size: int,
        ranges: Ranges,
        publisher: str | None = None,
        uploader: Hashable = None,
    ) -> Stream | None:
        """Prepare for a share of a file; None when the cache holds the whole file already.

        Args:
            size: the whole file's bytes.
            ranges: the share; inside the file, not empty unless the file is.
            publisher: fingerprint of the one who signed the file, if it is a core's primary: it may take the
                place of another publisher's, or of a damaged one.
            uploader: tells the streams of one upload from another one's.

        Raises:
            BroughtByOtherError: another upload or a transfer brings it.
            ConflictError: a file of that name has another size.
            BusyError: another stream writes some of these bytes, or somebody reads what is to be replaced.
            StorageError: there is no room.
            FlareError: a share of this file by the same upload failed here a moment ago, and why.
        """
        self._tell_failure(place, uploader)
        if place.entry is None and ranges != Ranges.whole(size):
            raise RemoteProtocolError(f"PUT of a {place.kind} takes the whole file, not ranges of it.")
        replacing = None
        held, _ = await ask_disk(self._cache.have, place, size)
        there = None if held else self._cache.size_of(place)
        if there == size:  # it was published since that look, by another upload of the same core
            held, _ = await ask_disk(self._cache.have, place, size)
        if held:
            if publisher is None or await signed_by(place, size, publisher):
                return None
            replacing = publisher
            assert place.entry is not None, "only cores have publishers"
            await self._cache.check_idle(place.entry, self._pins_of(place))
        elif there not in (None, size):
            raise ConflictError(
                f"The cache holds a file named {place.path} with another size. Remove that core there first."
            )
        with self._cache.pins.pinned(place.pin):
            async with self._beginning:  # the first share of a file makes room for all of it
                self._check_whose(place, uploader)  # nothing is evicted for who waits
                await self.settle()  # what is being removed is room
                made = None
                if place not in self._files:
                    made = await self._new_file(place, size, replacing, uploader)
                # From here to the end there is no await, unless it is refused: of two streams for the same
                # bytes exactly one goes on.
                try:
                    if replacing is None and self._cache.size_of(place) == size:
                        return None
                    self._check_whose(place, uploader)
                    if made is not None:
                        self._files[place] = made
                        made = None
                finally:
                    if made is not None:
                        await made.remove()
                return self._begin(place, size, ranges, replacing)

    async def _new_file(self, place: Place, size: int, publisher: str | None, uploader: Hashable) -> _File:
        """Make room and a file in a thread: a disk that hangs holds up beginnings, and nothing else."""
        path = self._cache.new_arrival()
        with ExitStack() as unused:
            room = unused.enter_context(await self._cache.room.reserve(size))
            descriptor = await made_in_thread(
                partial(self._create, place, path, size), partial(_close_and_remove, path)
            )
            file = _File(path, descriptor, size, publisher, uploader, room)
            unused.pop_all()
        return file

    def _create(self, place: Place, path: Path, size: int) -> int:
        try:
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                os.truncate(descriptor, size)
                self._cache.begin_writing(place)
            except BaseException:
                _close_and_remove(path, descriptor)
                raise
        except OSError as problem:
            raise describe_os_error(problem, "Cannot make a file in the cache") from None
        return descriptor

    def _begin(self, place: Place, size: int, ranges: Ranges, replacing: str | None) -> Stream:
        file = self._files[place]
        if file.size != size or file.publisher != replacing:
            what = "with another size" if file.size != size else "from another publisher"
            raise ConflictError(
                f"{place.path} is being received {what}: another command or controller uploads it to this "
                "node now. Run this one again when that is done."
            )
        if file.failed:
            if file.problem is not None:
                raise _given_up(place, file.problem)
            raise BusyError(_removed_now(place))
        if file.whole or any(active.intersection(ranges).runs for active in file.active):
            raise BusyError(_uploaded_now(place))
        # Bytes that came before and come again, from a controller that starts over, are not there meanwhile.
        file.done = file.done.difference(ranges)
        file.active.append(ranges)
        self._cache.pins.pin(place.pin)
        return Stream(self, place, file, ranges)

    def _check_whose(self, place: Place, uploader: Hashable) -> None:
        """Refuse a file that is brought by another upload, or by a transfer that began before this one.

        What another upload left lying is removed.

        Raises:
            BroughtByOtherError: it is.
        """
        file = self._files.get(place)
        if file is not None and file.failed and not file.active:
            raise BusyError(_removed_now(place))
        if file is not None and file.uploader == uploader:
            return  # a transfer into the directory waits for it
        if file is not None and file.moves:
            raise BroughtByOtherError(_uploaded_now(place))
        if place.entry is not None and self.is_fetched(place.entry):
            raise BroughtByOtherError(
                f"This node fetches the core {place.entry.export} from another one now. Run this command "
                "again when that is done: what is there then is not sent again."
            )
        if file is not None:
            self._forget(place, file)

    def _forget(self, place: Place, file: _File) -> None:
        """Let go of a file at once, and remove it beside the loop: many gigabytes take a disk seconds."""
        del self._files[place]
        file.release()
        removing = asyncio.create_task(self._remove(file))
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)

    async def _remove(self, file: _File) -> None:
        try:
            await file.remove()
        except OSError as problem:
            logger.error("cannot remove %s: %s", file.path, problem.strerror)

    async def settle(self) -> None:
        """Wait until nothing is being removed any more."""
        if self._removing:
            await asyncio.wait(self._removing)

    def brings(self, place: Place) -> bool:
        """Tell whether an upload or a transfer brings a file now."""
        file = self._files.get(place)
        fetched = place.entry is not None and self.is_fetched(place.entry)
        return fetched or (file is not None and file.moves)

    async def wait_for(self, entry: Entry) -> None:
        """Wait until nobody uploads into a core directory."""
        while True:
            if not any(place.entry == entry and file.moves for place, file in self._files.items()):
                return
            await asyncio.sleep(LOOK_INTERVAL)

    async def release(self, place: Place, file: _File, ranges: Ranges) -> None:
        """End a stream that succeeded; see `Stream.finish`."""
        if file.failed:
            await self.drop(place, file, ranges)
            raise _given_up(place, file.problem)
        file.active.remove(ranges)
        file.done = file.done.union(ranges)
        if not file.complete:
            self._unpin(place, file)
            return
        file.whole = True
        file.active.append(ranges)
        try:
            # What the name does not say nobody can check here: a rank digests it before it loads.
            if place.digest:
                await self._check_name(place, file)
            if file.publisher is None:
                await in_thread(self._cache.publish, file.path, place)
            else:
                await self._replace(place, file, file.publisher)
        except BaseException:
            file.failed = True
            raise
        finally:
            self._unpin(place, file)
            del self._files[place]
            await file.remove()

    async def _replace(self, place: Place, file: _File, publisher: str) -> None:
        """Put a primary in the place of another publisher's over the same index, or of a damaged one."""
        arrived = await signed_at(file.path)
        if arrived.publisher != publisher:
            raise TrustError(f"{place.path} arrived signed by {arrived.publisher}, not by {publisher}.")
        there = await _signed(place)
        if there is not None and there.index_sha256 != arrived.index_sha256:
            raise ConflictError(
                f"{place.path} in this node's cache belongs to another core: its index differs. Remove that "
                "core there first."
            )
        await self._cache.replace(file.path, place, own_pins=self._pins_of(place))

    def _pins_of(self, place: Place) -> int:
        """Return how many of a core directory's pins are streams' of ours."""
        return sum(len(file.active) for each, file in self._files.items() if each.entry == place.entry)

    async def _check_name(self, place: Place, file: _File) -> None:
        found = (await self._digest(file.descriptor, place.path, file.size)).hex()
        if not found.startswith(place.digest):
            raise IntegrityError(
                f"{place.path} arrived with the SHA-256 {found}, which is not what its name says. "
                "It was removed; check the source and send it again."
            )

    async def drop(
        self, place: Place, file: _File, ranges: Ranges, problem: FlareError | None = None
    ) -> None:
        """End a stream that failed, or one of a file that is given up; the last one removes the file."""
        file.failed = True
        if problem is not None:
            file.problem = file.problem or problem
            self._failures[place, file.uploader] = (time.monotonic(), file.problem)
            while len(self._failures) > MAX_TOLD:
                del self._failures[next(iter(self._failures))]
        file.active.remove(ranges)
        self._unpin(place, file)
        if not file.active and self._files.get(place) is file:
            try:
                await file.remove()
            finally:
                del self._files[place]

    def _unpin(self, place: Place, file: _File) -> None:
        file.quiet_since = time.monotonic()
        self._cache.pins.unpin(place.pin)

    def _tell_failure(self, place: Place, uploader: Hashable) -> None:
        """Raise why a share of this file by the same upload failed a moment ago."""
        failed_at, problem = self._failures.get((place, uploader), (0.0, None))
        if problem is not None and time.monotonic() - failed_at < TOLD_FOR:
            raise type(problem)(problem.message)

    def forget_quiet(self) -> None:
        """Remove files of which only parts came, and nobody has sent another for long; and old reasons."""
        now = time.monotonic()
        self._failures = {key: told for key, told in self._failures.items() if now - told[0] < TOLD_FOR}
        for place, file in tuple(self._files.items()):
            if not file.active and not file.failed and now - file.quiet_since >= QUIET_LIMIT:
                self._forget(place, file)

    def close(self) -> None:
        """Give up everything: the agent ends."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _close_and_remove(path: Path, descriptor: int) -> None:
    os.close(descriptor)
    path.unlink(missing_ok=True)


def _given_up(place: Place, problem: FlareError | None) -> FlareError:
    if problem is None:
        return TransferError(f"Another stream of {place.path} failed, so that the file was given up.")
    return type(problem)(f"Another stream of {place.path} failed: {problem.message}")


def _removed_now(place: Place) -> str:
    return f"{place.path} is being given up after a failure. Send it again in a moment."


def _uploaded_now(place: Place) -> str:
    what = place.path if place.entry is None else f"{place.path} of the core {place.entry.export}"
    return (
        f"Another command or controller uploads {what} to this node now. Run this one again when that is "
        "done: what is there then is not sent again."
    )
