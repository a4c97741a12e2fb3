"""STAT, GET, HAVE and PUT: files of this node, for controllers; HAVE also for members of a grant."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat as stat_module
from functools import partial
from pathlib import Path, PurePosixPath

from flare.agent.arriving import BroughtByOtherError, signed_by
from flare.agent.inventory import name_primary
from flare.agent.node import Node
from flare.agent.places import Place
from flare.agent.waiting import ask_disk, made_in_other_thread, made_in_thread
from flare.cores.primary import Primary, load_primary_isolated
from flare.errors import (
    BusyError,
    CoreError,
    FlareError,
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    RemoteProtocolError,
    StorageError,
    TransferError,
    UnreachableError,
    sentence,
)
from flare.printable import printable
from flare.session import Session, SessionClosedError
from flare.trust.grants import Package, check_fetch
from flare.wire.messages import (
    Companion,
    Get,
    GetReply,
    Have,
    HaveReply,
    Put,
    PutDone,
    PutReply,
    Stat,
    StatReply,
)
from flare_workers.jobs import Channel, Job, Receive, Result, Send, WorkerError
from flare_workers.ranges import Ranges

# What a worker's failure means to the peer that waits; without an entry it is our own fault.
_WORKER_ERRORS: dict[str, type[FlareError]] = {
    "corrupt": IntegrityError,
    "storage": StorageError,
    "closed": UnreachableError,
    "stalled": TransferError,
    "cancelled": TransferError,
    "protocol": RemoteProtocolError,
}


def worker_failure(problem: WorkerError) -> FlareError:
    """Return the error that a worker's failure stands for."""
    return _WORKER_ERRORS.get(problem.code, TransferError)(sentence(problem.message))


async def run_with(node: Node, session: Session, job: Job, descriptor: int) -> Result:
    """Hand the session to a worker for one DATA frame and take it back.

    After a failure the session has ended: no further record may be sent on it.

    Raises:
        FlareError: what went wrong.
    """
    sock, channel = session.detach()
    try:
        result = await _run(node, job, sock, channel, descriptor)
        assert result.channel is not None
        session.resume(sock, result.channel)
        return result
    except BaseException:
        session.abort("its transfer failed")
        sock.close()
        raise


async def _run(node: Node, job: Job, sock: socket.socket, channel: Channel, descriptor: int) -> Result:
    try:
        return await node.pool.run(job, sockets=[(sock, channel)], files=[descriptor])
    except WorkerError as problem:
        if problem.code == "closed":
            raise SessionClosedError(sentence(problem.message)) from None
        raise worker_failure(problem) from None


def open_source(path: str) -> tuple[int, os.stat_result]:
    """Open a file that a controller names by absolute path; the caller closes the descriptor.

    A symbolic link to a regular file is followed, because model caches are made of them.

    Raises:
        RemoteProtocolError: the path is not absolute.
        NotFoundError: there is no regular file that can be read.
    """
    if not path.startswith("/") or "\0" in path:
        raise RemoteProtocolError("A path on this node must be absolute: write it from the first slash on.")
    try:
        # Not blocking: opening a pipe, or a device that waits, must not hold the agent up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as problem:
        raise NotFoundError(f"{path} cannot be read on this node: {problem.strerror}.") from None
    information = os.fstat(descriptor)
    if not stat_module.S_ISREG(information.st_mode):
        os.close(descriptor)
        raise NotFoundError(f"{path} is not a regular file on this node.")
    return descriptor, information


async def open_in_thread(path: str) -> tuple[int, os.stat_result]:
    """As `open_source`, where the disk may take long; a caller that is cancelled leaves nothing open."""
    return await made_in_other_thread(partial(open_source, path), lambda opened: os.close(opened[0]))


async def open_cached(path: str) -> tuple[int, os.stat_result]:
    """As `open_in_thread`, for a file of the cache."""
    return await made_in_thread(partial(open_source, path), lambda opened: os.close(opened[0]))


