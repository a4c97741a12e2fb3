"""Names in the cache: what a peer may call a file, and where that one lies. Touches no disk."""

from __future__ import annotations

import re
from pathlib import Path

from flare.agent.folders import check_file_path
from flare.errors import RemoteProtocolError
from flare.paths import Paths
from flare.values import dataclass

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


def is_blob(name: str) -> bool:
    """Tell whether a file is named by the digest of its content."""
    return _BLOB.match(name) is not None


def place_of(paths: Paths, kind: str, name: str) -> Place:
    """Return where a file that a peer names belongs.

    Args:
        paths: where the cache lies.
        kind: core, blob or executable.
        name: as HAVE and PUT have it.

    Raises:
        RemoteProtocolError: no such name can be in the cache.
    """
    if kind == "blob" and is_blob(name):
        return Place(kind, paths.blobs, name, digest=name[:64])
    if kind == "executable" and _EXECUTABLE.match(name):
        return Place(kind, paths.executables, name, digest=name.removeprefix("flare-"))
    folder, _, path = name.partition("/")
    entry = Entry.parse(folder)
    if kind == "core" and entry is not None and path:
        check_file_path(path, RemoteProtocolError)
        return Place(kind, paths.cores / str(entry), path, entry, path[:64] if is_blob(path) else "")
    raise RemoteProtocolError(f'The cache has no place for "{name[:100]}" of the kind {kind}.')
