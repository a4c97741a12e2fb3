from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flare.cores.placing import place
from flare.errors import StorageError

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than tmp_path."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)


def source(folder: Path) -> Path:
    path = folder / "source"
    path.write_bytes(b"weights" * 1000)
    path.chmod(0o644)
    return path


def test_the_same_file_system_needs_no_second_copy(tmp_path: Path) -> None:
    real = source(tmp_path)
    place(real, tmp_path / "placed", copy=False)
    placed = (tmp_path / "placed").stat()
    assert (tmp_path / "placed").read_bytes() == real.read_bytes()
    if placed.st_nlink == 2:  # a hard link; where the file system has reflinks it is a file of its own
        assert os.path.samestat(placed, real.stat())
        assert stat.S_IMODE(real.stat().st_mode) == 0o644, "the source's mode belongs to its owner"
    else:
        assert stat.S_IMODE(placed.st_mode) == 0o444


def test_another_file_system_names_copy(tmp_path: Path, elsewhere: Path) -> None:
    with pytest.raises(StorageError) as caught:
        place(source(tmp_path), elsewhere / "placed", copy=False)
    assert "cannot be linked into the core" in caught.value.message
    assert "--copy, which needs 7000 bytes more" in caught.value.message
    assert list(elsewhere.iterdir()) == []


def test_copy(tmp_path: Path, elsewhere: Path) -> None:
    real = source(tmp_path)
    pieces: list[int] = []
    place(real, elsewhere / "placed", copy=True, copied=pieces.append)
    assert sum(pieces) == real.stat().st_size
    assert (elsewhere / "placed").read_bytes() == real.read_bytes()
    assert stat.S_IMODE((elsewhere / "placed").stat().st_mode) == 0o444


@pytest.mark.parametrize("copy", [False, True])
def test_nothing_is_replaced(tmp_path: Path, copy: bool) -> None:
    (tmp_path / "placed").write_bytes(b"mine")
    with pytest.raises(StorageError, match="placed: File exists"):
        place(source(tmp_path), tmp_path / "placed", copy=copy)
    assert (tmp_path / "placed").read_bytes() == b"mine"


def test_a_source_that_has_gone_or_changed(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"Cannot read .*missing"):
        place(tmp_path / "missing", tmp_path / "placed", copy=False)
    (tmp_path / "link").symlink_to(source(tmp_path))
    with pytest.raises(StorageError, match=r"Cannot read .*link"):
        place(tmp_path / "link", tmp_path / "placed", copy=False)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="pipe is no longer a regular file"):
        place(tmp_path / "pipe", tmp_path / "placed", copy=False)


def test_a_source_that_is_cut_while_it_is_copied(tmp_path: Path) -> None:
    # The kernel's files say that they have 4096 bytes and give fewer.
    real = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    with pytest.raises(StorageError, match="The source of placed became shorter while it was copied"):
        place(real, tmp_path / "placed", copy=True)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"Cannot make .*no-such-folder/placed: No such file"):
        place(source(tmp_path), tmp_path / "no-such-folder" / "placed", copy=False)


def test_a_disk_that_takes_no_more(tmp_path: Path, elsewhere: Path) -> None:
    real = source(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(StorageError, match=r"Cannot copy to .*placed: File too large"):
            place(real, elsewhere / "placed", copy=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_source_that_is_replaced_while_it_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = source(tmp_path)
    link = os.link

    def replace_first(*arguments: Path, **options: bool) -> None:
        real.rename(tmp_path / "old")
        real.write_bytes(b"another model")
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", replace_first)
    with pytest.raises(StorageError, match="was replaced while it was linked"):
        place(real, tmp_path / "placed", copy=False)
