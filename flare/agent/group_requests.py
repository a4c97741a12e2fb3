"""RUN, ATTACH, STOP and REMOVE: ranks of this node, for controllers.

RUN and ATTACH keep their session to the end. A controller that goes away ends its session and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from flare.agent import told
from flare.agent.connected import while_connected
from flare.agent.damaged import drop_damaged
from flare.agent.device_memory import DeviceMemory
from flare.agent.file_requests import open_in_thread
from flare.agent.gpus import Reading, visible_devices
from flare.agent.inventory import Signed, signed_at
from flare.agent.node import Node
from flare.agent.places import Entry
from flare.agent.rank_command import (
    RankFiles,
    front_address,
    needs_complete_core,
    rank_command,
    rank_environment,
    split_rendezvous,
)
from flare.agent.run import RankSpec, Run
from flare.errors import (
    ConflictError,
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    PlacementError,
    UnsupportedError,
)
from flare.session import Session
from flare.trust.grants import CheckedGrant, Package, check_run
from flare.wire import messages


async def run(node: Node, session: Session, request: messages.Run) -> None:
    """Check a grant to the last word, then reserve, start, and stream."""
    controllers = node.authority.controllers
    if controllers is None:
        raise ForbiddenError("RUN of an unpaired node.")

    def seen(launch: str) -> bool:
        node.ranks.check_unseen(launch)  # raises with the sentence that fits
        return False

    checked = check_run(
        request.grant,
        rank=request.rank,
        launch_key=request.launch_key,
        session_key=session.peer_key,
        controllers=controllers,
        own_key=node.identity.public_key,
        now=int(node.wall_clock()),
        seen=seen,
    )
    with contextlib.ExitStack() as pins:
        spec = await _specify(node, request, checked, pins)
        readings = await node.sampler.answered_readings()
        check_answering(readings, spec.gpus, node.sampler.problem)
        # One step without an await: of two controllers that ask at the same moment exactly one wins.
        rank = node.ranks.reserve(spec, [reading.uuid for reading in readings])
        rank.before_end = DeviceMemory(node.sampler, spec.gpus, readings).wait_until_back
        rank.on_gone.append(pins.pop_all().close)
        rank.on_gone.append(lambda: drop_damaged(node, rank))
        rank.on_gone.append(lambda: told.ended(rank))
    told.starts(node, session, spec)
    node.remember_grant(checked.grant, request.grant.signer)
    pid = await node.ranks.start(rank)
    await session.send(messages.RunReply(pid=pid, launch=spec.launch))
    await while_connected(session, _stream(session, rank), "a rank")


def check_answering(readings: Sequence[Reading], gpus: Collection[str], problem: str | None) -> None:
    """Refuse devices that do not answer: what runs there would hang or fail.

    Args:
        gpus: UUIDs of the devices that the rank is to use; empty means the whole node.
        problem: what is wrong with the driver as a whole, which may never have told of a device.

    Raises:
        PlacementError: one of them does not answer, or none of the node's.
    """
    wanted = [reading for reading in readings if not gpus or reading.uuid in gpus]
    silent = [reading.problem for reading in wanted if reading.problem is not None]
    if silent and (gpus or len(silent) == len(wanted)):
        raise PlacementError(f"{silent[0]}.")
    if problem is not None and not readings:
        raise PlacementError(f"The devices of this node are not known: {problem}.")


async def _specify(
    node: Node, request: messages.Run, checked: CheckedGrant, pins: contextlib.ExitStack
) -> RankSpec:
    """Find and check every file that the rank needs; say how it is started."""
    grant, member = checked.grant, checked.member
    if needs_complete_core(grant, member):
        core: Path | None = await _complete_core(node, grant.package, pins)
    else:
        core = None
    files = RankFiles(
        executable=await _executable(node, request.executable, pins),
        core=core,
        cache=node.paths.cache,
        profile=await asyncio.to_thread(node.cache.store_profile, request.publisher, grant.package.publisher),
    )
    return RankSpec(
        launch=grant.launch,
        name=grant.name,
        core=grant.package.files[0],
        rank=member.rank,
        ranks=len(grant.members),
        gpus=member.gpus,
        command=rank_command(grant, member, files),
        environment=rank_environment(os.environ, visible_devices(member.gpus)),
        # A single process has nobody to prove itself to.
        launch_key=None if grant.single_host else request.launch_key,
        expires=grant.expires,
        rendezvous_port=split_rendezvous(grant)[1] if member.rank == 0 and not grant.single_host else None,
        front=front_address(grant, member),
    )


async def _executable(
    node: Node, wanted: messages.Executable | None, pins: contextlib.ExitStack
) -> tuple[str, ...]:
    if wanted is None:
        if not node.executable:
            raise UnsupportedError("This node has no installed flare to run. Use --executable PATH.")
        return node.executable
    place = node.cache.place("executable", wanted.name)
    pins.enter_context(node.cache.pins.pinned(wanted.name))
    descriptor = node.cache.open(place)
    try:
        found = (await node.digest(descriptor, wanted.name, os.fstat(descriptor).st_size)).hex()
    finally:
        os.close(descriptor)
    if found != wanted.sha256:
        raise IntegrityError(f"The executable {wanted.name} on this node is not the one that was asked for.")
    return (str(place.folder / place.path),)


async def _complete_core(node: Node, package: Package, pins: contextlib.ExitStack) -> Path:
    """Return the primary that a rank here reads: the source in place, or the cache's copy.

    Raises:
        NotFoundError: it is not here.
        ConflictError: another core is in its place.
    """
    source = package.source
    if source is not None and source.public_key == node.identity.public_key:
        path = Path(source.path)
    else:
        entry = Entry(package.export, package.length)
        pins.enter_context(node.cache.pins.pinned(str(entry)))
        await node.cache.exchanged(entry)
        path = node.cache.entry_folder(entry) / package.files[0]
        for name in package.files:
            if node.cache.size_of(node.cache.place("core", f"{entry}/{name}")) is None:
                raise NotFoundError(
                    f"The core's file {name} is not in this node's cache. Push the core first."
                )
    descriptor, information = await open_in_thread(str(path))
    os.close(descriptor)
    signed = await signed_at(path)
    if information.st_size != package.length or signed.index_sha256 != package.index_sha256:
        raise ConflictError(
            f"{path} on this node is not the core that the grant names: its index differs. "
            "Remove that core from the node, or export it again under a new name."
        )
    if signed != Signed(package.index_sha256, package.publisher):
        raise ConflictError(
            f"{path} on this node is signed by the publisher {signed.publisher}, not by {package.publisher} "
            "as the grant says. Push the core again."
        )
    return path


async def attach(node: Node, session: Session, request: messages.Attach) -> None:
    """Stream what a rank said and says."""
    rank = node.ranks.find(request.group, running_only=False)
    await session.send(messages.AttachReply())
    await while_connected(session, _stream(session, rank), "a rank")


async def stop(node: Node, session: Session, request: messages.Stop) -> None:
    """Ask a rank to end; answer again when nothing of it is left."""
    try:
        rank = node.ranks.find(request.group, running_only=True)
    except NotFoundError:
        if request.group is None:
            raise
        ended = [run for run in node.ranks.all() if run.spec.launch == request.group]
        if not ended:
            # It may be on its way here: a launch that was given up must not start afterwards.
            node.ranks.stopped_before(request.group)
            node.transfers.stop(request.group)
            raise
        rank = ended[0]
    if rank.running:
        told.stop_asked(node, session, rank.spec, now=request.now)
    stopping = asyncio.create_task(node.ranks.stop(rank, now=request.now))

    async def answer() -> None:
        await asyncio.shield(stopping)
        await session.send(exit_of(rank))

    node.keep(stopping)  # a controller that leaves does not take its order back
    await session.send(messages.StopReply())
    await while_connected(session, answer(), "a rank")


async def remove(node: Node, session: Session, request: messages.Remove) -> None:
    """Drop an ended launch's history."""
    node.ranks.remove(request.group)
    await session.send(messages.RemoveReply())


def exit_of(rank: Run) -> messages.Exit:
    """Return the EXIT frame of a run that ended."""
    if rank.signal is not None:
        return messages.Exit(signal=rank.signal, reason=rank.reason, remark=rank.remark)
    return messages.Exit(status=rank.status, reason=rank.reason, remark=rank.remark)


async def _stream(session: Session, rank: Run) -> None:
    async for line in rank.output.follow():
        await session.send(messages.Log(line.text, line.stream))
    await rank.gone.wait()
    await session.send(exit_of(rank))
