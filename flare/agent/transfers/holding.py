"""Which file of this node a grant's member may be sent: the source in place, or the cache's copy."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flare.agent.cache import Cache, Entry
from flare.agent.folders import check_file_path
from flare.agent.inventory import index_of
from flare.cores.marker import Ranges as Runs
from flare.errors import BusyError, FlareError, NotFoundError
from flare.trust.grants import Package
from flare_workers.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Copy:
    """A core that this node holds.

    Args:
        folder: where its files lie.
        primary: the primary's name there; companions are relative to the folder.
        entry: the cache's entry; None for a source in place, outside the agent's cache.
        part: verified ranges by file, for a directory that holds one rank's part; None: all of every file.
    """

    folder: Path
    primary: str
    entry: Entry | None = None
    part: dict[str, Runs | None] | None = None

    def path(self, package: Package, file: str) -> Path:
        """Return where one of the package's files lies; its name can be trusted not to leave the folder.

        Raises:
            ForbiddenError: the name could leave it.
        """
        if file == package.files[0]:
            return self.folder / self.primary
        return self.folder / check_file_path(file)

    def check_has(self, package: Package, file: str, ranges: Runs) -> None:
        """Refuse bytes that this copy lacks: they would be sent as zeros.

        Raises:
            NotFoundError: it lacks some of them.
        """
        if self.part is None:
            return
        if file in self.part:
            has = self.part[file]
            # A packed primary's ranges count from its data, which only its own header tells.
            if has is None or (file != package.files[0] and Ranges.of(has).covers(Ranges.of(ranges))):
                return
        raise NotFoundError(f"This node holds only a part of {file}.")


async def find_copy(cache: Cache, package: Package, own_key: bytes) -> Copy | None:
    """Return this node's copy of exactly the core that a grant names; None where it holds none.

    The complete core's index is read from its primary: one that a controller sent has no marker.
    """
    source = package.source
    if source is not None and source.public_key == own_key:
        path = Path(source.path)
        return Copy(path.parent, path.name)
    complete = Entry(package.export, package.length)
    folder = cache.entry_folder(complete)
    if folder.is_dir():
        with contextlib.suppress(FlareError):
            if await index_of(folder / package.files[0]) == package.index_sha256:
                return Copy(folder, package.files[0], complete)
    return await asyncio.to_thread(_find_part, cache, package)


def _find_part(cache: Cache, package: Package) -> Copy | None:
    for entry in cache.entries():
        if entry.rank is None or (entry.export, entry.length) != (package.export, package.length):
            continue
        folder = cache.entry_folder(entry)
        marker = cache.marker(entry)
        if marker is not None and marker.index_sha256 == package.index_sha256 and marker.holds(folder):
            part = {path: marked.ranges for path, marked in marker.files.items()}
            return Copy(folder, package.files[0], entry, part)
    return None


@contextlib.contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Hold the lock that ranks hold too: nobody removes or replaces the folder meanwhile.

    Raises:
        BusyError: somebody does that now.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # a folder that can be passed but not listed; a file that is not there shows itself next
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise BusyError("The core is being replaced on this node. Try again in a moment.") from None
        yield
    finally:
        os.close(descriptor)
