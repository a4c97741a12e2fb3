"""Transfers under way: two of one core at once become one, which lasts as long as somebody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from flare.agent.cache import Cache
from flare.agent.transfers.waiting import settled
from flare.session import Session
from flare.wire.messages import TransferReply


@dataclass(slots=True)
class Progress:
    """How far a transfer is, in bytes.

    Args:
        transferred: came over the network.
        verified: were checked, on arrival or where they lay.
        total: will come over the network; None while that is not known.
        waiting: nothing comes yet, because an upload brings files into the directory now.
    """

    transferred: int = 0
    verified: int = 0
    total: int | None = None
    waiting: bool = False


Work = Callable[[Progress], Awaitable[TransferReply]]


@dataclass(eq=False, slots=True)
class _Running:
    asked: Hashable
    progress: Progress
    task: asyncio.Task[TransferReply]
    waiting: int = 0
    given_up: bool = field(default=False)


class Transfers:
    """Every transfer of a node, by core directory.

    Attributes:
        signers: who signed the grant that a session last presented: when that controller is removed, what
            it allowed ends.
    """

    def __init__(self) -> None:
        self.signers: WeakKeyDictionary[Session, bytes] = WeakKeyDictionary()
        self._running: dict[str, _Running] = {}
        self._launches: dict[str, set[asyncio.Event]] = {}
        self._held: WeakKeyDictionary[Session, dict[str, Callable[[str], None]]] = WeakKeyDictionary()

    def hold(self, session: Session, cache: Cache, name: str) -> None:
        """Keep a core directory from being evicted for as long as a session lasts that fetched from it."""
        held = self._held.setdefault(session, {})
        if name not in held:
            cache.pin(name)
            held[name] = cache.unpin

    def let_go(self, session: Session) -> None:
        """Let go of what a session, which has ended, fetched from."""
        for name, unpin in self._held.pop(session, {}).items():
            unpin(name)

    @contextlib.contextmanager
    def of_launch(self, launch: str) -> Iterator[asyncio.Event]:
        """Yield what is set when the launch that bytes are fetched for is stopped meanwhile."""
        stopped = asyncio.Event()
        events = self._launches.setdefault(launch, set())
        events.add(stopped)
        try:
            yield stopped
        finally:
            events.discard(stopped)
            if not events:
                del self._launches[launch]

    def stop(self, launch: str) -> None:
        """End what is fetched for a launch; what somebody else waits for too goes on."""
        for stopped in self._launches.get(launch, ()):
            stopped.set()

    def runs(self, directory: str) -> bool:
        """Tell whether a transfer into a core directory is under way."""
        return directory in self._running

    async def join(
        self, directory: str, asked: Hashable, work: Work, watch: Callable[[Progress], None]
    ) -> TransferReply:
        """Do the work, or wait for the same work that is done already, and return its result.

        Args:
            directory: the core directory; one transfer at a time for each.
            asked: what is to be there afterwards; another wish waits until the first is fulfilled.
            work: does it. It is cancelled when nobody waits for it any more.
            watch: gets the progress to look at.

        Raises:
            FlareError: why it failed, for everyone who waits.
        """
        while (running := self._running.get(directory)) is not None:
            if running.asked == asked and not running.given_up:
                break
            await asyncio.wait({running.task})
        if running is None:
            running = self._begin(directory, asked, work)
        watch(running.progress)
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting and not running.task.done():
                running.given_up = True
                running.task.cancel()
                await settled(running.task)

    def _begin(self, directory: str, asked: Hashable, work: Work) -> _Running:
        progress = Progress()

        async def whole() -> TransferReply:
            return await work(progress)

        running = _Running(asked, progress, asyncio.create_task(whole()))
        self._running[directory] = running
        running.task.add_done_callback(lambda _: self._running.pop(directory, None))
        return running
