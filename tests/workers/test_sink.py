"""Writing past the page cache, and what happens where that cannot be."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from flare_workers import sink as module
from flare_workers.blocks import BLOCK_SIZE
from flare_workers.jobs import STORAGE, WorkerError
from flare_workers.sink import Sink

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
        direct = module._open_direct(descriptor)
        if direct is None:
            return False
        try:
            os.pwrite(direct, pages(BLOCK), 0)
        except OSError:
            return False
        finally:
            os.close(direct)
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
    monkeypatch.setattr(module, "_open_direct", lambda descriptor: None)
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
        monkeypatch.setattr(module, "_open_direct", os.dup)
        with closing(Sink(descriptor, "file", BLOCK_SIZE, drop_cache=True)) as sink:
            monkeypatch.setattr(os, "pwrite", full)
            with pytest.raises(WorkerError, match="the filesystem is full") as failure:
                sink.write(pages(BLOCK), 0)
    assert failure.value.code == STORAGE
    assert calls == [0]


def test_a_direct_write_that_is_cut_short_is_finished_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_open_direct", os.dup)
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


def test_a_sink_gives_its_descriptor_back(tmp_path: Path) -> None:
    with opened(tmp_path / "file", BLOCK_SIZE) as descriptor:
        before = sum(1 for _ in Path("/proc/self/fd").iterdir())
        sink = Sink(descriptor, "file", BLOCK_SIZE, drop_cache=True)
        sink.close()
        sink.close()
        assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
