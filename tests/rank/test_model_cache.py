from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from flare.cores.index import CACHED_PRIMARY
from flare.cores.marker import AGENT_MARKER, MODEL_MARKER, FileStamp, MarkedFile, Marker, write_marker
from flare.cores.primary import Primary, load_primary
from flare.errors import BusyError, ConflictError, StorageError
from flare.rank.model_cache import (
    EntryName,
    FolderLock,
    find_entry,
    marker_covers,
    new_entry,
    publish,
    stamps,
    verified_before,
)
from flare_workers.ranges import Ranges
from tests.cores.making import MIB, pattern, write_core

FILES = {"model/a.gguf": pattern(3 * MIB, 1), "model/b.json": b"{}"}
SPLIT = [None, [[0, MIB, MIB]]]


@pytest.fixture
def core(tmp_path: Path) -> Primary:
    return load_primary(write_core(tmp_path / "core", FILES, ranks=2, rank_ranges=SPLIT))


def put(core: Primary, root: Path, rank: int = 1) -> Path:
    """Publish `rank`'s entry as a receiver would."""
    name = EntryName.of(core, rank)
    wanted = core.index.wanted(rank)
    assert core.path is not None
    with new_entry(root, name) as folder:
        (folder / CACHED_PRIMARY).write_bytes(core.path.read_bytes())
        for number in wanted:
            path = folder / core.index.files[number].path
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(core.file_path(number).read_bytes())
        return publish(folder, core, wanted, root, name)


def mark(core: Primary, name: str, ranges: dict[str, tuple[tuple[int, int], ...] | None]) -> None:
    assert core.path is not None
    files = {core.path.name: MarkedFile(FileStamp.of(core.path.stat()), ())}
    for path, of_file in ranges.items():
        files[path] = MarkedFile(FileStamp.of((core.root / path).stat()), of_file)
    write_marker(core.root / name, Marker(core.index_sha256.hex(), files))


def test_names_are_the_documented_ones(core: Primary) -> None:
    name = EntryName.of(core, 1)
    assert name.model_key == f"Tiny-{core.fingerprint[:16]}"
    assert name.entry_id == f"{core.index.export.hex()}-{core.size}-rank1"
    assert EntryName.of(core, None).entry_id == f"{core.index.export.hex()}-{core.size}"


def test_a_published_entry_is_found_verified_and_sealed(core: Primary, tmp_path: Path) -> None:
    final = put(core, tmp_path)
    assert final == tmp_path / "models" / EntryName.of(core, 1).model_key / EntryName.of(core, 1).entry_id
    assert {path.stat().st_mode & 0o777 for path in final.rglob("*.*") if path.name[0] != "."} == {0o444}
    found = find_entry(tmp_path, EntryName.of(core, 1), core.index_sha256, 1)
    assert found is not None
    assert found.verified
    assert found.primary.path == final / CACHED_PRIMARY
    assert not list(final.parent.glob("*.new"))
    found.lock.release()


def test_nothing_is_found_where_nothing_is(core: Primary, tmp_path: Path) -> None:
    assert find_entry(tmp_path, EntryName.of(core, 1), core.index_sha256, 1) is None


@pytest.mark.parametrize("folder", ["rank1", "complete"])
def test_what_an_agent_staged_is_used(core: Primary, tmp_path: Path, folder: str) -> None:
    name = EntryName.of(core, 1 if folder == "rank1" else None)
    staged = tmp_path / "cores" / name.entry_id
    staged.parent.mkdir()
    core.root.rename(staged)
    moved = load_primary(staged / "tiny.safetensors")
    mark(moved, AGENT_MARKER, {"model/a.gguf": ((0, 2 * MIB),) if folder == "rank1" else None})
    found = find_entry(tmp_path, EntryName.of(core, 1), core.index_sha256, 1)
    assert found is not None
    assert found.primary.path == staged / "tiny.safetensors"
    found.lock.release()


def test_what_was_staged_for_less_is_not_enough(core: Primary, tmp_path: Path) -> None:
    staged = tmp_path / "cores" / EntryName.of(core, 1).entry_id
    staged.parent.mkdir()
    core.root.rename(staged)
    moved = load_primary(staged / "tiny.safetensors")
    mark(moved, AGENT_MARKER, {"model/a.gguf": ((0, MIB),)})
    assert find_entry(tmp_path, EntryName.of(core, 1), core.index_sha256, 1) is None
    mark(moved, AGENT_MARKER, {})
    assert find_entry(tmp_path, EntryName.of(core, 1), core.index_sha256, 1) is None


