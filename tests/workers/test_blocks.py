from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from flare_workers.blocks import ShortFileError, block_count, digests_of, read_at, select_digests
from tests.workers import parts
from tests.workers.parts import MIB


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 5])
def test_digests_of_a_part_of_a_file(tmp_path: Path, size: int) -> None:
    data = parts.noise(size)
    descriptor = parts.write_file(tmp_path / "file", b"head" + data + b"tail")
    steps: list[int] = []
    digests = digests_of(descriptor, 4, size, progress=steps.append)
    os.close(descriptor)
    assert digests.blocks == parts.table_of(data)
    assert digests.sha256 == hashlib.sha256(data).digest()
    assert sum(steps) == size
    assert len(digests.blocks) == block_count(size) * 32


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    descriptor = parts.write_file(tmp_path / "file", bytes(10))
    with pytest.raises(ShortFileError, match="the file ends before byte 10"):
        digests_of(descriptor, 0, 11)
    with pytest.raises(ShortFileError):
        read_at(descriptor, memoryview(bytearray(1)), 10)
    os.close(descriptor)


def test_selecting_the_digests_of_ranges() -> None:
    size = 4 * MIB + 7
    table = bytes(range(5)) * 32
    entries = [table[start : start + 32] for start in range(0, 160, 32)]
    runs = ((0, MIB), (2 * MIB, MIB), (4 * MIB, 7))
    assert select_digests(table, runs, size) == entries[0] + entries[2] + entries[4]
    assert select_digests(table, ((0, size),), size) == table


@pytest.mark.parametrize("run", [(1, MIB), (0, MIB + 1), (0, 5 * MIB), (4 * MIB, 6)])
def test_ranges_that_are_no_whole_blocks(run: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not made of whole blocks of a file of 4194311 bytes"):
        select_digests(bytes(160), (run,), 4 * MIB + 7)


def test_a_table_of_another_size() -> None:
    with pytest.raises(ValueError, match="64 bytes of digests do not fit a file of 1 bytes"):
        select_digests(bytes(64), (), 1)
