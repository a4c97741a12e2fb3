"""How a model file gets into a core without a second copy of it."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from flare.errors import StorageError
from flare.files import describe_os_error

PUBLISHED_MODE = 0o444  # nobody writes a core's file again
FICLONE = 0x40049409  # linux/fs.h: share the extents of another file
COPY_PIECE = 64 << 20  # bytes a call: Ctrl-C is heard between two
# What a file system says that cannot share extents here; anything else is a real failure.
_NO_REFLINK = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EBADF}
# Another file system; another owner (protected_hardlinks); a file system without hard links.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP}


def place(
    real: Path, destination: Path, *, copy: bool, copied: Callable[[int], None] = lambda _count: None
) -> None:
    """Make `destination` hold what `real` holds: a reflink, else a hard link, or a copy where asked for.

    A hard link keeps the mode of the file it links: that one belongs to its owner.

    Args:
        real: a regular file, links resolved.
        destination: must not exist; its folder must.
        copy: copy where no reflink can be made.
        copied: is told of every piece's bytes while it is copied.

    Raises:
        StorageError: neither kind of link can be made (the message names --copy), or the copy failed.
    """
    try:
        source = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise describe_os_error(problem, "Cannot read") from None
    try:
        information = os.fstat(source)
        if not stat.S_ISREG(information.st_mode):
            raise StorageError(f"{real} is no longer a regular file. Export again.")
        if _reflink(source, destination):
            return
        if copy:
            _copy(source, information.st_size, destination, copied)
        else:
            _hard_link(real, information, destination)
    finally:
        os.close(source)


def _create(destination: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(destination, flags, 0o600)
    except OSError as problem:
        raise describe_os_error(problem, "Cannot make") from None


def _reflink(source: int, destination: Path) -> bool:
    if sys.platform != "linux":
        return False
    import fcntl

    target = _create(destination)
    try:
        fcntl.ioctl(target, FICLONE, source)
        os.fchmod(target, PUBLISHED_MODE)
        os.fsync(target)
    except OSError as problem:
        destination.unlink()
        if problem.errno in _NO_REFLINK:
            return False
        raise describe_os_error(problem, f"Cannot make {destination}") from None
    finally:
        os.close(target)
    return True


def _hard_link(real: Path, information: os.stat_result, destination: Path) -> None:
    try:
        os.link(real, destination, follow_symlinks=False)
    except OSError as problem:
        if problem.errno in _NO_LINK:
            raise StorageError(
                f"{real} cannot be linked into the core: {problem.strerror}. Choose an output folder "
                "on the same file system, as the owner of the model; or give --copy, which needs "
                f"{information.st_size} bytes more of disk for this file."
            ) from None
        raise describe_os_error(problem, f"Cannot link {real} into the core") from None
    if not os.path.samestat(information, destination.lstat()):
        raise StorageError(f"{real} was replaced while it was linked. Export again.")


def _copy(source: int, size: int, destination: Path, copied: Callable[[int], None]) -> None:
    target = _create(destination)
    try:
        done = 0
        while done < size:
            sent = os.sendfile(target, source, done, min(COPY_PIECE, size - done))
            if sent == 0:
                raise StorageError(f"The source of {destination.name} became shorter while it was copied.")
            done += sent
            copied(sent)
        os.fchmod(target, PUBLISHED_MODE)
        os.fsync(target)
    except OSError as problem:
        raise describe_os_error(problem, f"Cannot copy to {destination}") from None
    finally:
        os.close(target)