def test_changed_files_are_not_trusted(core: Primary, tmp_path: Path) -> None:
    final = put(core, tmp_path)
    os.utime(final / "model/a.gguf", ns=(1, 1))
    assert find_entry(tmp_path, EntryName.of(core, 1), core.index_sha256, 1) is None
    # The same with the primary, and with one that is no core any more.
    again = put(core, tmp_path)
    (again / CACHED_PRIMARY).chmod(0o644)
    (again / CACHED_PRIMARY).write_bytes(b"x")
    assert find_entry(tmp_path, EntryName.of(core, 1), core.index_sha256, 1) is None


def test_another_core_in_the_place_is_refused_not_overwritten(core: Primary, tmp_path: Path) -> None:
    put(core, tmp_path)
    with pytest.raises(ConflictError, match="holds another core"):
        find_entry(tmp_path, EntryName.of(core, 1), b"\x01" * 32, 1)


def test_another_core_that_was_staged_is_passed_over(core: Primary, tmp_path: Path) -> None:
    staged = tmp_path / "cores" / EntryName.of(core, 1).entry_id
    staged.parent.mkdir()
    core.root.rename(staged)
    mark(load_primary(staged / "tiny.safetensors"), AGENT_MARKER, {"model/a.gguf": None})
    assert find_entry(tmp_path, EntryName.of(core, 1), b"\x01" * 32, 1) is None


def test_a_served_entry_is_locked(core: Primary, tmp_path: Path) -> None:
    final = put(core, tmp_path)
    found = find_entry(tmp_path, EntryName.of(core, 1), core.index_sha256, 1)
    assert found is not None
    descriptor = os.open(final, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # A rank that finds it changed may not replace it under another one's feet.
    with pytest.raises(BusyError, match="A rank still serves from"):
        put(core, tmp_path)
    found.lock.release()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(BusyError, match="Something is replacing"):
        FolderLock(final)
    os.close(descriptor)


def test_a_lock_on_what_is_gone_or_was_replaced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="Cannot use the core"):
        FolderLock(tmp_path / "gone")
    folder = tmp_path / "folder"
    folder.mkdir()
    real = fcntl.flock

    def swap(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        folder.rename(tmp_path / "old")
        folder.mkdir()

    monkeypatch.setattr(fcntl, "flock", swap)
    with pytest.raises(StorageError, match="was replaced while"):
        FolderLock(folder)


def test_two_receivers_of_one_entry_do_not_mix(core: Primary, tmp_path: Path) -> None:
    name = EntryName.of(core, 1)
    with new_entry(tmp_path, name), pytest.raises(BusyError, match="Another rank is receiving"):  # noqa: SIM117
        with new_entry(tmp_path, name):
            pass


def test_what_a_killed_receiver_left_is_removed(core: Primary, tmp_path: Path) -> None:
    name = EntryName.of(core, 1)
    left = tmp_path / "models" / name.model_key / f".{name.entry_id}.abcd.new"
    left.mkdir(parents=True)
    with new_entry(tmp_path, name) as folder:
        assert not left.exists()
        assert folder.exists()
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_is_named(core: Primary, tmp_path: Path) -> None:
    (tmp_path / "models").write_bytes(b"")
    with (
        pytest.raises(StorageError, match="Cannot make the folder"),
        new_entry(tmp_path, EntryName.of(core, 1)),
    ):
        pass
    with (
        pytest.raises(StorageError, match="Cannot store"),
        new_entry(tmp_path / "other", EntryName.of(core, 1)),
    ):
        raise OSError(28, "No space left on device")


def test_markers_beside_a_core_are_heeded(core: Primary) -> None:
    wanted = core.index.wanted(0)
    assert not verified_before(core, wanted)
    mark(core, AGENT_MARKER, {"model/a.gguf": None, "model/b.json": None})
    assert verified_before(core, wanted)
    os.utime(core.root / "model/b.json", ns=(5, 5))
    assert not verified_before(core, wanted)
    other = Marker("00" * 32, {})
    write_marker(core.root / MODEL_MARKER, other)
    assert not marker_covers(other, core, {0: Ranges.whole(MIB)})


def test_stamps_name_a_missing_file(core: Primary) -> None:
    before = stamps(core, core.index.wanted(0))
    assert len(before) == 3
    (core.root / "model/b.json").unlink()
    with pytest.raises(StorageError, match=r"b\.json"):
        stamps(core, core.index.wanted(0))
