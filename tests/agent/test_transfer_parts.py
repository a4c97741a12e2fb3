"""Parts of a transfer without an agent: joining, waiting, topping up, locks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flare.agent.cache import Cache
from flare.agent.places import Entry
from flare.agent.transfers.holding import shared_lock
from flare.agent.transfers.running import Progress, Transfers
from flare.agent.waiting import in_thread
from flare.errors import BusyError, TransferError
from flare.paths import Paths
from flare.wire.messages import TransferReply
from tests.agent.transfer_world import MIB, Push, on_disk, random_bytes, start
from tests.agent.world import Agent, Peer, drive
from tests.cores.making import write_core, write_packed_core

REPLY = TransferReply(1, 0.5, verified=True)


class Work:
    """Work that a test lets end."""

    def __init__(self) -> None:
        self.began = 0
        self.cancelled = 0
        self.end: asyncio.Future[TransferReply] = asyncio.get_running_loop().create_future()

    async def __call__(self, progress: Progress) -> TransferReply:
        self.began += 1
        try:
            return await asyncio.shield(self.end)
        except asyncio.CancelledError:
            self.cancelled += 1
            await asyncio.sleep(0.05)  # workers drain
            raise


def test_who_joins_shares_result_and_failure() -> None:
    async def scenario() -> None:
        transfers = Transfers()
        for failure in (None, TransferError("no")):
            work = Work()
            waiting = [
                asyncio.create_task(transfers.join("core", "all", work, lambda _: None)) for _ in range(3)
            ]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0.01)
            if failure is None:
                work.end.set_result(REPLY)
            else:
                work.end.set_exception(failure)
            results = await asyncio.gather(*waiting[1:], return_exceptions=True)
            assert results == [failure or REPLY] * 2
            assert (work.began, work.cancelled) == (1, 0)

    asyncio.run(scenario())


def test_the_last_one_that_leaves_ends_it_and_the_next_begins_anew() -> None:
    async def scenario() -> None:
        transfers, work, other = Transfers(), Work(), Work()
        first = asyncio.create_task(transfers.join("core", "all", work, lambda _: None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        # It drains still: whoever comes now must not be given its end.
        second = asyncio.create_task(transfers.join("core", "all", other, lambda _: None))
        await asyncio.gather(first, return_exceptions=True)
        assert (work.cancelled, first.cancelled()) == (1, True)
        other.end.set_result(REPLY)
        assert await second == REPLY
        assert other.began == 1

    asyncio.run(scenario())


def test_another_wish_for_the_same_core_waits() -> None:
    async def scenario() -> None:
        transfers, work, other = Transfers(), Work(), Work()
        first = asyncio.create_task(transfers.join("core", "all", work, lambda _: None))
        second = asyncio.create_task(transfers.join("core", "some", other, lambda _: None))
        elsewhere = asyncio.create_task(transfers.join("core-rank1", "some", other, lambda _: None))
        await asyncio.sleep(0.01)
        assert (work.began, other.began) == (1, 1)
        work.end.set_exception(TransferError("no"))
        other.end.set_result(REPLY)
        assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], TransferError)
        assert await asyncio.gather(second, elsewhere) == [REPLY, REPLY]
        assert other.began == 2

    asyncio.run(scenario())


def test_a_failure_is_told_before_what_it_left_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.agent.transfers.running.TELL_AFTER", 0.02)

    async def scenario() -> None:
        transfers, cleared = Transfers(), asyncio.Event()

        async def fails(progress: Progress) -> TransferReply:
            problem = TransferError("it stalled")
            with progress.clearing_up(problem):
                await cleared.wait()
            raise problem

        waiting = [
            asyncio.create_task(transfers.join("core", "all", fails, lambda _: None)) for _ in range(2)
        ]
        for each in waiting:
            with pytest.raises(TransferError, match="it stalled"):
                await each
        assert transfers.runs("core"), "it clears up"
        for wish in ("all", "other"):
            with pytest.raises(BusyError, match="is still being removed: the disk of this node's cache"):
                await transfers.join("core", wish, fails, lambda _: None)
        cleared.set()
        await asyncio.sleep(0.02)
        assert not transfers.runs("core")

    asyncio.run(scenario())


def test_who_is_cancelled_does_not_wait_for_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.agent.transfers.running.TELL_AFTER", 0.02)

    async def scenario() -> None:
        transfers, cleared = Transfers(), asyncio.Event()

        async def hangs(progress: Progress) -> TransferReply:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as problem:
                with progress.clearing_up(problem):
                    await cleared.wait()
                raise
            return REPLY

        waiting = asyncio.create_task(transfers.join("core", "all", hangs, lambda _: None))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 5)
        with pytest.raises(BusyError, match="is still being removed"):
            await transfers.join("core", "all", hangs, lambda _: None)
        cleared.set()
        await asyncio.sleep(0.02)
        assert not transfers.runs("core")

    asyncio.run(scenario())


def test_a_cancelled_caller_waits_for_its_thread() -> None:
    async def scenario() -> None:
        go = threading.Event()
        done = []

        def work() -> None:
            go.wait(5)
            done.append(True)

        task = asyncio.create_task(in_thread(work))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
        go.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert done == [True]

    asyncio.run(scenario())


def test_who_serves_keeps_others_from_replacing(tmp_path: Path) -> None:
    folder = tmp_path / "core"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    with shared_lock(folder), shared_lock(folder), pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(BusyError, match="is being replaced"), shared_lock(folder):
        pass
    os.close(descriptor)
    with shared_lock(tmp_path / "gone"):
        pass


def test_a_file_that_a_rank_reads_is_not_replaced(tmp_path: Path) -> None:
    cache = Cache(Paths.from_environment({"HOME": str(tmp_path)}))
    cache.prepare()
    entry = Entry("ab" * 16, 5, 1)
    place = cache.place("core", f"{entry}/model/x")
    for content in (b"short", b"other"):
        arrived = cache.new_arrival()
        arrived.write_bytes(content)
        if content == b"short":
            cache.publish(arrived, place)
    with shared_lock(place.folder), pytest.raises(BusyError, match="A rank serves from"):
        asyncio.run(cache.replace(arrived, place))
    reader = cache.open(place)
    asyncio.run(cache.replace(arrived, place))
    assert (place.folder / place.path).read_bytes() == b"other"
    assert os.read(reader, 10) == b"short"
    os.close(reader)


@pytest.mark.parametrize("packed", [False, True])
def test_more_of_a_file_begins_with_what_is_there(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path, packed: bool
) -> None:
    pair = new_agent("source"), new_agent("destination")
    start(pair, controller)
    data = random_bytes(12 * MIB)
    if packed:
        path = write_packed_core(tmp_path / "core", data)
        rank = 0
    else:
        files = {"model/weights.safetensors": data}
        path = write_core(tmp_path / "core", files, ranks=2, rank_ranges=[None, [[0, MIB, 10 * MIB]]])
        rank = 1
    # A packed core's only rank is zero: its directory takes parts as every rank's does.
    push = Push(controller, path, pair[0], list(pair)[:: -1 if packed else 1])
    (file,) = push.files(rank)
    base = push.primary.data_start(0)
    first = ((base + 2 * MIB, 3 * MIB),)

    async def scenario() -> None:
        await push.ask(pair[1], rank, files=(replace(file, ranges=first),))
        folder = push.folder(pair[1], rank)
        assert not (folder / ".verified").exists()
        stored = folder / file.path
        assert on_disk(stored) < 4 * MIB
        before = stored.stat().st_ino
        reply = await push.ask(pair[1], rank)
        total = 12 * MIB if packed else 10 * MIB
        assert reply.bytes == total - 3 * MIB
        assert stored.stat().st_ino != before
        assert (await push.ask(pair[1], rank)).bytes == 0

    drive(scenario())
    push.same(pair[1], rank)
