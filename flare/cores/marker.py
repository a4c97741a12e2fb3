"""The marker of verified data: which bytes of which files were checked against which signed index.

A marker lies beside the files that it speaks of: `.verified` in a core directory of the agent's cache,
`.flare-verified.json` in a rank's model-cache entry. It holds for a file only as long as device, inode, size
and modification time are what they were when the bytes were checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flare.errors import FlareError, StorageError
from flare.files import read_bounded, write_atomic
from flare.limits import MAX_FILES, MAX_RUNS
from flare.strict_json import Reader, canonical, loads
from flare.values import dataclass

AGENT_MARKER = ".verified"  # in cores/<entry>/
MODEL_MARKER = ".flare-verified.json"  # in models/<model-key>/<entry-id>/
MAX_MARKER = 64 * 1024 * 1024  # a million runs of some thirty characters each
MAX_STAMP = 2**64 - 1  # inodes and nanoseconds use all 64 bits; only Python reads this file
STAMP_MEMBERS = ("device", "inode", "size", "mtime_ns")

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What a file looked like when its bytes were checked."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, information: os.stat_result) -> FileStamp:
        """Return the stamp of a stat result."""
        return cls(information.st_dev, information.st_ino, information.st_size, information.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class MarkedFile:
    """One file's verified bytes.

    Args:
        stamp: the file as it was then.
        ranges: (offset, length) in bytes from the start of the file's covered bytes; None: all of them.
    """

    stamp: FileStamp
    ranges: Ranges | None = None


@dataclass(frozen=True, slots=True)
class Marker:
    """Everything that was verified in one folder, against one index.

    Args:
        index_sha256: of the signed index, hex.
        files: by path relative to the folder.
        publisher: fingerprint of the one who signed the primary there; None where nobody noted it.
    """

    index_sha256: str
    files: Mapping[str, MarkedFile]
    publisher: str | None = None

    def holds_for(self, folder: Path, path: str) -> MarkedFile | None:
        """Return what was verified of `path`, or None when the file is not the one that was checked."""
        marked = self.files.get(path)
        if marked is None:
            return None
        try:
            information = (folder / path).stat()
        except OSError:
            return None
        return marked if FileStamp.of(information) == marked.stamp else None

    def holds(self, folder: Path) -> bool:
        """Tell whether every file that the marker names is still the one that was checked."""
        return bool(self.files) and all(self.holds_for(folder, path) is not None for path in self.files)


def read_marker(path: Path) -> Marker | None:
    """Return the marker at `path`; None where there is none, or none that can be read.

    A damaged marker means "not verified": the data is then digested again, which is always right.
    """
    try:
        data = read_bounded(path, MAX_MARKER, "The marker")
        return _parse(loads(data, limit=MAX_MARKER, what="the marker", error=StorageError))
    except FlareError:
        return None


def _parse(document: dict[str, Any]) -> Marker:
    reader = Reader(document, "the marker", StorageError)
    files: dict[str, MarkedFile] = {}
    table = reader.object("files")
    if len(table) > MAX_FILES:
        reader.fail("files", f"has more than {MAX_FILES} members")
    for path, value in table.items():
        entry = Reader(value, f"the marker, {path}", StorageError)
        files[path] = MarkedFile(
            FileStamp(*(entry.count(name, limit=MAX_STAMP) for name in STAMP_MEMBERS)),
            entry.list_of("ranges", _run, limit=MAX_RUNS, default=None),
        )
    publisher = reader.hex("publisher", 32, default=None)
    return Marker(reader.hex("index_sha256", 32).hex(), files, None if publisher is None else publisher.hex())


def _run(item: object, where: str) -> tuple[int, int]:
    if (
        not isinstance(item, list)
        or len(item) != 2
        or not all(type(number) is int and number >= 0 for number in item)
    ):
        raise StorageError(f"{where} is no pair of offset and length.")
    return item[0], item[1]


def write_marker(path: Path, marker: Marker) -> None:
    """Write `marker`, whole or not at all. The data it speaks of must be on the disk already.

    Raises:
        StorageError: it cannot be written.
    """
    files = {}
    for name, marked in marker.files.items():
        stamp = {member: getattr(marked.stamp, member) for member in STAMP_MEMBERS}
        files[name] = stamp | {"ranges": marked.ranges}
    document: dict[str, Any] = {"index_sha256": marker.index_sha256, "files": files}
    if marker.publisher is not None:
        document["publisher"] = marker.publisher
    text = canonical(document)
    write_atomic(path, text.encode(), mode=0o600)
