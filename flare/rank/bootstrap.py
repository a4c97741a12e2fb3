"""How a peer comes by its bytes: from what is stored here, or from rank zero, verified either way."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from flare.cores.index import CACHED_PRIMARY
from flare.cores.primary import AcceptedPublishers, Primary, check_trust, load_primary, primary_from_parts
from flare.errors import FlareError, IntegrityError, RemoteProtocolError, StorageError
from flare.paths import safe_component
from flare.rank.link import Link
from flare.rank.model_cache import EntryName, FolderLock, Found, find_entry, new_entry, publish
from flare.rank.ranges import RangeReceiver
from flare.strict_json import Reader
from flare.values import dataclass
from flare_workers.ranges import Ranges

PROGRESS_INTERVAL: Final = 5.0
"""Seconds between two lines about a transfer; rank zero hears as often that this rank is alive."""
MAX_METADATA: Final = 1 << 30
"""Bytes of header and digest table; see link.MAX_BULK."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What rank zero's welcome says of the core."""

    index_sha256: bytes
    ranks: int
    model: str
    engine: str
    fingerprint: str
    export: str
    primary_size: int

    @classmethod
    def from_primary(cls, primary: Primary) -> Offer:
        """Return the offer of rank zero's own core."""
        index = primary.index
        return cls(
            primary.index_sha256,
            index.ranks,
            index.model,
            index.engine,
            primary.fingerprint,
            index.export.hex(),
            primary.size,
        )

    def to_message(self) -> dict[str, object]:
        """Return the members of the welcome."""
        return {
            "index_sha256": self.index_sha256.hex(),
            "ranks": self.ranks,
            "model": self.model,
            "engine": self.engine,
            "publisher": self.fingerprint,
            "export": self.export,
            "primary_size": self.primary_size,
        }

    @classmethod
    def from_message(cls, reader: Reader) -> Offer:
        """Read a welcome.

        Raises:
            RemoteProtocolError: a member is missing or wrong.
        """
        return cls(
            reader.hex("index_sha256", 32),
            reader.count("ranks"),
            reader.text("model", limit=200),
            reader.text("engine", limit=64),
            reader.hex("publisher", 32).hex(),
            reader.hex("export", 16).hex(),
            reader.count("primary_size"),
        )

    def entry(self, rank: int) -> EntryName:
        """Return the name of this core's entry for `rank`."""
        return EntryName(safe_component(self.model), self.fingerprint, self.export, self.primary_size, rank)


async def send_metadata(link: Link, primary: Primary) -> None:
    """Answer a peer's "want": header, index and digest table (rank zero's side).

    Raises:
        UnreachableError: the peer is gone.
        StorageError: the primary cannot be read.
    """
    data = await asyncio.to_thread(_read_metadata, primary)
    await link.send({"type": "metadata", "length": len(data)})
    await link.send_bulk(data)


def _read_metadata(primary: Primary) -> bytes:
    assert primary.path is not None, "rank zero's core lies on its disk"
    with primary.path.open("rb") as file:
        data = file.read(primary.metadata_length)
    if len(data) != primary.metadata_length:
        raise StorageError(f"{primary.path} became shorter while it was served. Verify it.")
    return data


async def obtain(
    offer: Offer,
    *,
    ask: Callable[[], Awaitable[bytes]],
    report: Callable[[int], Awaitable[None]],
    rank: int,
    root: Path,
    accepted: AcceptedPublishers,
    connect: Callable[[], socket.socket],
    streams: int,
    remark: Callable[[str], None],
) -> Found:
    """Return this rank's bytes, stored under `root`, locked, and verified unless `verified` says no.

    Args:
        offer: what rank zero's welcome said.
        ask: has rank zero send header, index and digest table.
        report: tells rank zero how many bytes have come, so that it knows that this rank is alive.
        rank: this one.
        root: the model cache.
        accepted: the publishers that this rank trusts.
        connect: opens one proven, blocking connection to the range service.
        streams: how many of them.
        remark: prints one line.

    Raises:
        TrustError, IntegrityError, TransferError, StorageError, RemoteProtocolError: as their names say.
    """
    found = await asyncio.to_thread(find_entry, root, offer.entry(rank), offer.index_sha256, rank)
    if found is not None:
        try:
            check_trust(found.primary, accepted)
        except FlareError:
            found.lock.release()
            raise
        remark(f"rank {rank}'s bytes are here already, in {found.primary.root}")
        return found
    data = await ask()
    primary = await asyncio.to_thread(_check_metadata, data, offer, rank, accepted)
    wanted = primary.index.wanted(rank)
    receiver = RangeReceiver(connect, streams)
    work = asyncio.create_task(
        asyncio.to_thread(_receive, data, primary, wanted, root, offer.entry(rank), receiver)
    )
    try:
        total = sum(ranges.total for ranges in wanted.values())
        return await _with_progress(work, report, receiver, total, remark)
    except BaseException:
        receiver.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise


def _check_metadata(data: bytes, offer: Offer, rank: int, accepted: AcceptedPublishers) -> Primary:
    primary = primary_from_parts(data, size=offer.primary_size)
    if primary.index_sha256 != offer.index_sha256:
        raise IntegrityError("Rank zero sent the index of another core than it announced.")
    if len(data) != primary.metadata_length or primary.fingerprint != offer.fingerprint:
        raise RemoteProtocolError("Rank zero sent metadata that does not fit what it announced.")
    if rank >= primary.index.ranks:
        raise RemoteProtocolError(f"The core has {primary.index.ranks} ranks; there is no rank {rank}.")
    check_trust(primary, accepted)
    primary.digests(lambda offset, length: data[offset : offset + length])
    return primary


async def _with_progress(
    work: asyncio.Task[Found],
    report: Callable[[int], Awaitable[None]],
    receiver: RangeReceiver,
    total: int,
    remark: Callable[[str], None],
) -> Found:
    while True:
        done, _ = await asyncio.wait({work}, timeout=PROGRESS_INTERVAL)
        if done:
            return work.result()
        received = receiver.received
        remark(f"received {received / 1e9:.2f} of {total / 1e9:.2f} GB")
        await report(received)


def _receive(
    metadata: bytes,
    primary: Primary,
    wanted: Mapping[int, Ranges],
    root: Path,
    name: EntryName,
    receiver: RangeReceiver,
) -> Found:
    """Put the entry together in a new folder and publish it; runs in a thread."""
    table = primary.digests(lambda offset, length: metadata[offset : offset + length])
    with new_entry(root, name) as folder:
        _check_room(folder, sum(ranges.total for ranges in wanted.values()) + len(metadata))
        _create(folder / CACHED_PRIMARY, primary.size, metadata)
        try:
            for number, ranges in wanted.items():
                file = primary.index.files[number]
                path = folder / (file.path or CACHED_PRIMARY)
                if file.path:
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    _create(path, file.size, b"")
                if ranges:
                    digests = primary.file_digests(table, number)
                    receiver.receive_file(primary, number, ranges, digests, path)
        finally:
            receiver.close()
        final = publish(folder, primary, wanted, root, name)
    return Found(load_primary(final / CACHED_PRIMARY), True, FolderLock(final))


def _create(path: Path, size: int, beginning: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(beginning)
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{folder.parent} has {free / 1e9:.1f} GB free; this rank's bytes take {needed / 1e9:.1f} GB. "
            "Free some space, or choose another --core-cache."
        )
