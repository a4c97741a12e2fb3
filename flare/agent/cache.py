"""The node's cache: where received bytes lie, and the only code that makes them appear there.

| place | what |
|---|---|
| cores/<export>-<size>[-rank<R>]/ | a core's files; `.verified` says which bytes were checked |
| blobs/<sha256>.safetensors | immutable payloads, shared by core directories through hard links |
| bin/flare-<16 hex> | uploaded executables, named by their content |
| publishers/<fingerprint>.toml | public profiles that controllers passed |
| arriving/ | files that are still being received; emptied when the agent starts |
| resuming/<entry>/ | files of a transfer that can be resumed, with a journal of their verified blocks |

A published file is 0444 (0555 for executables) and never opened for writing again: new bytes go to a new
file, which is then linked to its name. Nothing is replaced, except by a file that has more of the same core,
and a primary by one that another publisher signed over the same index.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
from pathlib import Path

from flare.agent.folders import (
    is_locked,
    kept_from_ranks,
    open_below,
    parent_of,
    stat_below,
)
from flare.agent.pins import Pins
from flare.agent.places import Entry, Place, place_of
from flare.agent.room import Room
from flare.agent.waiting import ask_disk, in_thread
from flare.cores.marker import AGENT_MARKER, Marker, read_marker, write_marker
from flare.errors import (
    BusyError,
    ConflictError,
    FlareError,
    ForbiddenError,
    NotFoundError,
    RemoteProtocolError,
    StorageError,
)
from flare.files import (
    NO_HARD_LINKS,
    describe_os_error,
    ensure_private_folder,
    remove_unfinished,
    write_atomic,
)
from flare.identity import fingerprint
from flare.paths import Paths
from flare.trust.publishers import PublisherProfile


def _used_meanwhile(entry: Entry) -> BusyError:
    return BusyError(
        f"{entry} in this node's cache is the same model signed by another publisher, and a group or "
        "a transfer uses it. Stop that, then try again."
    )


class Cache:
    """The cache below one folder.

    Args:
        paths: where it lies.
        limit: the most bytes that cores, blobs and executables may take; None for what the disk has.

    Attributes:
        pins: what may not be evicted now.
        room: how much it may take; evicts.
    """

    def __init__(self, paths: Paths, limit: int | None = None) -> None:
        self.paths = paths
        self.arriving = paths.cache / "arriving"
        self.resuming = paths.cache / "resuming"
        self.pins = Pins((paths.cores, paths.executables))
        self.room = Room(paths, limit, self.arriving, self.resuming, self.pins)
        self._exchanges: list[tuple[Entry, asyncio.Event]] = []

    def prepare(self) -> None:
        """Make the folders, and remove what a killed agent left half received.

        Raises:
            StorageError, IdentityError: a folder cannot be made, or others may write to it.
        """
        shutil.rmtree(self.arriving, ignore_errors=True)
        paths = self.paths
        for folder in (
            paths.cores,
            paths.blobs,
            paths.executables,
            paths.publisher_profiles,
            self.arriving,
            self.resuming,
        ):
            ensure_private_folder(folder)
        for folder in (paths.publisher_profiles, *map(self.entry_folder, self.entries())):
            remove_unfinished(folder)

    # -- names -----------------------------------------------------------------------------------

    def place(self, kind: str, name: str) -> Place:
        """Return where a file that a peer names belongs; see `place_of`."""
        return place_of(self.paths, kind, name)

    def entry_folder(self, entry: Entry) -> Path:
        """Return a core directory's path, whether it exists or not."""
        return self.paths.cores / str(entry)

    def entries(self) -> tuple[Entry, ...]:
        """Return every core directory, by name."""
        found = (Entry.parse(path.name) for path in sorted(self.paths.cores.iterdir()) if path.is_dir())
        return tuple(entry for entry in found if entry is not None)

    # -- looking ---------------------------------------------------------------------------------

    def size_of(self, place: Place) -> int | None:
        """Return the size of a published file, or None where there is none."""
        found = stat_below(place.folder, place.path)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def have(self, place: Place, size: int) -> tuple[bool, bool]:
        """Return whether the cache holds the file at that size, and whether its bytes were verified.

        A core's digest-named companion that lies in the blob store already is linked into the core.
        """
        if self.find(place) != size:
            return False, False
        if place.entry is None:
            return True, True  # its name is its digest, checked before it got there
        marker = self.marker(place.entry)
        return True, marker is not None and marker.holds_for(place.folder, place.path) is not None

    def find(self, place: Place) -> int | None:
        """Return a file's size, or None; a digest-named companion is linked from the blob store first."""
        found = self.size_of(place)
        if found is None and place.entry is not None and place.digest and self._link_blob(place):
            found = self.size_of(place)
        return found

    def marker(self, entry: Entry) -> Marker | None:
        """Return a core directory's marker, if it has one."""
        return read_marker(self.entry_folder(entry) / AGENT_MARKER)

    def open(self, place: Place) -> int:
        """Open a published file for reading; the caller closes the descriptor.

        Raises:
            NotFoundError: there is none.
        """
        try:
            return open_below(place.folder, place.path)
        except OSError:
            raise NotFoundError(f"The cache does not hold {place.path}.") from None

    # -- publishing ------------------------------------------------------------------------------

    def new_arrival(self) -> Path:
        """Return a path for a file that is to be received; it is created by whoever writes it."""
        return self.arriving / secrets.token_hex(16)

    def begin_writing(self, place: Place) -> None:
        """Say that new bytes are coming for a core directory: what was verified of it is no longer."""
        if place.entry is not None:
            (self.entry_folder(place.entry) / AGENT_MARKER).unlink(missing_ok=True)

    def publish(self, arrived: Path, place: Place, *, sync: bool = True) -> None:
        """Give a received file, whose data is on the disk, its name. Nothing is ever replaced.

        Args:
            sync: put the name on the disk, too; else the caller does it, for many.

        Raises:
            ConflictError: another file of that name came first and has another size.
            StorageError: it cannot be linked.
        """
        size = arrived.stat().st_size
        try:
            arrived.chmod(place.mode)
            if place.entry is not None:
                ensure_private_folder(place.folder)
            if place.entry is not None and place.digest:
                self._link(arrived, self.paths.blobs, place.path, sync=sync)
            self._link(arrived, place.folder, place.path, sync=sync)
        except OSError as problem:
            raise describe_os_error(problem, "Cannot publish") from None
        finally:
            arrived.unlink(missing_ok=True)
        if self.size_of(place) != size:
            raise ConflictError(f"The cache holds another file named {place.path}. Remove it there first.")

    async def check_idle(self, entry: Entry, own_pins: int) -> None:
        """Refuse to exchange a core's primary while somebody else reads the core.

        Args:
            entry: the core directory.
            own_pins: how many of its pins are the asker's.

        Raises:
            BusyError: a group or a transfer uses it.
        """
        if self.pins.in_use(str(entry)) > own_pins or await ask_disk(is_locked, self.entry_folder(entry)):
            raise _used_meanwhile(entry)

    async def replace(self, arrived: Path, place: Place, *, own_pins: int | None = None) -> None:
        """Put a received file in the place of a published one.

        That one has fewer ranges of the same bytes, or is the primary of another publisher of the same index.
        Whoever reads the old one keeps it.

        Args:
            own_pins: refuse it while the entry has more pins than these; None where the bytes that are there
                stay the same.

        Raises:
            BusyError: a rank serves from that core directory, or somebody else uses it.
            StorageError: it cannot be renamed.
        """
        if own_pins is None:
            rank = BusyError(f"A rank serves from {place.folder.name}. Stop it, then try again.")
            return await in_thread(self._replace, arrived, place, rank)
        assert place.entry is not None, "only cores have publishers"
        # Who pins it after this look is told that it is exchanged.
        if self.pins.in_use(str(place.entry)) > own_pins:
            raise _used_meanwhile(place.entry)
        exchange = (place.entry, asyncio.Event())
        self._exchanges.append(exchange)
        try:
            await in_thread(self._replace, arrived, place, _used_meanwhile(place.entry))
        finally:
            self._exchanges.remove(exchange)
            exchange[1].set()

    def is_exchanged(self, entry: Entry) -> bool:
        """Tell whether a core's primary is being exchanged. Pin it first: then no other exchange begins."""
        return any(each == entry for each, _ in self._exchanges)

    async def exchanged(self, entry: Entry) -> None:
        """Wait until `is_exchanged` is no longer so."""
        for each, over in tuple(self._exchanges):
            if each == entry:
                await over.wait()

    def _replace(self, arrived: Path, place: Place, refusal: BusyError) -> None:
        try:
            with parent_of(place.folder, place.path) as (descriptor, name):
                with kept_from_ranks(place.folder) as free:
                    if not free:
                        raise refusal
                    self.begin_writing(place)
                    arrived.chmod(place.mode)
                    os.replace(arrived, name, dst_dir_fd=descriptor)
                os.fsync(descriptor)
        except OSError as problem:
            raise describe_os_error(problem, "Cannot publish") from None

    def borrow(self, entry: Entry, place: Place, path: str | None = None) -> bool:
        """Give a core directory a file that a directory has already; return whether it had it.

        Args:
            entry: that directory.
            path: the file there; None when it has the same one.
        """
        source = self.entry_folder(entry) / (path or place.path)
        try:
            ensure_private_folder(place.folder)
            self._link(source, place.folder, place.path)
        except FileNotFoundError:
            return False
        except OSError as problem:
            raise describe_os_error(problem, "Cannot link") from None
        return True

    def mark(self, entry: Entry, marker: Marker, name: str = AGENT_MARKER) -> None:
        """Say which bytes of a core directory are verified; they are on the disk.

        Raises:
            StorageError: it cannot be written.
        """
        write_marker(self.entry_folder(entry) / name, marker)

    def _link(self, source: Path, folder: Path, path: str, *, sync: bool = True) -> None:
        with parent_of(folder, path, create=True) as (descriptor, name):
            try:
                os.link(source, name, dst_dir_fd=descriptor, follow_symlinks=False)
            except FileExistsError:
                pass
            except OSError as problem:
                if problem.errno not in NO_HARD_LINKS:
                    raise
                raise StorageError(
                    f"The cache {self.paths.cache} lies on a file system without hard links, which it needs. "
                    "Set XDG_CACHE_HOME to a folder on another one for this node's agent, and restart it."
                ) from None
            if sync:
                os.fsync(descriptor)

    def _link_blob(self, place: Place) -> bool:
        """Link a blob into a core directory; return whether there was one."""
        blob = self.paths.blobs / place.path
        if not blob.is_file():
            return False
        ensure_private_folder(place.folder)
        try:
            self._link(blob, place.folder, place.path)
        except FileNotFoundError:
            return False  # it made room for something else just now
        except OSError as problem:
            raise describe_os_error(problem, "Cannot link the blob into") from None
        return True

    def store_profile(self, text: str, expected: str) -> Path:
        """Keep a publisher's public profile and return its path.

        Args:
            text: the profile.
            expected: the fingerprint that the grant names.

        Raises:
            ForbiddenError: it is another publisher's.
            RemoteProtocolError: it is no profile.
        """
        try:
            profile = PublisherProfile.from_text(text)
        except FlareError as problem:
            raise RemoteProtocolError(problem.message) from None
        if fingerprint(profile.public_key) != expected:
            raise ForbiddenError("The publisher profile is not the one that the grant names.")
        path = self.paths.publisher_profiles / f"{expected}.toml"
        if not path.exists():
            write_atomic(path, profile.to_text().encode(), mode=0o600)
        return path
