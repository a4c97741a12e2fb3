"""TRANSFER: one node fetches core data from another one, while the controller watches."""

from __future__ import annotations

from flare.orbit.client import Client
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.resolve import Core
from flare.wire.messages import FileRanges, Message, Transfer, TransferProgress, TransferReply


def complete_files(core: Core) -> tuple[FileRanges, ...]:
    """Return what the complete core is made of: every stored file, whole."""
    return tuple(FileRanges(path, size, ((0, size),) if size else ()) for path, size in core.files)


async def transfer(
    client: Client, node: NodeEntry, request: Transfer, *, label: str, total: int
) -> TransferReply:
    """Have a node fetch from another one; returns when everything is on its disk.

    Closing the session cancels the transfer, so a cancelled call leaves nothing running.

    Args:
        node: the destination.
        label: what the progress bar says.
        total: bytes that are asked for, until the node knows better.

    Raises:
        FlareError: what the node's ERROR says: corrupt, transfer, unreachable, storage or conflict.
    """
    async with client.session(node) as session:
        await session.send(request)
        with client.controller.reporter.progress() as add:
            bar = add(label, total)
            while True:
                # No time-out: a large core takes hours. A dead node is noticed by the connection's keepalive.
                message: Message = await session.receive(TransferReply, TransferProgress)
                if isinstance(message, TransferReply):
                    return message
                if isinstance(message, TransferProgress):
                    bar.to(message.transferred)
