"""The ranks' model cache: models/<model-key>/<entry-id>/ with the primary named model.safetensors.

An entry appears by rename, with its marker, and is never changed afterwards. A rank holds a shared lock
on the folder that it serves from; whoever wants to remove one takes the exclusive lock first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from flare.cores.index import CACHED_PRIMARY
from flare.cores.marker import (
    AGENT_MARKER,
    MODEL_MARKER,
    FileStamp,
    MarkedFile,
    Marker,
    read_marker,
    write_marker,
)
from flare.cores.primary import Primary, load_primary
from flare.errors import BusyError, ConflictError, FlareError, StorageError
from flare.files import describe_os_error, ensure_private_folder, fsync_folder
from flare.paths import safe_component
from flare.system import lock_shared
from flare.values import dataclass
from flare_workers.ranges import Ranges

PUBLISHER_PREFIX: Final = 16
"""Hex digits of the publisher's fingerprint in a folder's name: enough to tell publishers apart."""


@dataclass(frozen=True, slots=True)
class EntryName:
    """What names an entry.

    Args:
        model: the model's name, as the index says.
        fingerprint: of the publisher, hex.
        export: of the core, hex.
        primary_size: bytes.
        rank: None for a complete core.
    """

    model: str
    fingerprint: str
    export: str
    primary_size: int
    rank: int | None

    @classmethod
    def of(cls, primary: Primary, rank: int | None) -> EntryName:
        """Return the name of a core's entry for `rank`."""
        index = primary.index
        return cls(index.model, primary.fingerprint, index.export.hex(), primary.size, rank)

    @property
    def model_key(self) -> str:
        """The folder of all entries of this model and publisher."""
        return f"{safe_component(self.model)}-{self.fingerprint[:PUBLISHER_PREFIX]}"

    @property
    def entry_id(self) -> str:
        """The entry's own folder."""
        return self._id(self.rank)

    def _id(self, rank: int | None) -> str:
        complete = f"{self.export}-{self.primary_size}"
        return complete if rank is None else f"{complete}-rank{rank}"

    def places(self, root: Path) -> list[Path]:
        """Return where such data can lie: the entry, a complete entry, and what an agent staged."""
        models, cores = root / "models" / self.model_key, root / "cores"
        ids = [self.entry_id] if self.rank is None else [self.entry_id, self._id(None)]
        return [folder / name for folder in (models, cores) for name in ids]


class FolderLock:
    """A shared lock on a folder, held for the life of a rank."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            BusyError: somebody is removing or replacing the folder.
            StorageError: it is gone, or another one took its place.
        """
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as problem:
            raise describe_os_error(problem, "Cannot use the core in") from None
        try:
            lock_shared(self._descriptor)
            held, there = os.fstat(self._descriptor), folder.stat()
        except BlockingIOError:
            self.release()
            raise BusyError(f"Something is replacing {folder}. Launch again when it is done.") from None
        except OSError as problem:
            self.release()
            raise describe_os_error(problem, "Cannot use the core in") from None
        if (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino):
            self.release()
            raise StorageError(f"{folder} was replaced while it was being opened. Launch again.")

    def release(self) -> None:
        """Give the lock back."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Found:
    """A stored core that can be used.

    Args:
        primary: loaded, its signature checked.
        verified: whether a marker that still holds says that the wanted bytes were checked.
        lock: held on its folder.
    """

    primary: Primary
    verified: bool
    lock: FolderLock


def find_entry(root: Path, name: EntryName, index_sha256: bytes, rank: int) -> Found | None:
    """Return stored, verified data of `rank`, locked; None where there is none.

    Args:
        root: the model cache.
        name: of the entry.
        index_sha256: of the core that is wanted.
        rank: whose bytes.

    Raises:
        ConflictError: the place of the entry holds another core.
        BusyError: it is being replaced.
    """
    for folder in name.places(root):
        marker = read_marker(folder / MODEL_MARKER) or read_marker(folder / AGENT_MARKER)
        if marker is None:
            continue
        if marker.index_sha256 != index_sha256.hex():
            if folder.name == name.entry_id and folder.parent.name == name.model_key:
                raise ConflictError(
                    f"{folder} holds another core than the wanted one. Move it away, then launch again."
                )
            continue
        lock = FolderLock(folder)
        try:
            found = _load(folder, marker, name.fingerprint, index_sha256, rank)
        except FlareError:
            found = None
        if found is None:
            lock.release()
            continue
        return Found(found, True, lock)
    return None


def _load(folder: Path, marker: Marker, fingerprint: str, index_sha256: bytes, rank: int) -> Primary | None:
    """Return the publisher's primary in `folder` if the marker covers what `rank` reads."""
    names = [name for name in marker.files if "/" not in name and name.endswith(".safetensors")]
    for name in sorted(names, key=lambda name: name != CACHED_PRIMARY):
        if marker.holds_for(folder, name) is None:
            continue
        try:
            primary = load_primary(folder / name)
        except FlareError:
            continue
        if primary.index_sha256 == index_sha256 and primary.fingerprint == fingerprint:
            wanted = primary.index.wanted(rank)
            return primary if marker_covers(marker, primary, wanted) else None
    return None


