"""Threads that wait for a disk: what they open, and what a disk that never answers holds up."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flare.agent import group_requests, looking, waiting
from flare.agent.cache import Cache
from flare.agent.driver import ask_driver
from flare.agent.inventory import Signed
from flare.agent.looking import CacheLook
from flare.agent.places import Entry, Place
from flare.agent.transfers import serving
from flare.agent.transfers.holding import Copy, shared_lock
from flare.agent.waiting import (
    Threads,
    ask_disk,
    give_up_after,
    in_thread,
    made_in_other_thread,
    made_in_thread,
)
from flare.errors import BusyError
from flare.paths import Paths
from tests.agent.world import EXPORT, drive, wait_for


class Opening:
    """Something that a slow disk opens."""

    def __init__(self, problem: OSError | None = None) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.undone: list[str] = []
        self._problem = problem

    def make(self) -> str:
        self.began.set()
        assert self.may_end.wait(10)
        if self._problem is not None:
            raise self._problem
        return "made"


Make = Callable[..., Coroutine[Any, Any, str]]
both = pytest.mark.parametrize("make", [made_in_thread, made_in_other_thread])


async def cancelled_while_made(opening: Opening, make: Make) -> None:
    task = asyncio.create_task(make(opening.make, opening.undone.append))
    assert await asyncio.to_thread(opening.began.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "a thread cannot be stopped, and is waited for"
    opening.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@both
def test_who_waits_gets_what_was_made(make: Make) -> None:
    opening = Opening()
    opening.may_end.set()
    assert asyncio.run(make(opening.make, opening.undone.append)) == "made"
    assert opening.undone == []


@both
def test_what_nobody_gets_any_more_is_undone(make: Make) -> None:
    opening = Opening()
    asyncio.run(cancelled_while_made(opening, make))
    assert opening.undone == ["made"]


@both
def test_what_was_not_made_is_not_undone(make: Make) -> None:
    opening = Opening(OSError("the disk is full"))
    asyncio.run(cancelled_while_made(opening, make))
    assert opening.undone == []


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return what a disk that hangs waits for."""
    monkeypatch.setattr(waiting, "disk_threads", Threads(2, "disk"))
    event = threading.Event()
    yield event
    event.set()


def test_a_disk_that_hangs_leaves_other_threads_alone(never: threading.Event) -> None:
    async def scenario() -> None:
        hanging = [asyncio.create_task(in_thread(never.wait)) for _ in range(40)]
        await asyncio.sleep(0)  # they begin: since Python 3.12 wait_for asks at once
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask_disk(int), 0.1)
        assert await asyncio.wait_for(waiting.in_other_thread(int), 5) == 0
        assert await asyncio.wait_for(waiting.look(int), 5) == 0
        assert sum(thread.name == "disk" and thread.daemon for thread in threading.enumerate()) >= 2
        never.set()
        assert await asyncio.gather(*hanging) == [True] * 40
        with pytest.raises(ValueError, match="invalid literal"):
            await in_thread(int, "x")

    drive(scenario())


def test_a_disk_that_hangs_does_not_hold_up_the_end(never: threading.Event) -> None:
    ended = []

    async def work() -> None:
        try:
            await in_thread(never.wait)
        finally:
            ended.append("first")
            try:
                await in_thread(never.wait)  # tidying up hangs as well
            finally:
                ended.append("second")

    async def scenario() -> None:
        for _ in range(3):
            task = asyncio.create_task(work())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not ended
        give_up_after(0.2)
        await asyncio.sleep(0.4)
        assert len(ended) == 6
        # The agent's own last call has a thread of its own, and its time.
        assert await ask_driver(lambda: time.sleep(0.3)) is None

    began = time.monotonic()
    asyncio.run(scenario())
    assert sorted(ended) == ["first"] * 3 + ["second"] * 3
    assert time.monotonic() - began < 10


# The cache on such a disk


def a_cache(folder: Path) -> Cache:
    cache = Cache(Paths.from_environment({"HOME": str(folder)}))
    cache.prepare()
    return cache


def test_nobody_waits_for_a_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, go, touched = a_cache(tmp_path), threading.Event(), []

    def utime(path: Path) -> None:
        touched.append(path)
        assert go.wait(10)

    monkeypatch.setattr("flare.agent.pins.os.utime", utime)
    name = str(Entry(EXPORT, 1000))
    with cache.pins.pinned(name), cache.pins.pinned(name):
        wait_for(lambda: bool(touched))
        cache.pins.pin("another")
        wait_for(lambda: len(touched) == 2)
        assert touched == [cache.paths.cores / name, cache.paths.cores / "another"]
        go.set()
    wait_for(lambda: len(touched) == 4)
    with cache.pins.pinned(name):
        wait_for(lambda: len(touched) == 6)


