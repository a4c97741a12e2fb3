"""How much the cache may take, what goes for it, and what is kept for bytes on their way."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
from pathlib import Path
from typing import Any

import pytest

from flare.agent import room as module
from flare.agent.cache import Cache
from flare.agent.places import Entry
from flare.errors import StorageError
from flare.paths import Paths
from tests.agent.world import wait_for

MIB = 1 << 20
OLD, NEW = Entry("ab" * 16, 1), Entry("cd" * 16, 1)
BLOB = f"{'5' * 64}.safetensors"


def a_cache(home: Path, limit: int | None = None) -> Cache:
    cache = Cache(Paths.from_environment({"HOME": str(home)}), limit)
    cache.prepare()
    return cache


def store(cache: Cache, entry: Entry, path: str, size: int, age: float = 0.0) -> Path:
    """Publish a file of random bytes, and set when its directory was used last."""
    arrived = cache.new_arrival()
    arrived.write_bytes(os.urandom(size))
    cache.publish(arrived, cache.place("core", f"{entry}/{path}"))
    folder = cache.entry_folder(entry)
    used = folder.stat().st_mtime - age
    os.utime(folder, (used, used))
    return folder / path


def reserve(cache: Cache, size: int) -> None:
    asyncio.run(cache.room.reserve(size)).release()


def available(cache: Cache) -> int:
    return cache.room.available(asyncio.run(cache.room.usage()))


def test_nothing_goes_for_what_cannot_fit(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, 5 * MIB)
    old, new = store(cache, OLD, "x", 2 * MIB, age=9), store(cache, NEW, "x", 2 * MIB)
    with pytest.raises(StorageError, match=r"has room for 5242880 bytes, but 6291456 are needed"):
        reserve(cache, 6 * MIB)
    with cache.pins.pinned(str(NEW)), pytest.raises(StorageError, match=r"has room for 3145728 bytes"):
        reserve(cache, 4 * MIB)
    assert (old.exists(), new.exists()) == (True, True)
    reserve(cache, 3 * MIB)
    assert (old.exists(), new.exists()) == (False, True)
    reserve(cache, 5 * MIB)
    assert not new.exists()


def test_what_can_be_had_counts_what_can_be_evicted(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, 5 * MIB)
    store(cache, OLD, "x", 2 * MIB)
    store(cache, NEW, "x", MIB)
    assert available(cache) == 5 * MIB
    with cache.pins.pinned(str(OLD)):
        assert available(cache) == 3 * MIB
        with asyncio.run(cache.room.reserve(MIB)):
            assert available(cache) == 2 * MIB
        assert available(cache) == 3 * MIB


def test_what_is_kept_of_a_core_does_not_make_the_served_one_evictable(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, 5 * MIB)
    served = store(cache, OLD, "x", 2 * MIB).parent
    kept = cache.resuming / str(OLD)
    kept.mkdir()
    kept.joinpath("x.part").write_bytes(os.urandom(MIB))
    descriptor = os.open(served, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        assert available(cache) == 3 * MIB
    finally:
        os.close(descriptor)
    assert available(cache) == 5 * MIB


def test_two_at_once_do_not_count_on_the_same_bytes(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, 7 * MIB)

    async def scenario() -> None:
        results = await asyncio.gather(
            *(cache.room.reserve(4 * MIB) for _ in range(2)), return_exceptions=True
        )
        (refused,) = (each for each in results if isinstance(each, StorageError))
        assert "has room for 3145728 bytes, but 4194304 are needed" in refused.message
        assert "4194304 bytes more are kept for other transfers and uploads that run now" in refused.message
        for each in results:
            if not isinstance(each, BaseException):
                each.release()
        (await cache.room.reserve(7 * MIB)).release()

    asyncio.run(scenario())


def test_a_reservation_shrinks_as_bytes_come(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, 8 * MIB)

    async def scenario() -> None:
        with await cache.room.reserve(4 * MIB) as reservation:
            arrived = cache.new_arrival()
            descriptor = os.open(arrived, os.O_RDWR | os.O_CREAT)
            os.pwrite(descriptor, b"x" * MIB, 0)  # was there before
            with reservation.filling(descriptor, 3 * MIB):
                assert reservation.outstanding == 4 * MIB
                os.pwrite(descriptor, os.urandom(2 * MIB), MIB)
                os.fsync(descriptor)
                assert reservation.outstanding == 2 * MIB
                assert cache.room.available(await cache.room.usage()) == 3 * MIB
                os.pwrite(descriptor, os.urandom(3 * MIB), 3 * MIB)
                os.fsync(descriptor)
                assert reservation.outstanding == MIB  # another file's
            os.close(descriptor)
            assert reservation.outstanding == MIB
        assert cache.room.available(await cache.room.usage()) == 2 * MIB

    asyncio.run(scenario())


def test_a_blob_goes_with_the_last_directory_that_links_it(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, 5 * MIB)
    old = store(cache, OLD, BLOB, 3 * MIB, age=9)
    new = store(cache, NEW, "x", MIB)
    assert old.stat().st_nlink == 2
    assert available(cache) == 5 * MIB
    os.utime(cache.entry_folder(OLD), (1, 1))
    with cache.pins.pinned(str(OLD)):
        assert available(cache) == 2 * MIB
    wait_for(lambda: cache.entry_folder(OLD).stat().st_mtime > 1)  # a pin touches it, beside the loop
    os.utime(cache.entry_folder(OLD), (1, 1))
    reserve(cache, 2 * MIB)
    assert (old.exists(), (cache.paths.blobs / BLOB).exists(), new.exists()) == (False, False, True)


def test_a_blob_that_nobody_links_goes_first(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, 5 * MIB)
    old = store(cache, OLD, "x", MIB, age=9)
    blob = cache.paths.blobs / BLOB
    blob.write_bytes(os.urandom(3 * MIB))
    assert asyncio.run(cache.room.usage()).blobs == 3 * MIB
    with cache.pins.pinned(BLOB), pytest.raises(StorageError):
        reserve(cache, 5 * MIB)
    reserve(cache, 4 * MIB)
    assert (old.exists(), blob.exists()) == (True, False)


def test_what_a_rank_links_too_frees_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = a_cache(tmp_path)
    monkeypatch.setattr(module.Room, "_disk_free", lambda _: MIB)
    stored = store(cache, OLD, "x", 2 * MIB)
    assert available(cache) == 3 * MIB
    os.link(stored, tmp_path / "of-a-rank")
    assert available(cache) == MIB
    with pytest.raises(StorageError, match=r"leaves 256 MiB of the disk free\. Free some space on that disk"):
        reserve(cache, 2 * MIB)
    assert stored.exists()


def test_what_needs_nothing_fits_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = a_cache(tmp_path)
    monkeypatch.setattr(module.Room, "_disk_free", lambda _: -MIB)
    stored = store(cache, OLD, "x", 2 * MIB)
    assert available(cache) == MIB
    reserve(cache, 0)
    assert stored.exists()


# One look for many files


def counted_looks(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every look at the whole cache."""
    looks: list[int] = []
    look = cache.room._look

    def counting(*arguments: Any) -> Any:
        looks.append(1)
        return look(*arguments)

    monkeypatch.setattr(cache.room, "_look", counting)
    return looks


