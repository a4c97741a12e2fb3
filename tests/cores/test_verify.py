from __future__ import annotations

import os
from pathlib import Path

import pytest

from flare.cores import verify
from flare.cores.primary import load_primary
from flare.cores.verify import verify_core
from flare.errors import CoreError, IntegrityError, NotFoundError
from flare_workers.ranges import Ranges
from tests.cores.making import MIB, pattern, write_core, write_packed_core

FILES = {
    "model/a.gguf": pattern(3 * MIB + 10, 1),
    "model/sub/b.json": pattern(100, 2),
    "model/empty": b"",
}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_a_right_core(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    stages: list[tuple[str, int]] = []
    done: list[int] = []

    def stage(label: str, total: int) -> object:
        stages.append((label, total))
        return done.append

    report = verify_core(path, progress=stage)  # type: ignore[arg-type]
    assert (report.files, report.blocks, report.bytes) == (3, 5, 3 * MIB + 110)
    assert report.seconds > 0
    assert stages == [("verifying", 3 * MIB + 110)]
    assert sum(done) == 3 * MIB + 110
    assert verify_core(load_primary(path)).blocks == 5


@pytest.mark.parametrize(
    ("name", "offset", "message"),
    [
        ("model/a.gguf", 0, 'block 0 of "model/a.gguf" (bytes 0 to 1048576)'),
        ("model/a.gguf", 2 * MIB, 'block 2 of "model/a.gguf" (bytes 2097152 to 3145728)'),
        ("model/a.gguf", 3 * MIB + 9, 'block 3 of "model/a.gguf" (bytes 3145728 to 3145738)'),
        ("model/sub/b.json", 99, 'block 0 of "model/sub/b.json" (bytes 0 to 100)'),
    ],
)
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, name: str, offset: int, message: str) -> None:
    path = write_core(tmp_path, FILES)
    flip(tmp_path / name, offset)
    with pytest.raises(IntegrityError) as caught:
        verify_core(path)
    assert message in caught.value.message
    assert "is not what its publisher signed" in caught.value.message


def test_segments_do_not_change_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SEGMENT", MIB)
    path = write_core(tmp_path, FILES)
    assert verify_core(path).blocks == 5
    flip(tmp_path / "model/a.gguf", 2 * MIB + 3)
    with pytest.raises(IntegrityError, match="block 2 of"):
        verify_core(path)


def test_a_packed_core(tmp_path: Path) -> None:
    path = write_packed_core(tmp_path, pattern(2 * MIB + 1))
    assert verify_core(path).bytes == 2 * MIB + 1
    flip(path, path.stat().st_size - 1)
    with pytest.raises(IntegrityError, match=r'block 2 of "packed.safetensors"'):
        verify_core(path)


def test_ranges_are_all_that_is_read(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    flip(tmp_path / "model/a.gguf", 0)
    (tmp_path / "model/sub/b.json").unlink()
    report = verify_core(path, ranges={0: Ranges.of([(MIB, MIB), (3 * MIB + 1, 2)])})
    assert (report.files, report.blocks, report.bytes) == (1, 2, MIB + 10)
    with pytest.raises(IntegrityError, match="block 0"):
        verify_core(path, ranges={0: Ranges.of([(5, 1)])})
    assert verify_core(path, ranges={}).bytes == 0


def test_a_hole_where_bytes_belong_is_found(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    (tmp_path / "model/a.gguf").unlink()
    with (tmp_path / "model/a.gguf").open("wb") as file:
        file.write(FILES["model/a.gguf"][:MIB])
        file.truncate(3 * MIB + 10)
    assert verify_core(path, ranges={0: Ranges.of([(0, MIB)])}).blocks == 1
    with pytest.raises(IntegrityError, match="block 1 of"):
        verify_core(path)


@pytest.mark.parametrize("ranges", [{3: Ranges.whole(1)}, {-1: Ranges.whole(1)}, {1: Ranges.whole(101)}])
def test_ranges_outside_the_core(tmp_path: Path, ranges: dict[int, Ranges]) -> None:
    with pytest.raises(CoreError, match="has no bytes"):
        verify_core(write_core(tmp_path, FILES), ranges=ranges)


def test_a_missing_companion(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    (tmp_path / "model/empty").unlink()
    with pytest.raises(IntegrityError, match=r'is not complete: its file "model/empty" is missing'):
        verify_core(path)


def test_a_companion_of_another_size(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    with (tmp_path / "model/sub/b.json").open("ab") as file:
        file.write(b"more")
    with pytest.raises(IntegrityError, match=r'"model/sub/b.json" has 104 bytes instead of 100'):
        verify_core(path)


def test_a_pipe_or_a_folder_instead_of_a_companion(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    (tmp_path / "model/empty").unlink()
    os.mkfifo(tmp_path / "model/empty")
    with pytest.raises(IntegrityError, match=r'"model/empty" cannot be read: not a regular file'):
        verify_core(path)
    (tmp_path / "model/empty").unlink()
    (tmp_path / "model/empty").mkdir()
    with pytest.raises(IntegrityError, match=r'"model/empty" cannot be read'):
        verify_core(path)


def test_links_to_regular_files_are_fine(tmp_path: Path) -> None:
    path = write_core(tmp_path / "core", FILES)
    (tmp_path / "core/model/a.gguf").rename(tmp_path / "blob")
    (tmp_path / "core/model/a.gguf").symlink_to(tmp_path / "blob")
    assert verify_core(path).blocks == 5
    (tmp_path / "blob").unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        verify_core(path)


def test_a_damaged_digest_table(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    flip(path, path.stat().st_size - 1)
    with pytest.raises(IntegrityError, match="The digest table"):
        verify_core(path)


def test_no_core(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        verify_core(tmp_path / "none.safetensors")
