"""TRANSFER: a controller has this node fetch a core, or its rank's part of one, from another node."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from flare.agent.connected import while_connected
from flare.agent.folders import check_file_path
from flare.agent.node import Node
from flare.agent.places import Entry
from flare.agent.told import asker
from flare.agent.transfers.intake import Intake, Order
from flare.agent.transfers.route import Route
from flare.agent.transfers.running import Progress, Work
from flare.agent.uploads import transferring
from flare.agent.waiting import ask_disk, settled
from flare.errors import ConflictError, ForbiddenError, RemoteProtocolError
from flare.session import Session
from flare.trust.grants import CheckedGrant, check_transfer
from flare.wire.messages import Transfer, TransferProgress, TransferReply

PROGRESS_INTERVAL = 0.25  # seconds: the protocol allows four TRANSFER_PROGRESS a second


async def transfer(node: Node, session: Session, request: Transfer) -> None:
    """Check a grant to the last word, then fetch, verify, publish, and reply when all is on the disk."""
    controllers = node.authority.controllers
    if controllers is None:
        raise ForbiddenError("This node obeys no controller.")
    checked = check_transfer(
        request.grant,
        session_key=session.peer_key,
        controllers=controllers,
        own_key=node.identity.public_key,
        now=int(node.wall_clock()),
        seen=node.ranks.was_stopped,
    )
    launch = checked.grant.launch
    # From the check on without an await: a STOP comes either before it or to this.
    with node.transfers.of_launch(launch) as stopped:
        order = _order(node, request, checked)
        publisher = checked.grant.package.publisher
        await ask_disk(node.cache.store_profile, request.publisher, publisher)
        node.remember_grant(checked.grant, request.grant.signer)
        await while_connected(session, _carry_out(node, session, order, launch, stopped), "a transfer")


def _order(node: Node, request: Transfer, checked: CheckedGrant) -> Order:
    """Hold what the request names against its grant.

    Raises:
        ForbiddenError: the grant does not allow it.
        RemoteProtocolError: it makes no sense.
    """
    grant, member = checked.grant, checked.member
    entry = Entry.parse(request.directory)
    package = grant.package
    if entry is None or (entry.export, entry.length) != (package.export, package.length):
        raise ForbiddenError("The request's directory is not one of the core that the grant names.")
    if entry.rank is not None and entry.rank != member.rank:
        raise ForbiddenError("The request's directory is another rank's than the grant gives this node.")
    for file in package.files:
        check_file_path(file, RemoteProtocolError)
    for asked in request.files:
        if asked.path not in package.files:
            raise ForbiddenError("The request names a file that the grant does not name.")
    route = Route(node, request.grant, grant, member, request.source, request.streams)
    resume = request.resume or node.settings.agent.resume_transfers
    return Order(package, entry, route, request.files, resume)


def wish_of(order: Order) -> Hashable:
    """Return what is to be there after a transfer: two of one wish become one."""
    return (order.package.index_sha256, order.package.publisher, order.asked)


async def _carry_out(node: Node, session: Session, order: Order, launch: str, stopped: asyncio.Event) -> None:
    """Wait for the bytes and reply, or give them up.

    Raises:
        ConflictError: the launch was stopped meanwhile.
        FlareError: the transfer failed.
    """
    shown: list[Progress] = []

    async def work(progress: Progress) -> TransferReply:
        # From here on no new upload into the directory begins: it waits for this transfer.
        progress.waiting = True
        await node.arrivals.wait_for(order.entry)
        progress.waiting = False
        return await Intake(node, order, progress).run()

    core = f"{order.package.files[0]} ({order.entry})"
    with transferring(core, order.route.source, asker(node, session)) as moved:
        reply = await _wait(node, session, order, launch, stopped, work, shown)
        moved.bytes = reply.bytes
    await session.send(reply)


async def _wait(
    node: Node,
    session: Session,
    order: Order,
    launch: str,
    stopped: asyncio.Event,
    work: Work,
    shown: list[Progress],
) -> TransferReply:
    """Return what became of a transfer, and tell the peer meanwhile how far it is."""
    joining = asyncio.create_task(node.transfers.join(str(order.entry), wish_of(order), work, shown.append))
    stopping = asyncio.create_task(stopped.wait())
    told: tuple[int, int, int | None, bool] = (0, 0, None, False)
    try:
        while not joining.done():
            await asyncio.wait(
                {joining, stopping}, timeout=PROGRESS_INTERVAL, return_when=asyncio.FIRST_COMPLETED
            )
            if stopped.is_set() and not joining.done():
                raise ConflictError(f"The launch {launch} was stopped while its bytes came. Start it anew.")
            for progress in shown[-1:]:
                now = (progress.transferred, progress.verified, progress.total, progress.waiting)
                if now != told and session.hello.transfer_progress and not joining.done():
                    await session.send(TransferProgress(*now))
                    told = now
        return joining.result()
    finally:
        stopping.cancel()
        joining.cancel()
        await settled(joining)
