"""Transfers under way: two of one core at once become one, which lasts as long as somebody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from flare.agent.waiting import settled
from flare.errors import BusyError
from flare.session import Session
from flare.wire.messages import TransferReply

TELL_AFTER = 3.0  # seconds in which a failed transfer clears up before those who wait for it are told


@dataclass(slots=True)
class Progress:
    """How far a transfer is, in bytes.

    Args:
        transferred: came over the network.
        verified: were checked, on arrival or where they lay.
        total: will come over the network; None while that is not known.
        waiting: nothing comes yet, because an upload brings files into the directory now.
        tell: lets those who wait hear why it failed, before it has ended.
    """

    transferred: int = 0
    verified: int = 0
    total: int | None = None
    waiting: bool = False
    tell: Callable[[BaseException], None] = field(default=lambda problem: None, repr=False)

    @contextlib.contextmanager
    def clearing_up(self, problem: BaseException) -> Iterator[None]:
        """Do after a failure what waits for the disk, and let nobody wait with it for long.

        The disk may be what hangs.
        """
        timer = asyncio.get_running_loop().call_later(TELL_AFTER, self.tell, problem)
        try:
            yield
        finally:
            timer.cancel()


Work = Callable[[Progress], Awaitable[TransferReply]]


@dataclass(eq=False, slots=True)
class _Running:
    asked: Hashable
    progress: Progress
    task: asyncio.Task[TransferReply]
    outcome: asyncio.Future[TransferReply]  # known when the task has ended, or before it has cleared up
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
            BusyError: an earlier one failed, and has not cleared up yet.
            FlareError: why it failed, for everyone who waits.
        """
        while (running := self._running.get(directory)) is not None:
            if running.outcome.done():
                raise BusyError(
                    "What an earlier transfer of this core left is still being removed: the disk of this "
                    "node's cache is slow, or hangs. Push it again when that is done."
                )
            if running.asked == asked and not running.given_up:
                break
            await asyncio.wait({running.task, running.outcome}, return_when=asyncio.FIRST_COMPLETED)
        if running is None:
            running = self._begin(directory, asked, work)
        watch(running.progress)
        running.waiting += 1
        try:
            return await asyncio.shield(running.outcome)
        finally:
            running.waiting -= 1
            if not running.waiting and not running.outcome.done():
                running.given_up = True
                running.task.cancel()
                await settled(running.outcome)

    def _begin(self, directory: str, asked: Hashable, work: Work) -> _Running:
        outcome: asyncio.Future[TransferReply] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_look)
        progress = Progress(tell=lambda problem: _fail(outcome, problem))

        async def whole() -> TransferReply:
            return await work(progress)

        def end(task: asyncio.Task[TransferReply]) -> None:
            del self._running[directory]
            if task.cancelled():
                outcome.cancel()
            elif (problem := task.exception()) is not None:
                _fail(outcome, problem)
            elif not outcome.done():
                outcome.set_result(task.result())

        running = _Running(asked, progress, asyncio.create_task(whole()), outcome)
        self._running[directory] = running
        running.task.add_done_callback(end)
        return running


def _fail(outcome: asyncio.Future[TransferReply], problem: BaseException) -> None:
    if isinstance(problem, asyncio.CancelledError):
        outcome.cancel()
    elif not outcome.done():
        outcome.set_exception(problem)


def _look(outcome: asyncio.Future[TransferReply]) -> None:
    """Look at an outcome that nobody may wait for any more, which asyncio would print as forgotten."""
    if not outcome.cancelled():
        outcome.exception()
