"""The journal of a partial file: torn, damaged, another's; and the partial file beside it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.agent.cache import Cache
from flare.agent.places import Entry
from flare.agent.transfers.journal import HEADER_SIZE, RECORD_SIZE, Journal, identity_of
from flare.agent.transfers.partial import Partial, kept_at, kept_bytes
from flare.errors import StorageError
from flare.paths import Paths
from flare_workers.ranges import Ranges

IDENTITY = identity_of("00" * 32, "model/weights.gguf", 100)
INDEX = "ab" * 32
ENTRY = Entry("cd" * 16, 1000)
MIB = 1 << 20


def ranges_in(path: Path, identity: bytes = IDENTITY) -> Ranges:
    """Open a journal and return what it says."""
    journal = Journal(path, identity)
    journal.close()
    return journal.ranges


def written(path: Path, *runs: tuple[int, int]) -> bytes:
    """Write a journal with a record a run, and return its bytes."""
    journal = Journal(path, IDENTITY)
    for run in runs:
        journal.add(Ranges.of((run,)))
    journal.close()
    return path.read_bytes()


def test_it_says_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, (0, 10), (20, 5), (8, 4))
    assert ranges_in(path) == Ranges.of(((0, 12), (20, 5)))
    journal = Journal(path, IDENTITY)
    journal.add(Ranges.of(((0, 12),)))  # known already
    journal.add(Ranges.of(((30, 1),)))
    journal.close()
    assert path.stat().st_size == HEADER_SIZE + 4 * RECORD_SIZE
    assert ranges_in(path).total == 18


def test_of_another_file_or_core_it_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, (0, 10))
    others = [
        ("01" * 32, "model/weights.gguf", 100),
        ("00" * 32, "x", 100),
        ("00" * 32, "model/weights.gguf", 1),
    ]
    for other in others:
        assert not ranges_in(path, identity_of(*other)).runs
    assert not ranges_in(path).runs  # it was started anew for the others


@given(cut=st.integers(0, HEADER_SIZE + 3 * RECORD_SIZE))
def test_a_torn_end_is_forgotten(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    data = written(path, (0, 10), (20, 10), (40, 10))
    path.write_bytes(data[:cut])
    whole = max(cut - HEADER_SIZE, 0) // RECORD_SIZE
    assert ranges_in(path).total == 10 * whole
    journal = Journal(path, IDENTITY)
    journal.add(Ranges.of(((90, 5),)))
    journal.close()
    assert ranges_in(path).total == 10 * whole + 5


@given(position=st.integers(0, HEADER_SIZE + 3 * RECORD_SIZE - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    data = bytearray(written(path, (0, 10), (20, 10), (40, 10)))
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))
    assert ranges_in(path).total == 10 * (max(position - HEADER_SIZE, -RECORD_SIZE) // RECORD_SIZE) * (
        position >= HEADER_SIZE
    )


def test_a_journal_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Cannot keep the journal"):
        Journal(tmp_path / "no-such-folder" / "journal", IDENTITY)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="Cannot keep the journal"):
        Journal(tmp_path / "link", IDENTITY)


def test_a_journal_longer_than_any(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, (0, 10))
    os.truncate(path, HEADER_SIZE + 4_000_001 * RECORD_SIZE)
    with pytest.raises(StorageError, match="longer than any"):
        Journal(path, IDENTITY)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Return a cache in a folder of its own."""
    cache = Cache(Paths.from_environment({"HOME": str(tmp_path)}))
    cache.prepare()
    return cache


def partial_of(cache: Cache, *, size: int = 4 * MIB, resume: bool = True) -> Partial:
    """Open a partial file."""
    return Partial(cache, ENTRY, "model/weights.gguf", size, index_sha256=INDEX, resume=resume)


def test_a_partial_file_outlives_a_failure_only_with_its_journal(cache: Cache) -> None:
    partial = partial_of(cache, resume=False)
    assert (partial.location.parent, partial.location.stat().st_blocks) == (cache.arriving, 0)
    partial.close(keep=True)
    assert not partial.location.exists()

    partial = partial_of(cache)
    os.pwrite(partial.descriptor, b"x" * MIB, MIB)
    assert partial.journal is not None
    partial.journal.add(Ranges.of(((MIB, MIB),)))
    partial.close(keep=True)
    kept = kept_bytes(cache, ENTRY, "model/weights.gguf", 4 * MIB, INDEX)
    assert kept == Ranges.of(((MIB, MIB),))
    again = partial_of(cache)
    assert again.kept == kept
    assert os.pread(again.descriptor, 1, MIB) == b"x"
    again.start_over()
    assert not again.kept.runs
    assert os.fstat(again.descriptor).st_blocks == 0
    assert os.fstat(again.descriptor).st_size == 4 * MIB
    again.discard()
    assert list(kept_at(cache, ENTRY, "x").parent.iterdir()) == []


def test_a_partial_file_without_a_word_about_it_is_emptied(cache: Cache) -> None:
    partial = partial_of(cache)
    os.pwrite(partial.descriptor, b"x" * MIB, 0)
    partial.close(keep=True)
    again = partial_of(cache)
    assert os.fstat(again.descriptor).st_blocks == 0
    again.close(keep=True)
    assert partial_of(cache, size=5 * MIB).size == 5 * MIB
    assert not kept_bytes(cache, ENTRY, "model/other", 1, INDEX).runs


@pytest.mark.parametrize("published", [False, True])
def test_an_agent_was_killed_while_it_published(cache: Cache, tmp_path: Path, published: bool) -> None:
    partial = partial_of(cache)
    os.pwrite(partial.descriptor, b"x" * 4 * MIB, 0)
    assert partial.journal is not None
    partial.journal.add(Ranges.whole(4 * MIB))
    partial.close(keep=True)
    partial.location.chmod(0o444)
    name = tmp_path / "name"
    if published:
        os.link(partial.location, name)
    kept = kept_bytes(cache, ENTRY, "model/weights.gguf", 4 * MIB, INDEX)
    assert kept == (Ranges() if published else Ranges.whole(4 * MIB))
    again = partial_of(cache)
    assert again.kept == kept
    assert os.pread(again.descriptor, 1, MIB) == (b"\0" if published else b"x")
    assert os.fstat(again.descriptor).st_mode & 0o777 == 0o600
    again.start_over()
    again.discard()
    if published:
        assert name.read_bytes() == b"x" * 4 * MIB
        assert name.stat().st_mode & 0o777 == 0o444


def test_an_agent_that_starts_keeps_what_can_be_resumed(cache: Cache) -> None:
    kept, lost = partial_of(cache), partial_of(cache, resume=False)
    folder = cache.entry_folder(ENTRY)
    folder.mkdir()
    for name in (".verified", ".verified.77-0123abcd.new"):
        (folder / name).write_text("{}")
    cache.prepare()
    assert kept.location.exists()
    assert not lost.location.exists()
    assert [path.name for path in folder.iterdir()] == [".verified"]


def test_what_could_be_resumed_makes_room(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = partial_of(cache)
    os.pwrite(partial.descriptor, b"x" * 4 * MIB, 0)
    partial.close(keep=True)
    limited = Cache(cache.paths, 5 * MIB)
    with limited.pins.pinned(str(ENTRY)), pytest.raises(StorageError, match="has room for"):
        asyncio.run(limited.room.reserve(4 * MIB))
    asyncio.run(limited.room.reserve(4 * MIB))
    assert not partial.location.parent.exists()
