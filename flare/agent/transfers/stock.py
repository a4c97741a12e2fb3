"""What this node has of a core already: in its directory, in the blobs, in other directories of that core.

A directory takes whole files alone, or in a rank's directory what the rank reads: whatever else another
directory has of a file is copied into the file on its way, and never linked under its name.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import field

from flare.agent.cache import Cache
from flare.agent.inventory import Signed, name_primary
from flare.agent.places import PART_MARKER, Entry, Place
from flare.agent.transfers.holding import speaks_of
from flare.agent.transfers.plan import WantedFile
from flare.agent.waiting import in_thread
from flare.cores.marker import AGENT_MARKER, MarkedFile, Marker, read_marker
from flare.trust.grants import Package
from flare.values import dataclass
from flare_workers.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Found:
    """What is here of one file.

    Args:
        size: of the file in the directory; None when it is not there.
        marked: what was verified of that one.
        lender: another directory that has a part of it, verified, when it is not there.
        lent: which of the wanted bytes.
    """

    size: int | None
    marked: MarkedFile | None = None
    lender: Entry | None = None
    lent: Ranges = field(default_factory=Ranges)


class Stock:
    """What is here for one transfer.

    Args:
        cache: the node's.
        entry: the directory that the transfer fills.
        package: the core.

    Attributes:
        brought: paths of what this transfer put into the directory.
    """

    def __init__(self, cache: Cache, entry: Entry, package: Package) -> None:
        self._cache = cache
        self._entry = entry
        self._package = package
        self._folder = cache.entry_folder(entry)
        self._linked: dict[str, MarkedFile] = {}
        self._markers: list[Marker] = []
        self._lenders: list[tuple[Entry, Marker]] = []
        self._held = ExitStack()
        self.brought: set[str] = set()

    def close(self) -> None:
        """Let go of the directories that lent something."""
        self._held.close()

    def read(self) -> None:
        """Read what this and other directories say of exactly this core. Blocks."""
        entry, package = self._entry, self._package
        found = (read_marker(self._folder / name) for name in (AGENT_MARKER, PART_MARKER))
        own = [marker for marker in found if marker is not None and speaks_of(marker, package)]
        for other in self._cache.entries():
            if other != entry and (other.export, other.length) == (entry.export, entry.length):
                marker = self._cache.marker(other)
                if marker is not None and speaks_of(marker, package):
                    self._lenders.append((other, marker))
        self._markers = [*own, Marker(package.index_sha256, self._linked)]

    def place(self, path: str) -> Place:
        """Return where a file of the core belongs."""
        return self._cache.place("core", f"{self._entry}/{path}")

    def find(self, path: str, wanted: Ranges | None = None) -> int | None:
        """Return the size of a file in the directory, linked there now if another place has it. Blocks.

        Args:
            wanted: covered bytes that make a rank's file; None when only the whole file does.
        """
        place = self.place(path)
        there = self._cache.size_of(place)
        if there is not None:
            return there
        found = self._cache.find(place)
        if found is None and self._borrow(place, None if self._entry.rank is None else wanted):
            found = self._cache.size_of(place)
        if found is not None:
            self.brought.add(path)
        return found

    def _borrow(self, place: Place, enough: Ranges | None) -> bool:
        """Link a file that another directory of the same core has, verified."""
        for other, marker in self._lenders:
            marked = marker.holds_for(self._cache.entry_folder(other), place.path)
            if marked is None:
                continue
            lends = marked.ranges is None or (
                enough is not None and Ranges.of(marked.ranges).covers(enough) and bool(enough.runs)
            )
            if lends and self._cache.borrow(other, place):
                self._linked[place.path] = marked
                return True
        return False

    async def name_primary(self) -> bool:
        """Give the directory's primary the name that the package has for it, beside its own; return if so."""
        name = self._package.files[0]
        wanted = Signed(self._package.index_sha256, self._package.publisher)
        other = await name_primary(self._cache, self.place(name), lambda signed: signed == wanted)
        if other is None:
            return False
        marked = await in_thread(self.marked, other)
        if marked is not None:
            self._linked[name] = marked
        self.brought.add(name)
        return True

    def marked(self, path: str) -> MarkedFile | None:
        """Return what was verified of a file that lies in the directory."""
        found = (marker.holds_for(self._folder, path) for marker in self._markers)
        return next((marked for marked in found if marked is not None), None)

    def look(self, file: WantedFile) -> Found:
        """Return what is here of a file, linked into the directory now if another place has it. Blocks."""
        size = self.find(file.path, file.wanted)
        if size is not None:
            return Found(size, self.marked(file.path))
        return self.lent(file)

    def lent(self, file: WantedFile) -> Found:
        """Return what another directory has of a file, as if the directory itself had nothing. Blocks."""
        best = Found(None)
        for other, marker in self._lenders:
            marked = marker.holds_for(self._cache.entry_folder(other), file.path)
            if marked is None or marked.ranges is None:
                continue
            has = Ranges.of(marked.ranges).intersection(file.wanted)
            if has.runs and has.total > best.lent.total:
                best = Found(None, lender=other, lent=has)
        return best

    def borrow(self, lender: Entry, path: str) -> Place:
        """Return where a lender has a file; it stays until `close`."""
        self._held.enter_context(self._cache.pins.pinned(str(lender)))
        return self._cache.place("core", f"{lender}/{path}")
