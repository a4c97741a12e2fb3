"""Which blocks of a partial file were checked and are on the disk: a list that a power cut cannot falsify.

The file begins with a header that says what it speaks of. Each record after it is one range of covered bytes,
and a checksum of it and of the header. Records are appended only after the data itself was put on the disk;
reading stops at the first one that is torn, and everything behind it is forgotten.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import xxhash

from flare.errors import StorageError
from flare.files import describe_os_error
from flare_workers.ranges import Ranges

MAGIC = b"FLAREJ01"
MAX_RECORDS = 4_000_000  # a record a block of 4 TB; a longer journal is no journal of ours
_IDENTITY = 32  # bytes
_CHECKSUM = struct.Struct("<Q")
_RANGE = struct.Struct("<QQ")
HEADER_SIZE = len(MAGIC) + _IDENTITY + _CHECKSUM.size
RECORD_SIZE = _RANGE.size + _CHECKSUM.size


def identity_of(index_sha256: str, path: str, size: int) -> bytes:
    """Return what tells one file of one core from every other: 32 bytes.

    Args:
        index_sha256: of the signed index, hex.
        path: the file's path in the core.
        size: on disk, in bytes.
    """
    return hashlib.sha256(f"{index_sha256}\0{path}\0{size}".encode()).digest()


class Journal:
    """The journal beside one partial file. Blocks: use it in a thread.

    Args:
        path: made when it is not there; started anew when it is damaged or speaks of another file.
        identity: from `identity_of`.

    Raises:
        StorageError: it cannot be opened or written.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self.identity = identity
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self.ranges, sound = self._read()
            os.ftruncate(self._descriptor, sound)
            if not sound:
                head = MAGIC + identity
                self._append(head + _checksum(head))
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as problem:
            raise describe_os_error(problem, "Cannot keep the journal") from None

    def add(self, ranges: Ranges) -> None:
        """Say that these bytes are verified and on the disk; on the disk itself when this returns.

        Args:
            ranges: of covered bytes; the data was synced before.

        Raises:
            StorageError: it could not be written.
        """
        new = ranges.difference(self.ranges)
        records = []
        for run in new:
            packed = _RANGE.pack(*run)
            records.append(packed + _checksum(self.identity + packed))
        if not records:
            return
        try:
            self._append(b"".join(records))
        except OSError as problem:
            raise describe_os_error(problem, "Cannot write the journal") from None
        self.ranges = self.ranges.union(new)

    def close(self) -> None:
        """Let go of the file; it stays."""
        os.close(self._descriptor)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)

    def _read(self) -> tuple[Ranges, int]:
        """Return the ranges of every sound record, and where the sound part of the file ends."""
        size = os.fstat(self._descriptor).st_size
        head = os.pread(self._descriptor, HEADER_SIZE, 0)
        expected = MAGIC + self.identity
        if head != expected + _checksum(expected):
            return Ranges(), 0
        if size > HEADER_SIZE + MAX_RECORDS * RECORD_SIZE:
            raise StorageError("A journal is longer than any can be. Remove the cache's folder `resuming`.")
        found = []
        position = HEADER_SIZE
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(position)
            while len(record := file.read(RECORD_SIZE)) == RECORD_SIZE:
                packed, checksum = record[: _RANGE.size], record[_RANGE.size :]
                if checksum != _checksum(self.identity + packed):
                    break
                found.append(_RANGE.unpack(packed))
                position += RECORD_SIZE
        return Ranges.of(found), position


def _checksum(data: bytes) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh64_intdigest(data))
