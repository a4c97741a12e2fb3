"""Which file of this node a grant's member may be sent: the source in place, or the cache's copy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flare.agent.cache import Cache
from flare.agent.folders import check_file_path
from flare.agent.inventory import Signed, signed_at
from flare.agent.places import Entry
from flare.agent.waiting import ask_disk
from flare.cores.marker import Marker
from flare.cores.marker import Ranges as Runs
from flare.errors import BusyError, ConflictError, FlareError, NotFoundError
from flare.system import lock_shared
from flare.trust.grants import Package
from flare.values import dataclass
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

    Raises:
        ConflictError: the source in place is not the core that the grant names.
        FlareError: it cannot be read, or is no core any more.
    """
    wanted = Signed(package.index_sha256, package.publisher)
    source = package.source
    if source is not None and source.public_key == own_key:
        path = Path(source.path)
        try:
            found = await signed_at(path)
        except FlareError as problem:  # where it lies is nobody's business
            raise type(problem)(problem.message.replace(str(path), path.name)) from None
        if found != wanted:
            raise ConflictError(
                f"{path.name} on this node is not the core that the grant names: its index or publisher "
                "differs. It was changed since the command read it; run the command again."
            )
        return Copy(path.parent, path.name)
    complete = Entry(package.export, package.length)
    folder = cache.entry_folder(complete)
    if folder.is_dir():
        with contextlib.suppress(FlareError):
            signed = await signed_at(folder / package.files[0])
            if signed == wanted:
                return Copy(folder, package.files[0], complete)
    return await ask_disk(_find_part, cache, package)


def _find_part(cache: Cache, package: Package) -> Copy | None:
    for entry in cache.entries():
        if entry.rank is None or (entry.export, entry.length) != (package.export, package.length):
            continue
        folder = cache.entry_folder(entry)
        marker = cache.marker(entry)
        if marker is not None and speaks_of(marker, package) and marker.holds(folder):
            part = {path: marked.ranges for path, marked in marker.files.items()}
            return Copy(folder, package.files[0], entry, part)
    return None


def speaks_of(marker: Marker, package: Package) -> bool:
    """Tell whether a marker is about exactly this core, as far as it says."""
    return marker.index_sha256 == package.index_sha256 and marker.publisher in (None, package.publisher)


def busy_exchanging() -> BusyError:
    """Return the refusal of bytes that may not be the same ones in a moment."""
    return BusyError("The core is being replaced on this node. Try again in a moment.")


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
            lock_shared(descriptor)
        except OSError:
            raise busy_exchanging() from None
        yield
    finally:
        os.close(descriptor)
