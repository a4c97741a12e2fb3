"""Files that must survive: written whole or not at all, private where they must be.

This is the only helper that makes a file appear under its name. What else renames: `agent.cache`
into the cache, `cores.export` into the folder that it makes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flare.errors import BusyError, FlareError, IdentityError, NotFoundError, StorageError

OUR_FOLDER = "flare"  # what our folders in ~/.config, ~/.cache and ~/.local/share are called
# What link says on a file system without hard links, such as FAT and many network and FUSE ones.
NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
LOCK_WAIT = 10.0  # seconds; a change of one file takes milliseconds, so a longer wait means a stuck command
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
    """Make `folder` and every missing parent with mode 0700, whatever the umask says, and return it.

    A folder of ours that others may write to is refused, it or one of its parents up to our own in an XDG
    folder: they could replace what is in it. What lies above that was there before and is left alone.

    Raises:
        StorageError: it cannot be made.
        IdentityError: group or others may write to it.
    """
    try:
        missing = itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents))
        for each in reversed(list(missing)):
            # Not parents=True: that makes parents with the umask's mode.
            with contextlib.suppress(FileExistsError):
                each.mkdir(mode=0o700)
        for ours in _our_folders(folder):
            mode = stat.S_IMODE(ours.stat().st_mode)
            if mode & 0o022:
                raise IdentityError(f"Others may write to {ours}. Run `chmod 700 {ours}`, then try again.")
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    except OSError as problem:
        raise describe_os_error(problem, "Cannot make the folder") from None
    return folder


def _our_folders(folder: Path) -> list[Path]:
    """Return `folder` and those above it up to our own; `folder` alone where it lies in none of ours."""
    above = [folder, *folder.parents]
    names = [path.name for path in above]
    return above[: names.index(OUR_FOLDER) + 1] if OUR_FOLDER in names else [folder]


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a piece.

    Args:
        path: its folder must exist.
        data: the whole content.
        mode: the permission bits of the new file.

    Raises:
        StorageError: nothing changed; the old file is as it was.
    """
    _publish(path, data, mode, os.replace)


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Like write_atomic, but never over another file: of several writers at once exactly one succeeds.

    Raises:
        FileExistsError: there is one already, written whole.
        StorageError: it could not be written.
    """
    _publish(path, data, mode, _appear_first)


def _appear_first(temporary: Path, path: Path) -> None:
    """Give a file its name, unless there is one of that name: a link, unlike a rename, refuses that."""
    try:
        os.link(temporary, path)
    except OSError as problem:
        if problem.errno not in NO_HARD_LINKS:
            raise
        # Nobody can link there, so that every writer comes here, and of those the lock makes one the first.
        with locked(path):
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            temporary.rename(path)


def _publish(path: Path, data: bytes, mode: int, appear: Callable[[Path, Path], None]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            os.fchmod(descriptor, mode)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
            written = os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
        appear(temporary, path)
        temporary.unlink(missing_ok=True)
        fsync_folder(path.parent)
    except FileExistsError:
        temporary.unlink(missing_ok=True)
        raise
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        problem.filename = str(path)
        raise describe_os_error(problem, "Cannot write") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    remove_unfinished(path.parent, path.name, before=written - ABANDONED_SECONDS)


@contextlib.contextmanager
def locked(path: Path, *, wait: float = LOCK_WAIT) -> Iterator[None]:
    """Hold the lock of a file that several commands read, change and write; it lies beside it as NAME.lock.

    Args:
        path: the file; it need not exist, its folder must.
        wait: seconds to wait for another command that changes it.

    Raises:
        BusyError: another command holds it for too long.
        StorageError: there can be no lock.
    """
    try:
        descriptor = os.open(
            path.with_name(f"{path.name}.lock"),
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
    except OSError as problem:
        raise describe_os_error(problem, "Cannot lock") from None
    try:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(
                        f"Another flare command is changing {path} and does not finish. Wait for it or end "
                        "it, then run this one again."
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


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
    return _read(path, limit, what, error)[0]


def read_private(
    path: Path, limit: int, what: str, *, then: str = "make a new one if somebody may have copied it"
) -> bytes:
    """Like read_bounded, for a secret: refused when group or others have any right to it.

    Args:
        then: completes "Run `chmod 600 ...`, and ...".

    Raises:
        IdentityError: others can read it, or own it; the message says the command that mends it.
        NotFoundError: there is no such file.
    """
    data, found = _read(path, limit, what, IdentityError)
    _check_owner(path, found, what, IdentityError)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        rights = " and ".join(
            word for bits, word in ((0o044, "read"), (0o022, "changed"), (0o011, "executed")) if mode & bits
        )
        raise IdentityError(
            f"{what} {path} can be {rights} by others (mode {mode:04o}). Run `chmod 600 {path}`, and {then}."
        )
    return data


def read_trusted(path: Path, limit: int, what: str, error: type[FlareError] = StorageError) -> bytes:
    """Like read_bounded, for a file that decides what is run or whom we trust: nobody else may write it.

    Raises:
        error: group or others may write it, or it belongs to another user than this one or root.
        NotFoundError: there is no such file.
    """
    data, found = _read(path, limit, what, error)
    _check_owner(path, found, what, error)
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise error(
            f"{what} {path} can be changed by others (mode {stat.S_IMODE(found.st_mode):04o}). Look at what "
            f"it says, run `chmod go-w {path}`, then try again."
        )
    return data


def _read(path: Path, limit: int, what: str, error: type[FlareError]) -> tuple[bytes, os.stat_result]:
    """Return a file's content and what the same descriptor says of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError(f"{what} {path} does not exist.") from None
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}.") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise error(f"{what} {path} is not a regular file.")
    with open(descriptor, "rb") as file:
        try:
            data = file.read(limit + 1)
        except OSError as problem:
            raise error(f"{what} {path} cannot be read: {problem.strerror}.") from None
    if len(data) > limit:
        raise error(f"{what} {path} is larger than the {limit} bytes that it may have.")
    return data, found


def _check_owner(path: Path, found: os.stat_result, what: str, error: type[FlareError]) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise error(
            f"{what} {path} belongs to another user ({found.st_uid}), who can change it. Run this command as "
            f"that user; or look at what it says, then run `chown {os.geteuid()} {path}`."
        )
