"""What core directories lie on this node, as STATUS reports them.

Listed are the agent's own `cores/` and the ranks' model cache `models/`. A directory's index is read from
its marker, else from its primary; that is done once for each file as it is.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from flare.agent.cache import Cache
from flare.agent.places import Entry, Place
from flare.agent.room import STAT_BLOCK
from flare.agent.waiting import ask_disk, look
from flare.cores.index import CACHED_PRIMARY
from flare.cores.marker import AGENT_MARKER, MODEL_MARKER, FileStamp, Marker, read_marker
from flare.cores.primary import load_primary_isolated
from flare.errors import FlareError
from flare.files import describe_os_error
from flare.strict_json import canonical
from flare.values import dataclass
from flare.wire.messages import CachedFile, CoreReport

MAX_REMEMBERED = 256  # indexes whose digest is kept; more cores than that are read again
# Bytes of what STATUS says of cores, some 15,000 files: it has 4 MiB, and what it says of runs may take 2.
MAX_CORES = 1536 * 1024
MAX_EXAMINED = 2048  # directories; each costs the reading of a marker and a look at its files


@dataclass(frozen=True, slots=True)
class Signed:
    """What tells a core from every other one: SHA-256 of its index, and its publisher's fingerprint, hex."""

    index_sha256: str
    publisher: str


_known: OrderedDict[FileStamp, Signed] = OrderedDict()  # one parse a file is enough for the process


async def inventory(cache: Cache) -> tuple[CoreReport, ...]:
    """Return one report a core directory, by name; as many as STATUS can carry.

    A core is told of with all its files or not at all: half of it would be taken for one that lacks files. Of
    too many, verified ones come first, and of those the most recently used.
    """
    found = await look(_scan, cache)
    newest = await look(sorted, enumerate(found), key=lambda each: -_used_at(each[1][0]))
    room = {True: MAX_CORES, False: MAX_CORES}
    kept: dict[bool, list[tuple[int, int, CoreReport]]] = {True: [], False: []}
    for place, (folder, entry, marker_name) in newest[:MAX_EXAMINED]:
        report = await _report(folder, entry, marker_name)
        size = await look(_size, report)
        if size <= room[report.verified]:
            room[report.verified] -= size
            kept[report.verified].append((place, size, report))
    left = room[True]
    for place, size, report in kept[False]:
        if size <= left:
            left -= size
            kept[True].append((place, size, report))
    return tuple(report for _, _, report in sorted(kept[True], key=lambda each: each[0]))


def _used_at(folder: Path) -> float:
    """Return when a core directory was last used or changed; pins touch it."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0  # evicted while we looked


def _size(report: CoreReport) -> int:
    """Return the bytes that a report takes in a body, with the comma behind it."""
    return len(canonical(report.to_json())) + 1


def _scan(cache: Cache) -> list[tuple[Path, Entry, str]]:
    found = []
    if cache.paths.cores.is_dir():
        for folder in sorted(cache.paths.cores.iterdir()):
            entry = Entry.parse(folder.name)
            if entry is not None and folder.is_dir():
                found.append((folder, entry, AGENT_MARKER))
    if cache.paths.models.is_dir():
        for model in sorted(cache.paths.models.iterdir()):
            if not model.is_dir():
                continue
            for folder in sorted(model.iterdir()):
                entry = Entry.parse(folder.name)
                if entry is not None and folder.is_dir():
                    found.append((folder, entry, MODEL_MARKER))
    return found


async def _report(folder: Path, entry: Entry, marker_name: str) -> CoreReport:
    files, size, marker, verified = await look(_examine, folder, marker_name)
    if marker is not None and marker.publisher is not None:
        signed: Signed | None = Signed(marker.index_sha256, marker.publisher)
    else:
        signed = await _signed_in(folder, entry)
    index = signed.index_sha256 if signed is not None else None
    return CoreReport(
        name=str(entry),
        export=entry.export,
        index_sha256=marker.index_sha256 if marker is not None else index,
        files=tuple(files),
        verified=verified,
        bytes=size,
        publisher=signed.publisher if signed is not None else None,
    )


def _examine(folder: Path, marker_name: str) -> tuple[list[CachedFile], int, Marker | None, bool]:
    marker = read_marker(folder / marker_name)
    files, size = _files(folder)
    return files, size, marker, marker is not None and marker.holds(folder)


def _files(folder: Path) -> tuple[list[CachedFile], int]:
    """Return a directory's files, and the bytes that they take; one of two names counts once."""
    found = []
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                information = path.lstat()
            except OSError:
                continue  # evicted while we looked
            relative = str(path.relative_to(folder))
            if stat.S_ISREG(information.st_mode) and not relative.startswith("."):
                size = information.st_blocks * STAT_BLOCK
                found.append(CachedFile(relative, information.st_size, size))
                sizes[information.st_ino] = size
    return sorted(found, key=lambda file: file.path), sum(sizes.values())


async def _signed_in(folder: Path, entry: Entry) -> Signed | None:
    """Return what a directory's primary says, or None where none can be read."""
    path = await look(_primary_in, folder, entry)
    if path is None:
        return None
    try:
        return await signed_at(path)
    except FlareError:
        return None


async def signed_at(path: Path) -> Signed:
    """Return which core a primary is, and whose; a file as it is is parsed once.

    Raises:
        CoreError, TrustError: it is no core, or its signature is wrong.
        StorageError: it cannot be read.
    """
    try:
        stamp = FileStamp.of(await asyncio.to_thread(path.stat))
    except OSError as problem:
        raise describe_os_error(problem, "Cannot read") from None
    if stamp not in _known:
        primary = await load_primary_isolated(path)
        _known[stamp] = Signed(primary.index_sha256.hex(), primary.fingerprint)
        while len(_known) > MAX_REMEMBERED:
            _known.popitem(last=False)
    return _known[stamp]


async def name_primary(cache: Cache, place: Place, is_wanted: Callable[[Signed], bool]) -> str | None:
    """Give a directory's primary another name beside its own, which is no part of what was signed.

    Args:
        place: the name that it is to have; nothing lies there.
        is_wanted: tells whether it is the right one.

    Returns:
        Its name so far; None when there is none that is wanted.
    """
    assert place.entry is not None, "only cores have primaries"
    path = await ask_disk(_primary_in, place.folder, place.entry)
    if path is None:
        return None
    try:
        if is_wanted(await signed_at(path)) and await ask_disk(cache.borrow, place.entry, place, path.name):
            return path.name
    except FlareError:
        pass  # it is no core, or cannot be linked
    return None


def _primary_in(folder: Path, entry: Entry) -> Path | None:
    """Find the primary: the top-level safetensors file of the length that the folder's name says."""
    for path in (folder / CACHED_PRIMARY, *sorted(folder.glob("*.safetensors"))):
        try:
            information = path.lstat()
        except OSError:
            continue
        if stat.S_ISREG(information.st_mode) and information.st_size == entry.length:
            return path
    return None