def marker_covers(marker: Marker, primary: Primary, wanted: Mapping[int, Ranges]) -> bool:
    """Tell whether `marker` still holds for every byte of `wanted`."""
    root = primary.root
    for number, ranges in wanted.items():
        path = str(primary.file_path(number).relative_to(root))
        marked = marker.holds_for(root, path)
        if marked is None:
            return False
        if marked.ranges is not None and not Ranges.of(marked.ranges).covers(ranges):
            return False
    return True


def verified_before(primary: Primary, wanted: Mapping[int, Ranges]) -> bool:
    """Tell whether a marker beside `primary` says that `wanted` was checked against this very index."""
    for name in (MODEL_MARKER, AGENT_MARKER):
        marker = read_marker(primary.root / name)
        if marker is not None and marker.index_sha256 == primary.index_sha256.hex():
            return marker_covers(marker, primary, wanted)
    return False


def mark_verified(
    primary: Primary, wanted: Mapping[int, Ranges], seen: Mapping[Path, FileStamp], root: Path
) -> None:
    """Keep what a rank has just digested, if it lies in the cache: the next launch need not read it again.

    A core anywhere else is its owner's; nothing is written there. A marker that cannot be written costs
    the next launch a digest, no more.

    Args:
        primary: of the core.
        wanted: what was digested.
        seen: what the files looked like before and after.
        root: the model cache.
    """
    folder = primary.root
    if folder.parent == root / "cores":
        name = AGENT_MARKER
    elif folder.parent.parent == root / "models":
        name = MODEL_MARKER
    else:
        return
    assert primary.path is not None, "stored data has a path"
    files = {primary.path.name: MarkedFile(seen[primary.path], ())}
    for number, ranges in wanted.items():
        path = primary.file_path(number)
        whole = ranges == Ranges.whole(primary.index.files[number].size)
        files[str(path.relative_to(folder))] = MarkedFile(seen[path], None if whole else ranges.runs)
    with contextlib.suppress(StorageError):
        write_marker(folder / name, Marker(primary.index_sha256.hex(), files, primary.fingerprint))


def stamps(primary: Primary, wanted: Mapping[int, Ranges]) -> dict[Path, FileStamp]:
    """Return what the files of `wanted`, and the primary, look like now.

    Raises:
        StorageError: one is missing.
    """
    assert primary.path is not None, "stored data has a path"
    paths = [primary.path, *(primary.file_path(number) for number in wanted)]
    try:
        return {path: FileStamp.of(path.stat()) for path in paths}
    except OSError as problem:
        raise describe_os_error(problem, "Cannot use the core's file") from None


@contextlib.contextmanager
def new_entry(root: Path, name: EntryName) -> Iterator[Path]:
    """Make the folder in which an entry is put together; it is removed unless `publish` moved it.

    Raises:
        BusyError: another rank is receiving the same entry.
        StorageError: the cache cannot be written.
        IdentityError: others may write to it.
    """
    home = root / "models" / name.model_key
    ensure_private_folder(home)
    try:
        lock = os.open(home / f".{name.entry_id}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise describe_os_error(problem, "Cannot use the model cache") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"Another rank is receiving {name.entry_id} on this node. Wait for it to end."
            ) from None
        for left in home.glob(f".{name.entry_id}.*.new"):  # of a rank that was killed: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        folder = home / f".{name.entry_id}.{secrets.token_hex(4)}.new"
        try:
            folder.mkdir(mode=0o700)
            yield folder
        except OSError as problem:
            raise describe_os_error(problem, "Cannot store the core") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def publish(
    folder: Path, primary: Primary, wanted: Mapping[int, Ranges], root: Path, name: EntryName
) -> Path:
    """Mark a finished folder and move it to its place; return that.

    Args:
        folder: from new_entry; every byte of `wanted` in it was checked and is on the disk.
        primary: of the core.
        wanted: what is there.
        root, name: as for new_entry.

    Raises:
        BusyError: an old entry that does not hold any more is still being served from.
        StorageError: the disk failed.
    """
    final = root / "models" / name.model_key / name.entry_id
    index = primary.index
    files = {CACHED_PRIMARY: MarkedFile(_seal(folder / CACHED_PRIMARY), ())}
    for number, ranges in wanted.items():
        path = index.files[number].path or CACHED_PRIMARY
        whole = ranges == Ranges.whole(index.files[number].size)
        files[path] = MarkedFile(_seal(folder / path), None if whole else ranges.runs)
    write_marker(folder / MODEL_MARKER, Marker(primary.index_sha256.hex(), files, primary.fingerprint))
    for parent in {(folder / path).parent for path in files}:
        fsync_folder(parent)
    _clear(final)
    folder.rename(final)
    fsync_folder(final.parent)
    return final


def _seal(path: Path) -> FileStamp:
    path.chmod(0o444)
    return FileStamp.of(path.stat())


def _clear(final: Path) -> None:
    """Remove an entry that is there but does not hold; its lock tells whether somebody serves from it."""
    try:
        descriptor = os.open(final, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(final)
    except BlockingIOError:
        raise BusyError(
            f"A rank still serves from {final}, whose files were changed. Stop it first."
        ) from None
    finally:
        os.close(descriptor)
