"""Files below a folder of ours, by names that a peer supplied.

Every name goes through `flare.paths` first and is then opened part by part, relative to a directory
descriptor and without following symbolic links: neither a name nor a link can lead out of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from flare.errors import FlareError, ForbiddenError
from flare.paths import check_relative_path

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_file_path(path: str, error: type[FlareError] = ForbiddenError) -> str:
    """Return the path of a core's file; its first part may not be one of our own hidden names.

    Raises:
        error: it could leave the folder, or lies on a marker.
    """
    check_relative_path(path, "The file", error)
    if path.startswith("."):
        raise error(f'The file "{path[:80]}" begins with a dot; such names belong to the cache itself.')
    return path


@contextlib.contextmanager
def parent_of(root: Path, path: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder that holds `path`, part by part.

    Args:
        root: a folder of ours, trusted.
        path: relative, already checked.
        create: make folders that are missing (0700).

    Yields:
        A directory descriptor and the file's own name.

    Raises:
        OSError: a part is missing, no folder, or a symbolic link.
    """
    *folders, name = path.split("/")
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=descriptor)
            deeper = os.open(folder, FOLDER_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = deeper
        yield descriptor, name
    finally:
        os.close(descriptor)


def open_below(root: Path, path: str, flags: int = os.O_RDONLY) -> int:
    """Open an existing file below `root`; the caller closes the descriptor.

    Raises:
        OSError: it is missing, or a part of its path is a symbolic link.
    """
    with parent_of(root, path) as (folder, name):
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)


def stat_below(root: Path, path: str) -> os.stat_result | None:
    """Return what a file below `root` is, links not followed; None where there is none."""
    try:
        with parent_of(root, path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def is_locked(path: Path) -> bool:
    """Tell whether a rank, perhaps one that no agent started, holds its lock on a core directory.

    A rank that locks it after this look finds that its path is another folder, or none, and starts over.
    """
    with kept_from_ranks(path) as free:
        return not free


@contextlib.contextmanager
def kept_from_ranks(path: Path) -> Iterator[bool]:
    """Hold a core directory's lock alone for the length of a block, so that no rank begins to read there.

    Yields:
        Whether it could be had; False: a rank has it, or a FETCH.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield True  # gone, or a link that is not ours
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            free = False
        else:
            free = True
        yield free
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Remove a file or a whole folder; what cannot be removed stays until the agent starts again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def files_below(folder: Path) -> Iterator[os.stat_result]:
    """Yield what every regular file below `folder` is, or the file itself; what vanishes is left out."""
    with contextlib.suppress(OSError):
        own = folder.lstat()
        if stat.S_ISREG(own.st_mode):
            yield own
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                information = Path(parent, name).lstat()
                if stat.S_ISREG(information.st_mode):
                    yield information
