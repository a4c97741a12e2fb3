"""FETCH and FETCH_FABRIC: bytes of a core for members of a grant, from here or from the hop before.

Every request carries the grant that allows it, and is checked to the last word before a byte is read: see
docs/protocol.md. What leaves a file is read, sealed and sent by a worker; a relay stores nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from functools import partial
from pathlib import PurePosixPath

from flare.agent.file_requests import open_cached, open_in_thread, run_with, worker_failure
from flare.agent.node import Node
from flare.agent.transfers.holding import Copy, busy_exchanging, find_copy, shared_lock
from flare.agent.transfers.route import explained, named, own_hello
from flare.errors import (
    ConflictError,
    FlareError,
    ForbiddenError,
    NotFoundError,
    RemoteProtocolError,
    TransferError,
    UnreachableError,
)
from flare.fabric import routes
from flare.session import Session, connect
from flare.trust.controllers import ControllerSet
from flare.trust.grants import FabricHop, Grant, check_fetch, check_fetch_fabric, check_ranges
from flare.wire.messages import Fetch, FetchFabric, FetchReply, Ranges
from flare_workers.jobs import Channel, Relay, Send, WorkerError


async def fetch(node: Node, session: Session, request: Fetch) -> None:
    """Send ranges of a file to a member of a grant."""
    check = partial(
        check_fetch,
        request.grant,
        session_key=session.peer_key,
        controllers=_controllers(node),
        own_key=node.identity.public_key,
        file=request.file,
        now=int(node.wall_clock()),
    )
    # Who asks comes first: nothing is looked for, and nothing is parsed, for those who may not ask.
    allowed = check(ranges=(), holds=lambda package: True)
    copy = await find_copy(node.cache, allowed.grant.package, node.identity.public_key)
    checked = check(ranges=request.ranges, holds=lambda package: copy is not None)
    assert copy is not None, "the check refuses a node that holds no copy"
    _allow(node, session, checked.grant, request.grant.signer)
    to = f"to {checked.member.name}"
    await _send(node, session, copy, checked.grant, to, None, request.file, request.ranges)


async def fetch_fabric(node: Node, session: Session, request: FetchFabric) -> None:
    """Send ranges of a file over a link of the grant's fabric, or pass on what the hop before sends."""
    check = partial(
        check_fetch_fabric,
        request.grant,
        session_key=session.peer_key,
        controllers=_controllers(node),
        own_key=node.identity.public_key,
        source_rank=request.source_rank,
        destination_rank=request.destination_rank,
        rail=request.rail,
        path=routes.path,
        file=request.file,
        local=session.local_address,
        remote=session.remote_address,
        now=int(node.wall_clock()),
    )
    hop = check(ranges=(), holds=lambda package: True)
    copy: Copy | None = None
    if hop.upstream is None:
        copy = await find_copy(node.cache, hop.grant.package, node.identity.public_key)
    hop = check(ranges=request.ranges, holds=lambda package: copy is not None)
    check_ranges(request.ranges, request.size)
    _allow(node, session, hop.grant, request.grant.signer)
    if copy is None:
        await _relay(node, session, hop, request)
        return
    members, way = hop.grant.members, _way(hop, request)
    over = f" over {' and '.join(members[rank].name for rank in way[1:-1])}" if way[2:] else ""
    await _send(
        node,
        session,
        copy,
        hop.grant,
        f"to {members[way[-1]].name}{over}",
        named(hop.link, hop.own, hop.requester, request.rail),
        request.file,
        request.ranges,
        expected=request.size,
    )


def _way(hop: FabricHop, request: FetchFabric) -> tuple[int, ...]:
    """Return the ranks that the bytes pass, both ends included."""
    assert hop.grant.transfer_fabric is not None, "the check refuses a grant without one"
    return routes.path(hop.grant.transfer_fabric, request.source_rank, request.destination_rank)


def _controllers(node: Node) -> ControllerSet:
    controllers = node.authority.controllers
    if controllers is None:
        raise ForbiddenError("This node obeys no controller, so that nobody's grant counts here.")
    return controllers


def _allow(node: Node, session: Session, grant: Grant, signer: bytes) -> None:
    """Take the session for a member's; it ends when the grant's signer is no controller any more."""
    node.remember_grant(grant, signer)
    node.transfers.signers[session] = signer
    session.mark_known()


