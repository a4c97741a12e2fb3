"""Files on their way into the cache, without a network."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from flare.agent import arriving
from flare.agent.arriving import Arrivals, BroughtByOtherError
from flare.agent.cache import Cache
from flare.agent.places import Entry, Place
from flare.cores.marker import Marker
from flare.errors import BusyError, ConflictError, IdentityError, StorageError, TransferError
from flare.paths import Paths
from flare_workers.ranges import Ranges
from tests.agent.world import drive

ENTRY = Entry("ab" * 16, 100)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(Paths.from_environment({"HOME": str(tmp_path)}))
    cache.prepare()
    return cache


def arrivals_of(cache: Cache) -> Arrivals:
    async def digest(descriptor: int, name: str, size: int) -> bytes:
        return hashlib.sha256(os.pread(descriptor, size, 0)).digest()

    return Arrivals(cache, digest)


def left(cache: Cache) -> int:
    return len(list(cache.arriving.iterdir()))


def test_one_failed_share_gives_the_file_up(cache: Cache) -> None:
    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        place = cache.place("core", f"{ENTRY}/core.safetensors")
        first = await arrivals.begin(place, 100, Ranges.of(((0, 50),)))
        second = await arrivals.begin(place, 100, Ranges.of(((50, 50),)))
        assert first is not None
        assert second is not None
        await first.fail()
        assert left(cache) == 1  # the other one still writes
        with pytest.raises(BusyError, match="is being given up"):
            await arrivals.begin(place, 100, Ranges.of(((0, 50),)))
        with pytest.raises(TransferError, match=r"Another stream of .* failed"):
            await second.finish()
        assert left(cache) == 0
        assert await arrivals.begin(place, 100, Ranges.whole(100)) is not None
        arrivals.close()
        assert left(cache) == 0

    drive(scenario())


def test_a_file_that_comes_between_two_looks_is_no_conflict(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = cache.place("core", f"{ENTRY}/model/config.json")
    have = cache.have
    looks: list[bool] = []

    def late(asked: Place, size: int) -> tuple[bool, bool]:
        found = have(asked, size)
        if not looks:  # another upload publishes it right after this look
            arrived = cache.new_arrival()
            arrived.write_bytes(b"{}")
            cache.publish(arrived, place)
        looks.append(found[0])
        return found

    monkeypatch.setattr(cache, "have", late)

    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        assert await arrivals.begin(place, 2, Ranges.whole(2)) is None
        assert looks == [False, True]
        with pytest.raises(ConflictError, match="with another size"):
            await arrivals.begin(place, 3, Ranges.whole(3))

    drive(scenario())


def test_an_upload_that_asks_again_hears_why_it_failed(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        place = cache.place("core", f"{ENTRY}/core.safetensors")
        halves = [Ranges.of(((start, 50),)) for start in (0, 50)]
        first, second = [await arrivals.begin(place, 100, half, None, "an upload") for half in halves]
        assert first is not None
        assert second is not None
        await first.fail(StorageError("the filesystem is full"))
        with pytest.raises(StorageError, match=r"^the filesystem is full$"):
            await arrivals.begin(place, 100, halves[0], None, "an upload")
        with pytest.raises(StorageError, match=r"Another stream of core\.safetensors failed: the filesystem"):
            await second.finish()
        with pytest.raises(StorageError, match=r"^the filesystem is full$"):
            await arrivals.begin(place, 100, halves[0], None, "an upload")
        assert left(cache) == 0
        # Another upload, another file, and a moment later: nothing of it is left.
        another = await arrivals.begin(place, 100, halves[0], None, "another upload")
        assert another is not None
        await another.fail()
        monkeypatch.setattr(arriving, "TOLD_FOR", 0.0)
        assert await arrivals.begin(place, 100, halves[0], None, "an upload") is not None
        arrivals.forget_quiet()
        assert arrivals._failures == {}
        arrivals.close()

    drive(scenario())


def test_reasons_are_bounded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "MAX_TOLD", 3)

    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        place = cache.place("core", f"{ENTRY}/core.safetensors")
        for number in range(5):
            stream = await arrivals.begin(place, 100, Ranges.whole(100), None, number)
            assert stream is not None
            await stream.fail(StorageError("full"))
        assert [uploader for _, uploader in arrivals._failures] == [2, 3, 4]

    drive(scenario())


def test_who_uploads_at_the_same_time_hears_what_to_do(cache: Cache) -> None:
    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        place = cache.place("core", f"{ENTRY}/core.safetensors")
        first = await arrivals.begin(place, 100, Ranges.whole(100))
        assert first is not None
        with pytest.raises(BusyError) as refused:
            await arrivals.begin(place, 100, Ranges.of(((0, 50),)))
        assert refused.value.message == (
            f"Another command or controller uploads core.safetensors of the core {ENTRY.export} to this node "
            "now. Run this one again when that is done: what is there then is not sent again."
        )
        with pytest.raises(ConflictError, match=r"with another size: .* Run this one again when"):
            await arrivals.begin(place, 90, Ranges.whole(90))
        await first.finish()  # the refusals did not disturb it
        assert await arrivals.begin(place, 100, Ranges.of(((0, 50),))) is None

    drive(scenario())


def test_another_upload_cannot_harm_the_first_one(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        place = cache.place("core", f"{ENTRY}/core.safetensors")
        one, two = Ranges.of(((0, 50),)), Ranges.of(((50, 50),))
        first = await arrivals.begin(place, 100, one, uploader="first")
        assert first is not None
        for ranges in (one, two):  # the second half is free, and belongs to the first upload all the same
            with pytest.raises(BroughtByOtherError, match=r"uploads core\.safetensors of the core .* now\."):
                await arrivals.begin(place, 100, ranges, uploader="second")
        await first.finish()
        with pytest.raises(BroughtByOtherError):  # its other half may begin at any moment
            await arrivals.begin(place, 100, two, uploader="second")
        rest = await arrivals.begin(place, 100, two, uploader="first")
        assert rest is not None
        await rest.finish()
        assert await arrivals.begin(place, 100, one, uploader="second") is None

        # One that failed, or was left half done, is begun anew by the next.
        other = cache.place("core", f"{ENTRY}/model/a")
        half = await arrivals.begin(other, 100, one, uploader="first")
        assert half is not None
        await half.fail()
        half = await arrivals.begin(other, 100, one, uploader="second")
        assert half is not None
        await half.finish()
        monkeypatch.setattr(arriving, "GIVEN_UP_AFTER", 0.0)
        third = await arrivals.begin(other, 100, two, uploader="third")
        assert third is not None
        await third.finish()
        assert cache.size_of(other) is None  # the second one's half is gone with it
        arrivals.close()

    drive(scenario())


def test_an_upload_and_a_transfer_of_one_core_wait_for_each_other(cache: Cache) -> None:
    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        first, second = (cache.place("core", f"{ENTRY}/{name}") for name in ("core.safetensors", "model/a"))
        one, two = Ranges.of(((0, 50),)), Ranges.of(((50, 50),))
        stream = await arrivals.begin(first, 100, one, uploader="first")
        assert stream is not None
        arrivals.is_fetched = lambda entry: entry == ENTRY  # a transfer begins now
        waiting = asyncio.create_task(arrivals.wait_for(ENTRY))
        with pytest.raises(BroughtByOtherError, match=f"fetches the core {ENTRY.export} from another one"):
            await arrivals.begin(second, 100, one, uploader="first")
        rest = await arrivals.begin(first, 100, two, uploader="first")  # what it began it may end
        assert rest is not None
        await stream.finish()
        assert not (await asyncio.wait({waiting}, timeout=0.5))[0]
        await rest.finish()
        await waiting
        await arrivals.wait_for(Entry("cd" * 16, 100))

    drive(scenario())


def test_a_file_counts_once_from_its_first_share_on(tmp_path: Path) -> None:
    mib = 1 << 20
    cache = Cache(Paths.from_environment({"HOME": str(tmp_path)}), 10 * mib)
    cache.prepare()

    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        first, second = (cache.place("core", f"{ENTRY}/{name}.safetensors") for name in ("a", "b"))
        halves = [Ranges.of(((half * 4 * mib, 4 * mib),)) for half in range(2)]
        streams = [await arrivals.begin(first, 8 * mib, half) for half in halves]
        with pytest.raises(StorageError, match="has room for 2097152 bytes, but 4194304 are needed"):
            await arrivals.begin(second, 4 * mib, Ranges.whole(4 * mib))
        for stream in streams:
            assert stream is not None
            os.pwrite(stream.descriptor, os.urandom(4 * mib), stream.ranges.runs[0][0])
            os.fsync(stream.descriptor)
        assert cache.room.available(await cache.room.usage()) == 2 * mib
        for stream in streams:
            assert stream is not None
            await stream.finish()
        assert cache.room.available(await cache.room.usage()) == 10 * mib  # nobody uses it
        failing = await arrivals.begin(second, 2 * mib, Ranges.whole(2 * mib))
        assert failing is not None
        assert cache.room.available(await cache.room.usage()) == 0  # its directory is in use now
        await failing.fail()
        assert cache.room.available(await cache.room.usage()) == 10 * mib
        with pytest.raises(StorageError):
            await arrivals.begin(second, 1 << 62, Ranges.whole(1 << 62))
        assert cache.room.available(await cache.room.usage()) == 10 * mib

    drive(scenario())


def test_quiet_parts_are_forgotten(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        place = cache.place("core", f"{ENTRY}/core.safetensors")
        stream = await arrivals.begin(place, 100, Ranges.of(((0, 50),)))
        assert stream is not None
        monkeypatch.setattr(arriving, "QUIET_LIMIT", 0.0)
        arrivals.forget_quiet()
        assert left(cache) == 1  # it is not quiet
        await stream.finish()
        arrivals.forget_quiet()
        assert not arrivals.brings(place)
        await arrivals.settle()
        assert left(cache) == 0

    drive(scenario())


def test_a_file_begins_beside_the_loop(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cache.place("core", f"{ENTRY}/core.safetensors")
    folder = cache.entry_folder(ENTRY)
    truncate, go, hangs = os.truncate, threading.Event(), threading.Event()

    def hang(descriptor: int, size: int) -> None:
        hangs.set()
        assert go.wait(10)
        truncate(descriptor, size)

    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        for published, cancelled in ((False, True), (True, False), (False, False)):
            folder.mkdir()
            cache.mark(ENTRY, Marker("00" * 32, {}))
            go.clear()
            hangs.clear()
            beginning = asyncio.create_task(arrivals.begin(place, 100, Ranges.whole(100)))
            await asyncio.wait_for(asyncio.to_thread(hangs.wait), 10)
            await asyncio.sleep(0)  # the loop runs
            assert not beginning.done()
            if published:
                (folder / "core.safetensors").write_bytes(bytes(100))
            if cancelled:
                beginning.cancel()
            go.set()
            await asyncio.wait({beginning})
            if cancelled or published:
                assert cancelled == beginning.cancelled()
                assert cancelled or beginning.result() is None
                assert left(cache) == 0
                assert not cache.room._reservations
            shutil.rmtree(folder)
        assert beginning.result() is not None
        assert cache.marker(ENTRY) is None
        assert left(cache) == 1
        arrivals.close()
        assert left(cache) == 0

    monkeypatch.setattr("flare.agent.arriving.os.truncate", hang)
    drive(scenario())


def test_what_was_given_up_is_removed_beside_the_loop(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink
    threads: list[int] = []

    def slow(path: Path, missing_ok: bool = False) -> None:
        if path.parent == cache.arriving:
            threads.append(threading.get_ident())
            time.sleep(0.3)
        unlink(path, missing_ok=missing_ok)

    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        place = cache.place("core", f"{ENTRY}/core.safetensors")
        stream = await arrivals.begin(place, 100, Ranges.of(((0, 50),)), uploader="first")
        assert stream is not None
        await stream.finish()
        monkeypatch.setattr(Path, "unlink", slow)
        monkeypatch.setattr(arriving, "GIVEN_UP_AFTER", 0.0)
        begun = time.monotonic()
        beginning = asyncio.create_task(arrivals.begin(place, 100, Ranges.whole(100), uploader="second"))
        longest = 0.0
        while not beginning.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        assert beginning.result() is not None
        assert time.monotonic() - begun >= 0.3  # what is removed counts as room
        assert longest < 0.25
        assert threads
        assert threading.get_ident() not in threads
        monkeypatch.undo()
        assert left(cache) == 1
        arrivals.close()

    drive(scenario())


def test_a_file_that_cannot_be_removed_is_told(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_path: Path, **_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario() -> None:
        arrivals = arrivals_of(cache)
        place = cache.place("core", f"{ENTRY}/core.safetensors")
        stream = await arrivals.begin(place, 100, Ranges.of(((0, 50),)))
        assert stream is not None
        await stream.finish()
        monkeypatch.setattr(arriving, "QUIET_LIMIT", 0.0)
        monkeypatch.setattr(Path, "unlink", refuse)
        arrivals.forget_quiet()
        await arrivals.settle()
        monkeypatch.undo()

    with caplog.at_level(logging.ERROR, "flare.agent"):
        drive(scenario())
    assert [record.getMessage() for record in caplog.records if "cannot remove" in record.getMessage()]


def test_nobody_writes_while_a_file_is_digested(cache: Cache) -> None:
    data = b"x" * 100
    name = f"{hashlib.sha256(data).hexdigest()}.safetensors"

    async def scenario() -> None:
        place = cache.place("blob", name)

        async def digest(descriptor: int, file: str, size: int) -> bytes:
            with pytest.raises(BusyError):
                await arrivals.begin(place, 100, Ranges.whole(100))
            return hashlib.sha256(os.pread(descriptor, size, 0)).digest()

        arrivals = Arrivals(cache, digest)
        stream = await arrivals.begin(place, 100, Ranges.whole(100))
        assert stream is not None
        os.pwrite(stream.descriptor, data, 0)
        await stream.finish()
        assert cache.have(place, 100) == (True, True)

    drive(scenario())


@pytest.mark.parametrize("again", [((0, 50),), ((50, 50),), ()])
def test_shares_that_came_are_not_opened_again_while_the_file_is_digested(
    cache: Cache, again: tuple[tuple[int, int], ...]
) -> None:
    data = b"x" * 100
    name = f"{hashlib.sha256(data).hexdigest()}.safetensors"

    async def scenario() -> None:
        place = cache.place("core", f"{'ab' * 16}-100/{name}")

        async def digest(descriptor: int, file: str, size: int) -> bytes:
            with pytest.raises(BusyError):
                await arrivals.begin(place, 100, Ranges.of(again), None, "upload")
            return hashlib.sha256(os.pread(descriptor, size, 0)).digest()

        arrivals = Arrivals(cache, digest)
        for offset in (0, 50):
            stream = await arrivals.begin(place, 100, Ranges.of(((offset, 50),)), None, "upload")
            assert stream is not None
            os.pwrite(stream.descriptor, data[:50], offset)
            await stream.finish()
        assert cache.have(place, 100)[0]

    drive(scenario())


def test_a_folder_that_others_may_write_to_is_refused(cache: Cache) -> None:
    cache.paths.cores.chmod(0o777)
    with pytest.raises(IdentityError, match="Others may write"):
        cache.prepare()