async def bring(cache: Cache, name: str, size: int, comes: int | None = None) -> None:
    """Receive a file as uploads do; `comes` bytes of it and then no more, if that is given."""
    place = cache.place("core", f"{NEW}/{name}")
    arrived = cache.new_arrival()
    with await cache.room.reserve(size) as room:
        descriptor = os.open(arrived, os.O_RDWR | os.O_CREAT)
        try:
            os.truncate(descriptor, size)
            with room.filling(descriptor, size):
                for offset in range(0, size if comes is None else comes, MIB // 4):
                    length = min(MIB // 4, size - offset)
                    os.pwrite(descriptor, os.urandom(length), offset)
                    os.fsync(descriptor)
                    await asyncio.sleep(0)
                if comes is None:
                    cache.publish(arrived, place, sync=False)
                else:
                    arrived.unlink()
        finally:
            os.close(descriptor)


def test_many_files_take_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = a_cache(tmp_path, 64 * MIB)
    old = store(cache, OLD, "x", 2 * MIB, age=9)
    looks = counted_looks(cache, monkeypatch)

    async def scenario() -> None:
        for number in range(100):
            await bring(cache, f"x{number}", 1000)
        assert len(looks) == 1
        with cache.pins.pinned(str(NEW)), pytest.raises(StorageError, match="has room for"):
            await cache.room.reserve(64 * MIB)  # nobody is refused without a look
        assert len(looks) == 2
        with cache.pins.pinned(str(NEW)):
            (await cache.room.reserve(63 * MIB)).release()
        assert not old.exists()
        monkeypatch.setattr(module, "SUMS_HOLD", 0.0)  # from the next look on
        (await cache.room.reserve(5 * MIB)).release()
        count = len(looks)
        for number in range(3):
            await bring(cache, f"later{number}", 1000)
        assert len(looks) == count + 3

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_at_once_never_overrun_the_limit(tmp_path: Path, seed: int) -> None:
    """Whatever comes whole, in part or not at all: what is there and what is promised fit."""
    cache = a_cache(tmp_path, 6 * MIB)
    chance = random.Random(seed)
    store(cache, OLD, "x", MIB, age=9)
    fitted = refused = 0

    async def one(number: int) -> None:
        nonlocal fitted, refused
        await asyncio.sleep(chance.random() / 20)
        size = chance.choice((1, 5000, MIB // 3, MIB, 2 * MIB))
        comes = chance.choice((None, None, 0, size // 2))
        try:
            await bring(cache, f"x{number}", size, comes)
            fitted += 1
        except StorageError:
            refused += 1

    async def watch() -> None:
        while True:
            usage = await cache.room.usage()
            assert usage.used <= 6 * MIB
            await asyncio.sleep(0.002)

    async def scenario() -> None:
        with cache.pins.pinned(str(NEW)):
            watching = asyncio.create_task(watch())
            await asyncio.gather(*(one(number) for number in range(40)))
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            assert (await cache.room.usage()).promised == 0

    asyncio.run(scenario())
    assert fitted > 5
    assert refused > 5


def test_small_files_count_as_what_they_take(tmp_path: Path) -> None:
    cache = a_cache(tmp_path, MIB)

    async def scenario() -> None:
        with cache.pins.pinned(str(NEW)):
            for number in range(300):
                try:
                    await bring(cache, f"x{number}", 1)
                except StorageError:
                    break
            assert (await cache.room.usage()).used <= MIB

    asyncio.run(scenario())
