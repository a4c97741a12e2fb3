"""TRANSFER: one node fetches core data from another one, while the controller watches."""

from __future__ import annotations

from flare.orbit.client import Client
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.reporter import Bar
from flare.orbit.resolve import Core
from flare.trust.grants import Package, Source
from flare.wire.messages import FileRanges, Message, Transfer, TransferProgress, TransferReply


def package_of(core: Core) -> Package:
    """Return the core as a grant names it."""
    return Package(
        export=core.export,
        length=core.primary.size,
        files=tuple(path for path, _ in core.files),
        source=None if core.source is None else Source(core.source.public_key, core.path),
        index_sha256=core.primary.index_sha256.hex(),
        publisher=core.primary.fingerprint,
    )


def complete_files(core: Core) -> tuple[FileRanges, ...]:
    """Return what the complete core is made of: every stored file, whole."""
    return tuple(FileRanges(path, size, ((0, size),) if size else ()) for path, size in core.files)


def rank_files(core: Core, rank: int) -> tuple[FileRanges, ...]:
    """Return what a peer rank reads: the primary, and its ranges of each file, counted on disk.

    Raises:
        CoreError: the core has no such rank.
    """
    primary = core.primary
    parts = {core.primary_name: FileRanges(core.primary_name, primary.size, ())}
    for number, ranges in primary.index.wanted(rank).items():
        path = primary.index.files[number].path or core.primary_name
        start = primary.data_start(number)
        on_disk = tuple((start + offset, length) for offset, length in ranges)
        parts[path] = FileRanges(path, primary.stored_size(number), on_disk)
    return tuple(parts.values())


def others_send(node: NodeEntry) -> str:
    """Return what a person hears whose command waits for another one that brings the same core."""
    return f"Another command is sending this core to {node.name}; waiting for it."


async def transfer(client: Client, node: NodeEntry, request: Transfer, bar: Bar) -> TransferReply:
    """Have a node fetch from another one; returns when everything is on its disk.

    Closing the session cancels the transfer, so a cancelled call leaves nothing running.

    Args:
        node: the destination.
        bar: shows how far it is.

    Raises:
        FlareError: what the node's ERROR says: corrupt, transfer, unreachable, storage or conflict.
    """
    told = False
    async with client.session(node) as session:
        await session.send(request)
        while True:
            # No time-out: a large core takes hours. A dead node is noticed by the connection's keepalive.
            message: Message = await session.receive(TransferReply, TransferProgress)
            if isinstance(message, TransferReply):
                return message
            if isinstance(message, TransferProgress):
                if message.total is not None:
                    bar.total(message.total)
                bar.to(message.transferred)
                if message.waiting and not told:
                    told = True
                    client.controller.reporter.note(others_send(node))
