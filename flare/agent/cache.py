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
import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from flare.agent.folders import (
    check_file_path,
    is_locked,
    kept_from_ranks,
    open_below,
    parent_of,
    stat_below,
)
from flare.agent.pins import Pins
from flare.agent.room import Room
from flare.agent.waiting import ask_disk, in_thread
from flare.cores.marker import AGENT_MARKER, MODEL_MARKER, Marker, read_marker, write_marker
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

PART_MARKER = ".verified-part"  # as `.verified`, for a directory that holds less than the index gives

_ENTRY = re.compile(
    r"(?P<export>[0-9a-f]{32})-(?P<length>[1-9][0-9]{0,15})(-rank(?P<rank>0|[1-9][0-9]{0,4}))?\Z"
)
_BLOB = re.compile(r"[0-9a-f]{64}\.safetensors\Z")
_EXECUTABLE = re.compile(r"flare-[0-9a-f]{16}\Z")


@dataclass(frozen=True, slots=True)
class Entry:
    """A core directory's name: which core, and whether it is complete or one rank's part.

    Args:
        export: 32 hex digits.
        length: the primary's size in bytes.
        rank: whose part; None for the complete core.
    """

    export: str
    length: int
    rank: int | None = None

    def __str__(self) -> str:
        suffix = "" if self.rank is None else f"-rank{self.rank}"
        return f"{self.export}-{self.length}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Entry | None:
        """Return the entry that a folder's name means, or None."""
        match = _ENTRY.match(text)
        if match is None:
            return None
        rank = match["rank"]
        return cls(match["export"], int(match["length"]), None if rank is None else int(rank))


@dataclass(frozen=True, slots=True)
class Place:
    """Where one file of the cache belongs.

    Args:
        kind: core, blob or executable.
        folder: the trusted folder.
        path: relative to it.
        entry: the core directory, for kind core.
        digest: what the content's SHA-256 must begin with, hex; "" where the name does not say.
    """

    kind: str
    folder: Path
    path: str
    entry: Entry | None = None
    digest: str = ""

    @property
    def pin(self) -> str:
        """The name that pins it, with its core directory where it has one."""
        return self.path if self.entry is None else str(self.entry)

    @property
    def mode(self) -> int:
        """The published file's permission bits."""
        return 0o555 if self.kind == "executable" else 0o444


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
        """Return where a file that a peer names belongs.

        Raises:
            RemoteProtocolError: no such name can be in the cache.
        """
        if kind == "blob" and _BLOB.match(name):
            return Place(kind, self.paths.blobs, name, digest=name[:64])
        if kind == "executable" and _EXECUTABLE.match(name):
            return Place(kind, self.paths.executables, name, digest=name.removeprefix("flare-"))
        folder, _, path = name.partition("/")
        entry = Entry.parse(folder)
        if kind == "core" and entry is not None and path:
            check_file_path(path, RemoteProtocolError)
            digest = path[:64] if _BLOB.match(path) else ""
            return Place(kind, self.paths.cores / str(entry), path, entry, digest)
        raise RemoteProtocolError(f'The cache has no place for "{name[:100]}" of the kind {kind}.')

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

    # -- removing -------------------------------------------------------------------------------

    def remove_blob(self, name: str) -> None:
        """Remove a blob whose content proved not to be what its name says."""
        (self.paths.blobs / name).unlink(missing_ok=True)

    def in_use(self, folder: Path, own_pins: int = 0) -> bool:
        """Tell whether a rank or a transfer uses a directory of cores/ or models/.

        Args:
            own_pins: how many of its pins are the asker's.
        """
        pins = self.pins.in_use(folder.name) if folder.parent == self.paths.cores else 0
        return pins > own_pins or is_locked(folder)

    def take_damaged(self, folder: Path, file: str | None, own_pins: int = 0) -> Path | None:
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
        if not self._is_core_folder(folder):
            raise NotFoundError(f"{folder} is no core directory of this node's cache.")
        if file is not None and _BLOB.match(file):
            self.remove_blob(file)
        for marker in (AGENT_MARKER, PART_MARKER, MODEL_MARKER):
            (folder / marker).unlink(missing_ok=True)
        if self.in_use(folder, own_pins):
            raise BusyError(f"{folder.name} is used by another group or transfer.")
        try:
            return self.room.take_away(folder)
        except FileNotFoundError:
            return None

    def take_unfinished(self, entry: Entry, brought: Collection[str], own_pins: int) -> Path | None:
        """Take a core directory out of the cache if it has nothing but what one transfer brought.

        Args:
            brought: paths of what that transfer put there.
            own_pins: how many of the entry's pins are the asker's.

        Returns:
            What is to be deleted; None when it is gone, or stays: others use it, or have put files there.
        """
        folder = self.entry_folder(entry)
        # Looking and renaming happen without an await, so that nobody can put a file there in between.
        if not folder.is_dir() or self.in_use(folder, own_pins):
            return None
        for parent, _, names in os.walk(folder):
            for name in names:
                path = str(Path(parent, name).relative_to(folder))
                if path not in brought and not path.startswith("."):
                    return None
        return self.room.take_away(folder)

    def drop_blob(self, name: str) -> None:
        """Remove a blob that no core directory links."""
        path = self.paths.blobs / name
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_nlink == 1:
                path.unlink()

    def _is_core_folder(self, folder: Path) -> bool:
        parent = folder.parent
        of_ranks = parent.parent == self.paths.models and parent.name not in ("", ".", "..")
        ours = parent == self.paths.cores or (of_ranks and not parent.is_symlink())
        return ours and Entry.parse(folder.name) is not None and not folder.is_symlink()

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
