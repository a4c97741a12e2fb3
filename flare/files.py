"""Files that must survive: written whole or not at all, private where they must be.

This is the only helper that makes a file appear under its name. What else renames: `agent.cache`
into the cache, `cores.export` into the folder that it makes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from flare.errors import FlareError, IdentityError, NotFoundError, StorageError

UNFINISHED = ".new"  # ends the names of files that are being written
ABANDONED_SECONDS = 600.0  # a file that took longer to write has lost its process


def describe_os_error(problem: OSError, doing: str) -> StorageError:
    """Return a StorageError whose sentence says what failed, where, and what to do."""
    where = f" {problem.filename}" if problem.filename else ""
    if problem.errno == errno.ENOSPC:
        return StorageError(f"{doing}{where}: the disk is full. Free some space, then run the command again.")
    if problem.errno == errno.EDQUOT:
        return StorageError(f"{doing}{where}: the disk quota is used up. Free some space, then try again.")
    if problem.errno in (errno.EACCES, errno.EPERM):
        return StorageError(f"{doing}{where}: permission denied. Check who owns that folder.")
    if problem.errno == errno.EROFS:
        return StorageError(f"{doing}{where}: the file system is read-only.")
    return StorageError(f"{doing}{where}: {problem.strerror or problem}.")


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ensure_private_folder(folder: Path) -> Path:
    """Make `folder` with mode 0700 (parents included) and return it.

    A folder of ours that others may write to is refused: they could replace what is in it.

    Raises:
        StorageError: it cannot be made.
        IdentityError: group or others may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as problem:
        raise describe_os_error(problem, "Cannot make the folder") from None
    if mode & 0o022:
        raise IdentityError(f"Others may write to {folder}. Run `chmod 700 {folder}`, then try again.")
    return folder


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a piece.

    Args:
        path: its folder must exist.
        data: the whole content.
        mode: the permission bits of the new file.

    Raises:
        StorageError: nothing changed; the old file is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            os.fchmod(descriptor, mode)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        written = temporary.stat().st_mtime
        temporary.replace(path)
        fsync_folder(path.parent)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        problem.filename = str(path)
        raise describe_os_error(problem, "Cannot write") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    remove_unfinished(path.parent, path.name, before=written - ABANDONED_SECONDS)


def remove_unfinished(folder: Path, name: str = "", *, before: float = math.inf) -> None:
    """Remove what writers left in a folder that were killed while they wrote.

    Args:
        name: only what was to become this file; all of them without it.
        before: only what was last written before that time, in seconds since the epoch: somebody may still
            write the rest. Without it nobody else may be writing in that folder.
    """
    beginning = f".{name}." if name else "."
    with contextlib.suppress(OSError):  # it is only tidying up
        for path in folder.iterdir():
            if path.name.startswith(beginning) and path.name.endswith(UNFINISHED):
                with contextlib.suppress(FileNotFoundError):
                    if path.lstat().st_mtime < before:
                        path.unlink()


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a private folder that goes after the block.

    A process that is killed cannot remove its own; whoever makes the next one with that prefix does. It holds
    a lock, which the kernel drops with the process.

    Raises:
        StorageError: it cannot be made.
    """
    _remove_abandoned(parent, prefix)
    lock = None
    try:
        while lock is None:  # else somebody took it for an abandoned one before it was locked
            folder = parent / f"{prefix}{secrets.token_hex(4)}"
            folder.mkdir(mode=0o700)
            lock = _lock_folder(folder, required=False)
    except OSError as problem:
        raise describe_os_error(problem, "Cannot make the folder") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # it is only tidying up: whatever this is, it stays
            lock = _lock_folder(folder, required=True) if folder.lstat().st_uid == os.geteuid() else None
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock_folder(folder: Path, *, required: bool) -> int | None:
    """Return a descriptor that holds a folder's lock; None when somebody else holds it, or has removed it.

    Args:
        required: whether to raise OSError on a file system without locks, where nothing abandoned is removed.
    """
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        ours = False
        try:
            ours = (
                _lock(descriptor, required=required) and folder.stat().st_ino == os.fstat(descriptor).st_ino
            )
        finally:
            if not ours:
                os.close(descriptor)
        if ours:
            return descriptor
    return None


def _lock(descriptor: int, *, required: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        if required:
            raise
    return True


def read_bounded(path: Path, limit: int, what: str, error: type[FlareError] = StorageError) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        NotFoundError: there is no such file.
        error: it is too large, no regular file, or cannot be read; the message begins with `what`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError(f"{what} {path} does not exist.") from None
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{what} {path} is not a regular file.")
    with open(descriptor, "rb") as file:
        try:
            data = file.read(limit + 1)
        except OSError as problem:
            raise error(f"{what} {path} cannot be read: {problem.strerror}.") from None
    if len(data) > limit:
        raise error(f"{what} {path} is larger than the {limit} bytes that it may have.")
    return data


def read_private(path: Path, limit: int, what: str) -> bytes:
    """Like read_bounded, for a secret: refused when group or others have any right to it.

    Raises:
        IdentityError: others can read it; the message says the command that mends it.
        NotFoundError: there is no such file.
    """
    data = read_bounded(path, limit, what, IdentityError)
    information = path.stat()
    if stat.S_IMODE(information.st_mode) & 0o077:
        raise IdentityError(
            f"{what} {path} can be read by others (mode {stat.S_IMODE(information.st_mode):04o}). "
            f"Run `chmod 600 {path}`, and make a new one if somebody may have copied it."
        )
    return data