async def stat(node: Node, session: Session, request: Stat) -> None:
    """Say how large a core file and its companions are."""
    descriptor, information = await open_in_thread(request.path)
    os.close(descriptor)
    primary = await load_primary_isolated(Path(request.path))
    companions = await asyncio.to_thread(_companions, primary)
    await session.send(StatReply(size=information.st_size, companions=companions))


def _companions(primary: Primary) -> tuple[Companion, ...]:
    """Return the files beside a core's primary.

    Raises:
        CoreError: one of them is missing or cannot be read.
    """
    found = []
    for path in (file.path for file in primary.index.files):
        if not path:
            continue  # the data of a packed primary
        try:
            descriptor, information = open_source(str(primary.root / path))
        except NotFoundError as problem:
            raise CoreError(
                f"The core {primary.path} needs the file {path} beside it. {problem.message} Copy the whole "
                "folder."
            ) from None
        os.close(descriptor)
        found.append(Companion(path, information.st_size))
    return tuple(found)


def _name_of(node: Node, session: Session) -> str:
    """Return what the process list calls the peer: a controller's name says more than its port."""
    return node.controller_name(session.peer_key) or session.peer_name


async def get(node: Node, session: Session, request: Get) -> None:
    """Send bytes of a file; fewer than asked for where it ends."""
    descriptor, information = await open_in_thread(request.path)
    try:
        await asyncio.to_thread(_refuse_secrets, node, information)
        node.check_workers()
        length = max(min(request.length, information.st_size - request.offset), 0)
        await session.send(GetReply(length=length))
        name = Path(request.path).name
        job = Send(
            title=f"send {name} to {_name_of(node, session)}",
            name=name,
            ranges=Ranges.of(((request.offset, length),)).runs,
            stall_timeout=node.settings.agent.stall_timeout,
        )
        await run_with(node, session, job, descriptor)
    finally:
        os.close(descriptor)


def _refuse_secrets(node: Node, information: os.stat_result) -> None:
    """Refuse the agent's own keys and settings: no core lies there, and whoever has its key is this node.

    Args:
        information: of the file that was opened. Its name may be a link's, or lead there over another mount.

    Raises:
        ForbiddenError: it is a file below the configuration folder.
    """
    for folder, _, names in os.walk(node.paths.config):
        for name in names:
            with contextlib.suppress(OSError):
                if os.path.samestat(Path(folder, name).stat(), information):
                    raise ForbiddenError("GET of a file in the agent's configuration folder.")


async def have(node: Node, session: Session, request: Have) -> None:
    """Say whether the cache holds an entry at that size; a member of a grant may ask about its core."""
    publisher = request.publisher
    if not node.authority.is_controller(session.peer_key):
        package = await _check_have(node, session, request)
        publisher = package.publisher
    place = node.cache.place(request.kind, request.name)
    controls = node.authority.is_controller(session.peer_key)
    if controls:  # before anybody looks: what is found stays, and what is not has a place for when it comes
        node.cache.pins.pin_for(session, place.pin, in_use=False)
    # In a thread: a marker may have a million ranges.
    found, verified = await ask_disk(node.cache.have, place, request.size)
    if not found and publisher is not None and await _is_renamed(node, place, request.size, publisher):
        found, verified = await ask_disk(node.cache.have, place, request.size)
    marked = verified and await ask_disk(_marked_by, node, place, publisher)
    if found and publisher is not None and not marked:
        found = await signed_by(place, request.size, publisher)
        verified = found and verified
    if found:
        node.cache.pins.pin_for(session, place.pin, in_use=False)
    arriving = not found and controls and node.arrivals.brings(place)
    await session.send(HaveReply(have=found, verified=verified, arriving=arriving))


