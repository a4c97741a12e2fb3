"""What goes from the cache because it is wrong, or was not finished. `room` evicts what is in order.

Looking whether somebody uses a directory and renaming it out of the cache happen without an await, so that no
pin can come in between. The event loop waits for the disk then: whoever expects that it hangs reaches it in a
thread first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from flare.agent.cache import Cache
from flare.agent.folders import is_locked
from flare.agent.places import PART_MARKER, Entry, is_blob
from flare.cores.marker import AGENT_MARKER, MODEL_MARKER
from flare.errors import BusyError, NotFoundError


def remove_blob(cache: Cache, name: str) -> None:
    """Remove a blob whose content proved not to be what its name says."""
    (cache.paths.blobs / name).unlink(missing_ok=True)


def drop_blob(cache: Cache, name: str) -> None:
    """Remove a blob that no core directory links."""
    path = cache.paths.blobs / name
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_nlink == 1:
            path.unlink()


def is_in_use(cache: Cache, folder: Path, own_pins: int = 0) -> bool:
    """Tell whether a rank or a transfer uses a directory of cores/ or models/.

    Args:
        own_pins: how many of its pins are the asker's.
    """
    pins = cache.pins.in_use(folder.name) if folder.parent == cache.paths.cores else 0
    return pins > own_pins or is_locked(folder)


def take_damaged(cache: Cache, folder: Path, file: str | None, own_pins: int = 0) -> Path | None:
    """Take a core directory out of the cache whose stored bytes proved not to be the signed ones.

    Nothing else would replace it: its files have their sizes, so that nobody sends them again.

    Args:
        folder: a directory of cores/ or models/.
        file: the one that is wrong, where it is known; a blob of that name goes too.
        own_pins: how many of the folder's pins are the asker's.

    Returns:
        What is to be deleted; None where it is gone already.

    Raises:
        NotFoundError: the folder is none of the cache's: nothing outside of it is ever removed.
        BusyError: another rank or a transfer uses it; it counts as unverified from now on.
    """
    if not _is_core_folder(cache, folder):
        raise NotFoundError(f"{folder} is no core directory of this node's cache.")
    if file is not None and is_blob(file):
        remove_blob(cache, file)
    for marker in (AGENT_MARKER, PART_MARKER, MODEL_MARKER):
        (folder / marker).unlink(missing_ok=True)
    if is_in_use(cache, folder, own_pins):
        raise BusyError(f"{folder.name} is used by another group or transfer.")
    try:
        return cache.room.take_away(folder)
    except FileNotFoundError:
        return None


def take_unfinished(cache: Cache, entry: Entry, brought: Collection[str], own_pins: int) -> Path | None:
    """Take a core directory out of the cache if it has nothing but what one transfer brought.

    Args:
        brought: paths of what that transfer put there.
        own_pins: how many of the entry's pins are the asker's.

    Returns:
        What is to be deleted; None when it is gone, or stays: others use it, or have put files there.
    """
    folder = cache.entry_folder(entry)
    if not folder.is_dir() or is_in_use(cache, folder, own_pins):
        return None
    for parent, _, names in os.walk(folder):
        for name in names:
            path = str(Path(parent, name).relative_to(folder))
            if path not in brought and not path.startswith("."):
                return None
    return cache.room.take_away(folder)


def _is_core_folder(cache: Cache, folder: Path) -> bool:
    parent = folder.parent
    of_ranks = parent.parent == cache.paths.models and parent.name not in ("", ".", "..")
    ours = parent == cache.paths.cores or (of_ranks and not parent.is_symlink())
    return ours and Entry.parse(folder.name) is not None and not folder.is_symlink()
