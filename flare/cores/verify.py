"""Stored data against the signed index."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from flare.cores.hashing import DigestTask, Stages, digest_all, no_stages, open_regular
from flare.cores.primary import Primary, load_primary
from flare.errors import CoreError, IntegrityError
from flare.values import dataclass
from flare_workers.blocks import BLOCK_SIZE, DIGEST_SIZE
from flare_workers.ranges import Ranges

SEGMENT = 64 << 20  # bytes a process digests at a time: a hundredth of a second's bookkeeping a gigabyte


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found right: how many files, blocks and bytes, and how long it took in seconds."""

    files: int
    blocks: int
    bytes: int
    seconds: float


def verify_core(
    primary: Primary | Path,
    *,
    ranges: Mapping[int, Ranges] | None = None,
    progress: Stages = no_stages,
    processes: int | None = None,
) -> VerifyReport:
    """Digest a core's stored data and compare it with the signed index.

    Args:
        primary: a loaded primary with a path, or its path.
        ranges: of covered bytes by file number, rounded out to whole blocks here; None is all of it.
            Files that are not named need not exist.
        progress: shows one stage.
        processes: at most so many; by default one a processor.

    Raises:
        IntegrityError: a file is missing, has another size, or a block differs: the message names them.
        CoreError, TrustError, NotFoundError: the primary itself is wrong.
        StorageError: a file cannot be read.
    """
    began = time.monotonic()
    loaded = load_primary(primary) if isinstance(primary, Path) else primary
    table = loaded.digests()
    wanted = loaded.index.complete() if ranges is None else _rounded(loaded, ranges)
    for number in wanted:
        _check_size(loaded, number)
    tasks = _tasks(loaded, wanted)
    total = sum(task.length for _, _, task in tasks)
    advance = progress("verifying", total)
    for done, result in digest_all([task for _, _, task in tasks], advance, processes):
        number, offset, _ = tasks[done]
        expected = loaded.file_digests(table, number)
        begin = offset // BLOCK_SIZE * DIGEST_SIZE
        if result.blocks != expected[begin : begin + len(result.blocks)]:
            raise _differs(loaded, number, offset, result.blocks, expected[begin:])
    blocks = sum(-(-task.length // BLOCK_SIZE) for _, _, task in tasks)
    return VerifyReport(len(wanted), blocks, total, time.monotonic() - began)


def _rounded(primary: Primary, ranges: Mapping[int, Ranges]) -> dict[int, Ranges]:
    files = primary.index.files
    for number, of_file in ranges.items():
        if not 0 <= number < len(files) or of_file.end > files[number].size:
            raise CoreError(f"The core {primary.path} has no bytes {of_file.runs[-1:]} in a file {number}.")
    return {number: of_file.rounded_out(files[number].size) for number, of_file in ranges.items()}


def _check_size(primary: Primary, number: int) -> None:
    path = primary.file_path(number)
    name = primary.index.files[number].path or path.name
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        raise IntegrityError(
            f'The core {primary.path} is not complete: its file "{name}" is missing. '
            "Fetch or export it again."
        ) from None
    except OSError as problem:
        raise IntegrityError(
            f'The core {primary.path}: "{name}" cannot be read: {problem.strerror}.'
        ) from None
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    if size != primary.stored_size(number):
        raise IntegrityError(
            f'The core {primary.path} is damaged: "{name}" has {size} bytes '
            f"instead of {primary.stored_size(number)}. Fetch or export it again."
        )


def _tasks(primary: Primary, wanted: Mapping[int, Ranges]) -> list[tuple[int, int, DigestTask]]:
    """Return (file number, offset in its covered bytes, task); each task begins at a block."""
    tasks = []
    for number, of_file in wanted.items():
        path, start = primary.file_path(number), primary.data_start(number)
        for offset, length in of_file:
            for begin in range(offset, offset + length, SEGMENT):
                part = min(SEGMENT, offset + length - begin)
                tasks.append((number, begin, DigestTask(path, start + begin, part, whole=False)))
    return tasks


def _differs(primary: Primary, number: int, offset: int, found: bytes, expected: bytes) -> IntegrityError:
    """Name the first block that differs."""
    first = next(
        position
        for position in range(0, len(found), DIGEST_SIZE)
        if found[position : position + DIGEST_SIZE] != expected[position : position + DIGEST_SIZE]
    )
    file = primary.index.files[number]
    name = file.path or primary.file_path(number).name
    block = offset // BLOCK_SIZE + first // DIGEST_SIZE
    end = min((block + 1) * BLOCK_SIZE, file.size)
    problem = IntegrityError(
        f'The core {primary.path} is damaged: block {block} of "{name}" '
        f"(bytes {block * BLOCK_SIZE} to {end}) is not what its publisher signed. Fetch or export it again."
    )
    problem.file = name
    return problem