async def _send(
    node: Node,
    session: Session,
    copy: Copy,
    grant: Grant,
    to: str,
    link: str | None,
    file: str,
    ranges: Ranges,
    expected: int | None = None,
) -> None:
    """Send bytes of a file that lies here.

    Args:
        copy: where the core lies.
        to: whom the bytes go to, and over whom.
        link: the fabric's that they take; None for paired addresses.
        expected: the file's size in bytes, as the requester knows it.
    """
    node.check_workers()
    with contextlib.ExitStack() as held:
        if copy.entry is not None:
            node.cache.pins.pin_for(session, str(copy.entry), in_use=True)
            if node.cache.is_exchanged(copy.entry):  # it was looked at before
                raise busy_exchanging()
        held.enter_context(shared_lock(copy.folder))
        # In a thread: a part's marker may have a million ranges.
        await asyncio.to_thread(copy.check_has, grant.package, file, ranges)
        path = str(copy.path(grant.package, file))
        try:
            opening = open_in_thread if copy.entry is None else open_cached
            descriptor, information = await opening(path)
        except NotFoundError as problem:  # where it would lie is nobody's business
            raise NotFoundError(problem.message.replace(path, file)) from None
        held.callback(os.close, descriptor)
        size = information.st_size
        if expected is not None and size != expected:
            raise ConflictError(f"{file} has {size} bytes on this node, not {expected}: it was changed.")
        length = check_ranges(ranges, size)
        await session.send(FetchReply(length=length, ranges=ranges))
        job = Send(
            title=f"send {PurePosixPath(file).name} {to}",
            name=file,
            ranges=ranges,
            file_size=size,
            stall_timeout=node.settings.agent.stall_timeout,
        )
        link = link or f"link {node.name} -> {session.peer_name}"
        try:
            await run_with(node, session, job, descriptor)
        except FlareError as problem:  # for this node's log: the session has ended
            raise TransferError(f"Sending {file} {to} ({link}): {problem.message}") from None


async def _relay(node: Node, session: Session, hop: FabricHop, request: FetchFabric) -> None:
    """Ask the hop before for the same bytes, and pass its records on one by one."""
    assert hop.upstream is not None
    assert hop.upstream_link is not None
    node.check_workers()
    members, way = hop.grant.members, _way(hop, request)
    ends = f"from {members[way[0]].name} to {members[way[-1]].name}"
    before = named(hop.upstream_link, hop.upstream, hop.own, request.rail)
    after = named(hop.link, hop.own, hop.requester, request.rail)
    host, port = hop.upstream_link.from_socket
    stall_timeout = node.settings.agent.stall_timeout
    passing = f"Passing {request.file} on {ends}"
    try:
        upstream = await connect(
            host,
            port,
            node.identity,
            hello=own_hello(node),
            expected_key=hop.upstream.public_key,
            local_address=hop.upstream_link.to_socket[0],
            peer_name=hop.upstream.name,
        )
    except FlareError as problem:
        raise explained(problem, f"{passing} ({before})") from None
    try:
        try:
            reply = await upstream.request(request, timeout=stall_timeout)
        except UnreachableError as problem:  # of that session, not of the one that waits for the answer
            raise UnreachableError(f"{passing} ({before}): {problem.message}") from None
        if reply.ranges != request.ranges:
            raise RemoteProtocolError(
                f"{hop.upstream.name} answered with other ranges than it was asked for."
            )
        await session.send(reply)
        job = Relay(
            title=f"relay {PurePosixPath(request.file).name} {ends}",
            name=request.file,
            length=reply.length,
            upstream=before,
            downstream=after,
            stall_timeout=stall_timeout,
        )
        sockets: list[tuple[socket.socket, Channel]] = []
        try:
            sockets.append(upstream.detach())
            sockets.append(session.detach())
            result = await node.pool.run(job, sockets=sockets)
            upstream.resume(sockets[0][0], result.channels[0])
            session.resume(sockets[1][0], result.channels[1])
        except BaseException as problem:
            session.abort("its transfer failed")
            for sock, _ in sockets:
                sock.close()
            if not isinstance(problem, WorkerError):
                raise
            where = "" if problem.message.startswith((before, after)) else f" ({before}, {after})"
            raise TransferError(f"{passing}{where}: {worker_failure(problem).message}") from None
    finally:
        await upstream.close()
