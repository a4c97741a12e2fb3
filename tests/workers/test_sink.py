"""Writing past the page cache, and what happens where that cannot be."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from flare_workers import direct as module
from flare_workers.blocks import BLOCK_SIZE
from flare_workers.direct import ALLOCATION, DirectFile
from flare_workers.jobs import STORAGE, WorkerError
from flare_workers.sink import PAGE_CACHE_WINDOW, Sink
from flare_workers.system_calls import SYNC_WRITE, allocate, is_in_memory, sync_file_range

BLOCK = os.urandom(BLOCK_SIZE)


@contextmanager
def opened(path: Path, size: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


def pages(data: bytes) -> memoryview:
    """A buffer that begins at a page, as direct writes want it."""
    buffer = memoryview(mmap.mmap(-1, len(data)))
    buffer[:] = data
    return buffer


def on_a_copy(descriptor: int, on_written: Callable[[int], None]) -> DirectFile:
    """Stands for DirectFile.open on any filesystem."""
    return DirectFile(os.dup(descriptor), on_written)


def nothing(_: int) -> None:
    """Nobody counts."""


def cached_pages(descriptor: int, size: int) -> int:
    """How many pages of a file are in the page cache."""
    mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    count = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    start = ctypes.c_char.from_buffer(mapped)
    try:
        ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(size), found)
    finally:
        del start
        mapped.close()
    return sum(each & 1 for each in found)


def can_write_directly(folder: Path) -> bool:
    """Whether the filesystem keeps directly written bytes out of the page cache."""
    with opened(folder / "probe", BLOCK_SIZE) as descriptor:
        direct = DirectFile.open(descriptor, nothing)
        if direct is None:
            return False
        with closing(direct):
            direct.start(pages(BLOCK), 0)
            ended = direct.settle()
        assert ended is not None
        if ended.error is not None:
            return False
        return cached_pages(descriptor, BLOCK_SIZE) == 0


def test_whole_blocks_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    if not can_write_directly(tmp_path):
        pytest.skip(f"the filesystem of {tmp_path} has no direct writes")
    data = pages(BLOCK)
    with (
        opened(tmp_path / "file", 4 * BLOCK_SIZE) as descriptor,
        closing(Sink(descriptor, "file", 4 * BLOCK_SIZE, drop_cache=True)) as sink,
    ):
        for number in range(4):
            sink.write(data, number * BLOCK_SIZE)
        sink.finish(sync=False)
        assert cached_pages(descriptor, 4 * BLOCK_SIZE) == 0
    assert (tmp_path / "file").read_bytes() == 4 * BLOCK


@pytest.mark.parametrize("drop_cache", [True, False])
def test_what_lies_askew_is_written_all_the_same(tmp_path: Path, drop_cache: bool) -> None:
    data = pages(BLOCK)
    size = 3 * BLOCK_SIZE + 17 + 1000
    with (
        opened(tmp_path / "file", size) as descriptor,
        closing(Sink(descriptor, "file", size, drop_cache=drop_cache)) as sink,
    ):
        sink.write(data, 0)
        sink.write(data, BLOCK_SIZE)
        sink.write(data, 2 * BLOCK_SIZE + 17)
        sink.write(data[:1000], 3 * BLOCK_SIZE + 17)
        sink.finish(sync=True)
    assert (tmp_path / "file").read_bytes() == 2 * BLOCK + bytes(17) + BLOCK + BLOCK[:1000]


def test_memory_that_begins_inside_a_page_goes_through_the_page_cache(tmp_path: Path) -> None:
    data = pages(BLOCK + BLOCK)[100 : 100 + BLOCK_SIZE]
    with (
        opened(tmp_path / "file", 2 * BLOCK_SIZE) as descriptor,
        closing(Sink(descriptor, "file", 2 * BLOCK_SIZE, drop_cache=True)) as sink,
    ):
        sink.write(data, 0)
        sink.write(data, BLOCK_SIZE)
        sink.finish(sync=False)
    assert (tmp_path / "file").read_bytes() == 2 * bytes(data)


def test_a_filesystem_without_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectFile, "open", lambda *_: None)
    with (
        opened(tmp_path / "file", BLOCK_SIZE) as descriptor,
        closing(Sink(descriptor, "file", BLOCK_SIZE, drop_cache=True)) as sink,
    ):
        sink.write(pages(BLOCK), 0)
        sink.finish(sync=True)
    assert (tmp_path / "file").read_bytes() == BLOCK


def test_a_direct_write_that_fails_says_so_and_is_not_tried_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full(descriptor: int, data: memoryview, position: int) -> int:
        calls.append(position)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path / "file", BLOCK_SIZE) as descriptor:
        monkeypatch.setattr(DirectFile, "open", on_a_copy)
        with closing(Sink(descriptor, "file", BLOCK_SIZE, drop_cache=True)) as sink:
            monkeypatch.setattr(os, "pwrite", full)
            sink.write(pages(BLOCK), 0)
            with pytest.raises(WorkerError, match="the filesystem is full") as failure:
                sink.finish(sync=False)
    assert failure.value.code == STORAGE
    assert calls == [0]


def test_a_direct_write_that_is_cut_short_is_finished_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectFile, "open", on_a_copy)
    whole = os.pwrite

    def short(descriptor: int, data: memoryview, position: int) -> int:
        return whole(descriptor, data[:5000], position)

    with (
        opened(tmp_path / "file", BLOCK_SIZE) as descriptor,
        closing(Sink(descriptor, "file", BLOCK_SIZE, drop_cache=True)) as sink,
    ):
        monkeypatch.setattr(os, "pwrite", short)
        sink.write(pages(BLOCK), 0)
        sink.finish(sync=False)
    assert (tmp_path / "file").read_bytes() == BLOCK


def test_a_block_counts_as_written_when_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    told: list[int] = []
    whole = os.pwrite

    def slow(descriptor: int, data: memoryview, position: int) -> int:
        assert go_on.wait(60)
        return whole(descriptor, data, position)

    monkeypatch.setattr(DirectFile, "open", on_a_copy)
    monkeypatch.setattr(os, "pwrite", slow)
    with (
        opened(tmp_path / "file", 2 * BLOCK_SIZE) as descriptor,
        closing(Sink(descriptor, "file", 2 * BLOCK_SIZE, drop_cache=True, on_written=told.append)) as sink,
    ):
        sink.write(pages(BLOCK), 0)  # returns, though the disk has not taken it
        assert told == []
        go_on.set()
        sink.write(pages(BLOCK), BLOCK_SIZE)
        assert told[0] == BLOCK_SIZE
        sink.finish(sync=False)
    assert told == [BLOCK_SIZE, 2 * BLOCK_SIZE]


def test_closing_a_sink_waits_for_the_write_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    whole = os.pwrite
    threads = set(threading.enumerate())  # those of tests before this one

    def slow(descriptor: int, data: memoryview, position: int) -> int:
        time.sleep(0.2)
        calls.append(position)
        return whole(descriptor, data, position)

    monkeypatch.setattr(DirectFile, "open", on_a_copy)
    monkeypatch.setattr(os, "pwrite", slow)
    with opened(tmp_path / "file", BLOCK_SIZE) as descriptor:
        sink = Sink(descriptor, "file", BLOCK_SIZE, drop_cache=True)
        sink.write(pages(BLOCK), 0)
        sink.close()
        assert calls == [0]
    assert set(threading.enumerate()) <= threads


def test_a_filesystem_that_wants_something_else_of_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    told: list[int] = []

    def choosy(descriptor: int, data: memoryview, position: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return whole(descriptor, data, position)

    monkeypatch.setattr(DirectFile, "open", on_a_copy)
    monkeypatch.setattr(os, "pwrite", choosy)
    with (
        opened(tmp_path / "file", 2 * BLOCK_SIZE) as descriptor,
        closing(Sink(descriptor, "file", 2 * BLOCK_SIZE, drop_cache=True, on_written=told.append)) as sink,
    ):
        sink.write(pages(BLOCK), 0)
        sink.write(pages(BLOCK), BLOCK_SIZE)
        sink.finish(sync=False)
    assert (tmp_path / "file").read_bytes() == 2 * BLOCK
    assert told == [BLOCK_SIZE, 2 * BLOCK_SIZE]


def test_places_on_the_disk_are_taken_ahead_inside_a_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(
        module, "allocate", lambda descriptor, position, length: taken.append((position, length))
    )
    monkeypatch.setattr(DirectFile, "open", on_a_copy)
    run = ALLOCATION + 3 * BLOCK_SIZE
    start = 5 * BLOCK_SIZE
    with (
        opened(tmp_path / "file", start + run) as descriptor,
        closing(Sink(descriptor, "file", run, drop_cache=True)) as sink,
    ):
        data = pages(BLOCK)
        sink.expect(start, run)
        for position in range(start, start + run, BLOCK_SIZE):
            sink.write(data, position)
        sink.finish(sync=False)
    assert taken == [(start, ALLOCATION), (start + ALLOCATION, 3 * BLOCK_SIZE)]


@contextmanager
def without_allocation(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> Iterator[tuple[Sink, list[int]]]:
    """A sink for two blocks where nothing can be allocated, and the positions at which it tried."""
    asked = []

    def refuse(descriptor: int, position: int, length: int) -> None:
        asked.append(position)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "allocate", refuse)
    monkeypatch.setattr(DirectFile, "open", on_a_copy)
    with (
        opened(path, 2 * BLOCK_SIZE) as descriptor,
        closing(Sink(descriptor, "file", 2 * BLOCK_SIZE, drop_cache=True)) as sink,
    ):
        sink.expect(0, 2 * BLOCK_SIZE)
        yield sink, asked


def test_a_disk_without_room_for_what_comes_is_full_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_allocation(tmp_path / "file", monkeypatch, errno.ENOSPC) as (sink, _):
        sink.write(pages(BLOCK), 0)
        with pytest.raises(WorkerError, match=f"full; {2 * BLOCK_SIZE} bytes of this stream are missing"):
            sink.write(pages(BLOCK), BLOCK_SIZE)


def test_a_filesystem_that_cannot_allocate_is_written_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_allocation(tmp_path / "file", monkeypatch, errno.EOPNOTSUPP) as (sink, asked):
        sink.write(pages(BLOCK), 0)
        sink.write(pages(BLOCK), BLOCK_SIZE)
        sink.finish(sync=False)
    assert (tmp_path / "file").read_bytes() == 2 * BLOCK
    assert asked == [0]


def test_allocating_changes_neither_size_nor_bytes(tmp_path: Path) -> None:
    with opened(tmp_path / "file", 3 * BLOCK_SIZE) as descriptor:
        os.pwrite(descriptor, BLOCK, 0)
        try:
            allocate(descriptor, 0, 2 * BLOCK_SIZE)
        except OSError as error:
            assert error.errno == errno.EOPNOTSUPP
            pytest.skip(f"the filesystem of {tmp_path} cannot allocate")
        assert os.fstat(descriptor).st_size == 3 * BLOCK_SIZE
        assert 2 * BLOCK_SIZE <= os.fstat(descriptor).st_blocks * 512 < 3 * BLOCK_SIZE
    assert (tmp_path / "file").read_bytes() == BLOCK + bytes(2 * BLOCK_SIZE)


def test_pages_that_the_disk_did_not_take_are_an_error_of_their_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says so once, to whoever waits for the pages: the fsync at the end succeeds."""

    def broken(descriptor: int, position: int, length: int, flags: int) -> None:
        if flags != SYNC_WRITE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(DirectFile, "open", lambda *_: None)
    monkeypatch.setattr("flare_workers.sink.sync_file_range", broken)
    windows = 3 * PAGE_CACHE_WINDOW // BLOCK_SIZE
    with (
        opened(tmp_path / "file", windows * BLOCK_SIZE) as descriptor,
        closing(Sink(descriptor, "file", windows * BLOCK_SIZE, drop_cache=True)) as sink,
        pytest.raises(WorkerError, match="cannot write file: Input/output error") as caught,
    ):
        for number in range(windows):
            sink.write(pages(BLOCK), number * BLOCK_SIZE)
    assert caught.value.code == STORAGE


def test_starting_to_write_pages_fails_with_a_reason_or_is_left_to_fsync(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        sync_file_range(-1, 0, 1, SYNC_WRITE)
    ends = os.pipe()
    sync_file_range(ends[1], 0, 1, SYNC_WRITE)  # cannot be, and is no failure
    for each in ends:
        os.close(each)


def test_memory_is_no_disk_that_could_be_written_directly(tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryFile(dir=shared_memory) as file:
        assert is_in_memory(file.fileno())
        assert DirectFile.open(file.fileno(), nothing) is None
    if tmp_path.stat().st_dev != shared_memory.stat().st_dev and can_write_directly(tmp_path):
        with opened(tmp_path / "file", 1) as descriptor:
            assert not is_in_memory(descriptor)


def test_a_sink_gives_its_descriptor_back(tmp_path: Path) -> None:
    with opened(tmp_path / "file", BLOCK_SIZE) as descriptor:
        before = sum(1 for _ in Path("/proc/self/fd").iterdir())
        sink = Sink(descriptor, "file", BLOCK_SIZE, drop_cache=True)
        sink.close()
        sink.close()
        assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