def test_status_tells_what_it_saw_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, go, looks = a_cache(tmp_path), threading.Event(), []

    def hang(*_arguments: object) -> Any:
        looks.append(1)
        assert go.wait(10)
        return see()

    see = cache.room._disk_free
    monkeypatch.setattr(cache.room, "_disk_free", hang)

    async def scenario() -> None:
        look = CacheLook(cache)
        monkeypatch.setattr(looking, "ANSWER_WITHIN", 0.2)
        cores, usage = await look.answered()
        assert (cores, usage.disk_free) == ((), 0)
        await look.answered()
        assert len(looks) == 1  # a disk that hangs holds one
        assert "the disk of this node's cache does not answer" in caplog.text
        monkeypatch.setattr(looking, "ANSWER_WITHIN", 10)
        cache.entry_folder(Entry(EXPORT, 1000)).mkdir()
        go.set()
        cores, usage = await look.answered()
        assert [core.export for core in cores] == [EXPORT]
        assert usage.disk_free > 0
        assert len(looks) == 2  # what began before the question is no answer
        go.clear()
        monkeypatch.setattr(looking, "ANSWER_WITHIN", 0.2)
        assert await look.answered() == (cores, usage)
        go.set()

    drive(scenario())


class HungRename:
    """An os.replace that takes until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self._replace = os.replace
        monkeypatch.setattr(os, "replace", self.replace)

    def replace(self, *arguments: Any, **options: Any) -> None:
        self.begun.set()
        assert threading.current_thread() is not threading.main_thread(), "the loop waits for the disk"
        assert self.go.wait(10)
        self._replace(*arguments, **options)


def a_primary(cache: Cache, entry: Entry) -> tuple[Place, Path]:
    """Publish a primary and let another one arrive."""
    place = cache.place("core", f"{entry}/core.safetensors")
    arrived = cache.new_arrival()
    arrived.write_bytes(b"first")
    cache.publish(arrived, place)
    arrived.write_bytes(b"other")
    return place, arrived


def test_a_file_is_replaced_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, entry = a_cache(tmp_path), Entry(EXPORT, 5)
    place, arrived = a_primary(cache, entry)
    disk = HungRename(monkeypatch)
    node: Any = SimpleNamespace(cache=cache, check_workers=lambda: None)
    package: Any = SimpleNamespace(
        source=None, export=EXPORT, length=5, files=("core.safetensors",), index_sha256="x", publisher="y"
    )
    copy = Copy(place.folder, "core.safetensors", entry)
    session: Any = object()

    async def signed_at(path: Path) -> Signed:
        read.append(path.read_bytes())
        return Signed("x", "y")

    async def scenario() -> None:
        cache.pins.pin(str(entry))
        exchange = asyncio.create_task(cache.replace(arrived, place, own_pins=1))
        while not disk.begun.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # A rank waits until it knows which one it reads.
        with ExitStack() as pins:
            rank = asyncio.create_task(group_requests._complete_core(node, package, pins))
            await asyncio.sleep(0.05)
            assert not rank.done()
            # A member that fetches is refused: the copy was looked at before.
            fetch = serving._send(node, session, copy, package, "to hertz", None, "core.safetensors", ())
            with pytest.raises(BusyError, match="is being replaced on this node"):
                await fetch
            # Nor does a rank that no agent started begin to read.
            with pytest.raises(BusyError, match="is being replaced"), shared_lock(place.folder):
                pass
            disk.go.set()
            await rank
            assert read == [b"other"]
        await exchange
        assert not cache.is_exchanged(entry)
        cache.pins.let_go(session)
        with cache.pins.pinned(str(entry)), pytest.raises(BusyError, match="signed by another publisher"):
            await cache.replace(arrived, place, own_pins=1)

    read: list[bytes] = []
    monkeypatch.setattr(group_requests, "signed_at", signed_at)
    drive(scenario())


def test_nothing_is_replaced_under_a_rank(tmp_path: Path) -> None:
    cache, entry = a_cache(tmp_path), Entry(EXPORT, 5)
    place, arrived = a_primary(cache, entry)
    with shared_lock(place.folder):
        for own_pins, words in ((None, "A rank serves from"), (0, "signed by another publisher")):
            with pytest.raises(BusyError, match=words):
                drive(cache.replace(arrived, place, own_pins=own_pins))
    drive(cache.replace(arrived, place))
    assert (place.folder / place.path).read_bytes() == b"other"