async def _is_renamed(node: Node, place: Place, size: int, publisher: str) -> bool:
    """Tell whether a core's primary lay there under another name; it has this one too then."""
    entry = place.entry
    if entry is None or size != entry.length or "/" in place.path or node.cache.size_of(place) is not None:
        return False
    return await name_primary(node.cache, place, lambda signed: signed.publisher == publisher) is not None


def _marked_by(node: Node, place: Place, publisher: str | None) -> bool:
    """Tell whether a directory's marker says who signed its primary, so that nobody need parse it."""
    if publisher is None:
        return False
    marker = None if place.entry is None else node.cache.marker(place.entry)
    return marker is not None and marker.publisher == publisher


async def _check_have(node: Node, session: Session, request: Have) -> Package:
    controllers = node.authority.controllers
    path = request.name.partition("/")[2]
    if request.grant is None or controllers is None or request.kind != "core":
        raise ForbiddenError("HAVE without a grant, of something else than a core, or of an unpaired node.")
    check = partial(
        check_fetch,
        request.grant,
        session_key=session.peer_key,
        controllers=controllers,
        own_key=node.identity.public_key,
        file=path,
        ranges=(),
        now=int(node.wall_clock()),
    )
    # Who asks comes first: no marker is parsed for those who may not ask.
    allowed = check(holds=lambda package: True)
    held = await ask_disk(holds, node, allowed.grant.package)
    checked = check(holds=lambda package: held)
    prefix = f"{checked.grant.package.export}-{checked.grant.package.length}"
    folder = request.name.partition("/")[0]
    if folder != prefix and not folder.startswith(f"{prefix}-rank"):
        raise ForbiddenError(f"HAVE of {printable(folder)[:80]}, which is not the grant's core.")
    node.remember_grant(checked.grant, request.grant.signer)
    session.mark_known()
    return checked.grant.package


def holds(node: Node, package: Package) -> bool:
    """Tell whether this node's cache holds verified data of exactly this index, or the complete core."""
    for entry in node.cache.entries():
        if entry.export == package.export and entry.length == package.length:
            marker = node.cache.marker(entry)
            if marker is not None and marker.index_sha256 == package.index_sha256:
                return marker.publisher in (None, package.publisher)
    return False


async def put(node: Node, session: Session, request: Put) -> None:
    """Receive an executable, a blob, or bytes of a core."""
    place = node.cache.place(request.kind, request.name)
    try:
        ranges = (
            Ranges.whole(request.size)
            if request.ranges is None
            else Ranges.strict(request.ranges, size=request.size)
        )
    except ValueError as problem:
        raise RemoteProtocolError(f"PUT: {problem}.") from None
    node.check_workers()
    node.cache.pins.pin_for(session, place.pin, in_use=False)
    uploader = (session.peer_key, request.upload)
    try:
        stream = await node.arrivals.begin(place, request.size, ranges, request.publisher, uploader)
    except BroughtByOtherError as problem:
        if request.upload is None:
            raise BusyError(problem.message) from None  # it cannot know the other answer
        await session.send(PutReply(arriving=True))
        return
    if stream is None:
        await session.send(PutReply(already=True))
        return
    with node.uploads.share(request, uploader, _name_of(node, session)) as moved:
        try:
            await session.send(PutReply())
            job = Receive(
                title=f"receive {PurePosixPath(place.path).name} from {_name_of(node, session)}",
                name=place.path,
                ranges=ranges.runs,
                size=request.size,
                sync=True,
                stall_timeout=node.settings.agent.stall_timeout,
            )
            result = await run_with(node, session, job, stream.descriptor)
        except BaseException as problem:
            await stream.fail(_own_reason(problem) if request.upload is not None else None)
            raise
        await stream.finish()
        moved.bytes = result.bytes_done
    await session.send(PutDone(bytes=result.bytes_done))


def _own_reason(problem: BaseException) -> FlareError | None:
    """Return why the bytes could not be taken, unless it is the peer or the network that failed."""
    return problem if isinstance(problem, StorageError | TransferError) else None
