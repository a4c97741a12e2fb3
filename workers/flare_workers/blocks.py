"""The 1 MiB blocks that a core's signed digest table speaks of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

BLOCK_SIZE = 1 << 20
DIGEST_SIZE = 32  # SHA-256
_PIECE = 256 << 10  # read and digested at once: stays in a core's cache


class ShortFileError(OSError):
    """A file ended before the bytes that were asked for."""


@dataclass(frozen=True, slots=True)
class FileDigests:
    """What one pass over a file gives.

    Attributes:
        blocks: 32 bytes a block, in order; the last block may be shorter than the others.
        sha256: The whole's digest, 32 bytes.
    """

    blocks: bytes
    sha256: bytes


def block_count(size: int) -> int:
    """How many blocks `size` bytes make; the last one may be shorter."""
    return -(-size // BLOCK_SIZE)


def digests_of(
    descriptor: int, offset: int, length: int, *, progress: Callable[[int], None] | None = None
) -> FileDigests:
    """Digest `length` bytes of a file from `offset` on: each block and the whole, in one read.

    Args:
        descriptor: Open for reading; its file position is neither used nor moved.
        offset: Where block 0 starts, in bytes.
        length: In bytes.
        progress: Called with the number of bytes that each step added.

    Raises:
        ShortFileError: The file ends too early.
        OSError: It cannot be read.
    """
    table = bytearray()
    whole = hashlib.sha256()
    buffer = memoryview(bytearray(min(_PIECE, max(length, 1))))
    position, end = offset, offset + length
    while position < end:
        block_end = min(position + BLOCK_SIZE, end)
        block = hashlib.sha256()
        while position < block_end:
            got = read_at(descriptor, buffer[: min(len(buffer), block_end - position)], position)
            piece = buffer[:got]
            block.update(piece)
            whole.update(piece)
            position += got
            if progress is not None:
                progress(got)
        table += block.digest()
    return FileDigests(bytes(table), whole.digest())


def read_at(descriptor: int, buffer: memoryview, position: int) -> int:
    """Read at least one byte at `position` into the buffer and return how many.

    Raises:
        ShortFileError: The file ends at or before `position`.
    """
    got = os.preadv(descriptor, [buffer], position)
    if got == 0:
        raise ShortFileError(f"the file ends before byte {position}")
    return got


def select_digests(digests: bytes, runs: tuple[tuple[int, int], ...], size: int) -> bytes:
    """The table entries of the blocks that the runs cover, in order.

    Args:
        digests: 32 bytes a block of the file.
        runs: (offset, length) in bytes, sorted; each starts at a block and ends at one or at the file's end.
        size: The file's size in bytes.

    Raises:
        ValueError: The table's length does not fit the size, or a run is not made of whole blocks.
    """
    if len(digests) != block_count(size) * DIGEST_SIZE:
        raise ValueError(f"{len(digests)} bytes of digests do not fit a file of {size} bytes")
    parts = []
    for offset, length in runs:
        end = offset + length
        if offset % BLOCK_SIZE or (end % BLOCK_SIZE and end != size) or end > size:
            raise ValueError(f"range {offset}+{length} is not made of whole blocks of a file of {size} bytes")
        parts.append(digests[offset // BLOCK_SIZE * DIGEST_SIZE : block_count(end) * DIGEST_SIZE])
    return b"".join(parts)
