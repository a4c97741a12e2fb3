"""Linux's calls on files that the standard library lacks. Elsewhere each does nothing."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any, cast

SYNC_WAIT_BEFORE, SYNC_WRITE, SYNC_WAIT_AFTER = 1, 2, 4
TMPFS, RAMFS = 0x01021994, 0x858458F6  # linux/magic.h
_KEEP_SIZE = 1
_CANNOT_SYNC_RANGES = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE)  # then fsync does it all
_STATFS_ROOM = 256  # bytes; struct statfs has 120 on 64-bit machines


def _load(name: str, *arguments: Any) -> Callable[..., int] | None:
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    function.argtypes = arguments
    return cast("Callable[..., int]", function)


_sync_file_range = _load("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
# Not os.posix_fallocate: where a filesystem cannot do it, that one writes zeros over others' bytes.
_fallocate = _load("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fstatfs = _load("fstatfs64", ctypes.c_int, ctypes.c_char_p)


def sync_file_range(descriptor: int, position: int, length: int, flags: int) -> None:
    """Start or await the writing of some pages.

    Raises:
        OSError: They could not be written. Linux says it once: the next fsync of this descriptor would not.
    """
    if _sync_file_range is None:
        return
    while _sync_file_range(descriptor, position, length, flags) != 0:
        number = ctypes.get_errno()
        if number in _CANNOT_SYNC_RANGES:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def allocate(descriptor: int, position: int, length: int) -> None:
    """Take places on the disk for some bytes of a file; its size and what it holds stay as they are.

    Raises:
        OSError: as fallocate(2); EOPNOTSUPP where the filesystem cannot do it.
    """
    if _fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    while _fallocate(descriptor, _KEEP_SIZE, position, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def is_in_memory(descriptor: int) -> bool:
    """Whether a file lies in memory and not on a disk."""
    answer = ctypes.create_string_buffer(_STATFS_ROOM)
    if _fstatfs is None or _fstatfs(descriptor, answer) != 0:
        return False
    return ctypes.c_long.from_buffer(answer).value in (TMPFS, RAMFS)  # the kind comes first
