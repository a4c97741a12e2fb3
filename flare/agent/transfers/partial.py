"""A file that is being received: sparse, under a name of its own, until it is whole.

Without `resume` it lies in the cache's arriving/ and goes when the transfer fails. With it, it lies in
resuming/<entry>/ beside its journal, and the next transfer of the same core goes on from there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from flare.agent.cache import Cache
from flare.agent.places import Entry
from flare.agent.transfers.journal import HEADER_SIZE, Journal, identity_of
from flare.errors import StorageError
from flare.files import describe_os_error, ensure_private_folder
from flare_workers.ranges import Ranges, Run

# Bytes that a system call copies, so that a copy of a large file can be given up; and that a copy leaves in
# the page cache before it puts them on the disk and drops them: a GPU may share the system's memory.
COPY_PIECE = 64 << 20
PLAIN_PIECE = 1 << 20  # bytes copied through this process where the kernel does not do it
_NO_KERNEL_COPY = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL)  # depends on the file system
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_DIGITS = 32  # hex digits of a file's name there: paths of cores may be longer than a name


class Partial:
    """One file on its way. Blocks: use it in a thread, except for the attributes.

    Args:
        cache: where it will be published.
        entry: the core directory.
        path: in that directory.
        size: of the whole file in bytes.
        index_sha256: of the core's signed index, hex.
        resume: whether it outlives a failure.

    Attributes:
        descriptor: open for reading and writing.
        location: where it lies now.

    Raises:
        StorageError: it cannot be made.
    """

    def __init__(
        self, cache: Cache, entry: Entry, path: str, size: int, *, index_sha256: str, resume: bool
    ) -> None:
        self.path = path
        self.size = size
        self.journal: Journal | None = None
        self.given_up = False
        self.location = kept_at(cache, entry, path) if resume else cache.new_arrival()
        try:
            if resume:
                ensure_private_folder(self.location.parent)
            self.descriptor = (
                _open_kept(self.location) if resume else os.open(self.location, _FLAGS | os.O_EXCL, 0o600)
            )
        except OSError as problem:
            raise describe_os_error(problem, "Cannot make a file in the cache") from None
        try:
            if resume:
                self.journal = Journal(_journal_of(self.location), identity_of(index_sha256, path, size))
                if os.fstat(self.descriptor).st_size != size:
                    self._start_over()
                elif not self.journal.ranges.runs:
                    os.ftruncate(self.descriptor, 0)  # what is in it belongs to nothing that we know
            os.ftruncate(self.descriptor, size)
        except OSError as problem:
            self.discard()
            raise describe_os_error(problem, "Cannot make a file in the cache") from None
        except BaseException:
            self.discard()
            raise

    @property
    def kept(self) -> Ranges:
        """Covered bytes that an earlier transfer checked and put on the disk."""
        return Ranges() if self.journal is None else self.journal.ranges

    def start_over(self) -> None:
        """Forget everything that an earlier transfer left in it.

        Raises:
            StorageError: it cannot be emptied.
        """
        try:
            self._start_over()
            os.ftruncate(self.descriptor, self.size)
        except OSError as problem:
            raise describe_os_error(problem, "Cannot empty a file in the cache") from None

    def _start_over(self) -> None:
        os.ftruncate(self.descriptor, 0)
        if self.journal is not None:
            identity = self.journal.identity
            self.journal.close()
            _journal_of(self.location).unlink(missing_ok=True)
            self.journal = Journal(_journal_of(self.location), identity)

    def write(self, data: bytes) -> None:
        """Write the file's first bytes.

        Raises:
            StorageError: there is no room.
        """
        try:
            os.pwrite(self.descriptor, data, 0)
        except OSError as problem:
            raise describe_os_error(problem, f"Cannot write {self.path} in the cache") from None

    def copy_from(self, descriptor: int, runs: Iterable[Run]) -> None:
        """Copy ranges of a published file, sharing its extents where the file system can.

        Args:
            descriptor: of that file, of the same size.
            runs: (offset, length) in bytes, counted on disk.

        Raises:
            StorageError: it cannot be read, or there is no room.
        """
        copied: list[Run] = []
        try:
            for offset, length in runs:
                position, end = offset, offset + length
                while position < end and not self.given_up:
                    count = _copy_piece(descriptor, self.descriptor, position, end - position)
                    if not count:
                        raise StorageError(f"{self.path} in the cache became shorter while it was copied.")
                    copied.append((position, count))
                    position += count
                    if sum(length for _, length in copied) >= COPY_PIECE:
                        self._drop(descriptor, copied)
                        copied = []
            self._drop(descriptor, copied)
        except OSError as problem:
            raise describe_os_error(problem, f"Cannot copy {self.path} in the cache") from None

    def _drop(self, source: int, runs: list[Run]) -> None:
        """Put what was copied on the disk, and let go of its pages at both ends."""
        os.fdatasync(self.descriptor)
        for descriptor in (source, self.descriptor):
            for offset, length in runs:
                os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self, *, keep: bool) -> None:
        """Let go of it.

        Args:
            keep: leave it for the next transfer, if it is one that can be resumed.
        """
        if keep and self.journal is not None:
            os.close(self.descriptor)
            self.journal.close()
        else:
            self.discard()

    def discard(self) -> None:
        """Remove it; a published file has its name elsewhere."""
        os.close(self.descriptor)
        self.location.unlink(missing_ok=True)
        if self.journal is not None:
            self.journal.close()
            _journal_of(self.location).unlink(missing_ok=True)


def _open_kept(location: Path) -> int:
    """Open what an earlier transfer left, or a new file.

    An agent that was killed while it published the file left it read-only; and with a second name, once it
    was published: then nobody may write to it any more.
    """
    with contextlib.suppress(FileNotFoundError):
        information = location.lstat()
        if information.st_nlink > 1:
            _journal_of(location).unlink(missing_ok=True)
            location.unlink()
        elif stat.S_ISREG(information.st_mode):
            location.chmod(0o600)
    return os.open(location, _FLAGS, 0o600)


def _copy_piece(source: int, target: int, position: int, length: int) -> int:
    """Copy some bytes to the same place of another file; return how many."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, min(length, COPY_PIECE), position, position)
        except OSError as problem:
            if problem.errno not in _NO_KERNEL_COPY:
                raise
    return os.pwrite(target, os.pread(source, min(length, PLAIN_PIECE), position), position)


def kept_at(cache: Cache, entry: Entry, path: str) -> Path:
    """Return where a resumable partial file lies."""
    name = hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:_NAME_DIGITS]
    return cache.resuming / str(entry) / f"{name}.part"


def kept_bytes(cache: Cache, entry: Entry, path: str, size: int, index_sha256: str) -> Ranges:
    """Return which covered bytes a partial file that lies there has, without changing anything. Blocks."""
    location = kept_at(cache, entry, path)
    journal = _journal_of(location)
    try:
        found_there = location.lstat()
        if found_there.st_size != size or found_there.st_nlink > 1 or journal.lstat().st_size < HEADER_SIZE:
            return Ranges()
    except OSError:
        return Ranges()
    found = Journal(journal, identity_of(index_sha256, path, size))
    found.close()
    return found.ranges


def _journal_of(location: Path) -> Path:
    return location.with_suffix(".journal")
