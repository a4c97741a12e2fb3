"""Markers of verified data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flare.cores.marker import AGENT_MARKER, FileStamp, MarkedFile, Marker, read_marker, write_marker

INDEX = "ab" * 32


def marked(folder: Path, name: str, ranges: tuple[tuple[int, int], ...] | None = None) -> MarkedFile:
    return MarkedFile(FileStamp.of((folder / name).stat()), ranges)


def folder_with_marker(tmp_path: Path) -> Marker:
    (tmp_path / "core.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.gguf").write_bytes(b"y" * 50)
    marker = Marker(
        INDEX,
        {
            "core.safetensors": marked(tmp_path, "core.safetensors"),
            "model/m.gguf": marked(tmp_path, "model/m.gguf", ((0, 10), (20, 5))),
        },
    )
    write_marker(tmp_path / AGENT_MARKER, marker)
    return marker


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    marker = folder_with_marker(tmp_path)
    found = read_marker(tmp_path / AGENT_MARKER)
    assert found == marker
    assert found is not None
    assert found.holds(tmp_path)


def test_a_touched_file_is_no_longer_verified(tmp_path: Path) -> None:
    marker = folder_with_marker(tmp_path)
    os.utime(tmp_path / "model" / "m.gguf", ns=(1, 1))
    assert marker.holds_for(tmp_path, "core.safetensors") is not None
    assert marker.holds_for(tmp_path, "model/m.gguf") is None
    assert not marker.holds(tmp_path)


def test_a_replaced_file_is_no_longer_verified(tmp_path: Path) -> None:
    marker = folder_with_marker(tmp_path)
    path = tmp_path / "core.safetensors"
    times = path.stat()
    (tmp_path / "new").write_bytes(b"z" * 100)
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").rename(path)
    assert marker.holds_for(tmp_path, "core.safetensors") is None


def test_missing_files_and_unknown_names_are_not_verified(tmp_path: Path) -> None:
    marker = folder_with_marker(tmp_path)
    (tmp_path / "core.safetensors").unlink()
    assert marker.holds_for(tmp_path, "core.safetensors") is None
    assert marker.holds_for(tmp_path, "other") is None
    assert not Marker(INDEX, {}).holds(tmp_path)


ONE_FILE = (
    '{"index_sha256": "INDEX", "files": {"a": {"device": 1, "inode": 1, "size": 1, "mtime_ns": 1RANGES}}}'
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"index_sha256": "ab", "files": {}}',
        '{"index_sha256": "INDEX", "files": {"a": {"device": 1}}}',
        ONE_FILE.replace("RANGES", ', "ranges": [[1]]'),
        ONE_FILE.replace("RANGES", ', "ranges": [[-1, 2]]'),
        ONE_FILE.replace("1RANGES", "-1"),
    ],
)
def test_damaged_marker_means_not_verified(tmp_path: Path, text: str) -> None:
    (tmp_path / AGENT_MARKER).write_text(text.replace("INDEX", INDEX))
    assert read_marker(tmp_path / AGENT_MARKER) is None


def test_no_marker(tmp_path: Path) -> None:
    assert read_marker(tmp_path / AGENT_MARKER) is None
