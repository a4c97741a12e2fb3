"""Which way to the source, and the streams that bytes come over."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import PurePosixPath

from flare.agent.node import Node
from flare.errors import (
    BusyError,
    ClockSkewError,
    ConflictError,
    CoreError,
    FlareError,
    ForbiddenError,
    IdentityError,
    IntegrityError,
    NotFoundError,
    RemoteProtocolError,
    StorageError,
    TransferError,
    TrustError,
    UnreachableError,
    VersionError,
    sentence,
)
from flare.fabric import routes
from flare.session import Session, SessionClosedError, connect, parse_address
from flare.trust.grants import Grant, Link, Member, TransferFabric
from flare.trust.signed import SignedRecord
from flare.wire.handshake import PROTOCOL_VERSION
from flare.wire.messages import Fetch, FetchFabric, Hello, Ranges, TransferSource
from flare_workers.jobs import CORRUPT, STORAGE, Channel, Receive, WorkerError

# A source's refusal keeps its class where the controller can act on it; anything else is a failed transfer.
# Not IntegrityError and StorageError: they speak of this node's cache, and what lies there depends on them.
_KEPT = (
    BusyError,
    ClockSkewError,
    ConflictError,
    CoreError,
    IdentityError,
    NotFoundError,
    TrustError,
    VersionError,
)


def own_hello(node: Node) -> Hello:
    """Return what a node says to another one that it asks for bytes."""
    return Hello(protocol=PROTOCOL_VERSION, public_key=node.identity.public_key)


class Route:
    """The way from one source to this node.

    Args:
        node: this node.
        record, grant: what allows the transfer.
        own: this node's member.
        source: whom the controller named.
        streams: how many connections a file were asked for.

    Attributes:
        streams: how many there will be.

    Raises:
        ForbiddenError: the source is not who the grant says.
        UnreachableError: the grant's fabric has no way from it.
    """

    def __init__(
        self,
        node: Node,
        record: SignedRecord,
        grant: Grant,
        own: Member,
        source: TransferSource,
        streams: int,
    ) -> None:
        self._node = node
        self._record = record
        self._grant = grant
        self._own = own
        self._source = source
        self._rank = _checked_rank(grant, own, source)
        # A node outside the group has no links in the grant: one stream from its paired address.
        self.streams = 1 if self._rank is None else streams
        self._rails = 0
        fabric = grant.transfer_fabric
        if self._rank is not None and fabric is not None and _has_links(fabric, self._rank):
            self._rails = routes.rails(fabric, self._rank, own.rank)

    @property
    def source(self) -> str:
        """The source's name."""
        return self._source.name

    def way(self, number: int) -> str:
        """Return which way stream `number` comes, such as "from a over b (link b ADDRESS -> c ADDRESS)"."""
        fabric = self._grant.transfer_fabric
        if not self._rails or fabric is None or self._rank is None:
            ends = f"{self.source} {self._source.address} -> {self._own.name} {self._own.address}"
            return f"from {self.source} (link {ends})"
        members, rail = self._grant.members, number % self._rails
        previous, link = routes.inbound(fabric, self._rank, self._own.rank, rail)
        between = [members[rank].name for rank in routes.path(fabric, self._rank, self._own.rank)[1:-1]]
        over = f" over {' and '.join(between)}" if between else ""
        return f"from {self.source}{over} ({named(link, members[previous], self._own, rail)})"

    async def connect(self, number: int) -> Session:
        """Open stream `number`: to the hop before this node, over one of the rails, or to the source."""
        fabric = self._grant.transfer_fabric
        if not self._rails or fabric is None or self._rank is None:
            host, port = parse_address(self._source.address)
            return await connect(
                host,
                port,
                self._node.identity,
                hello=own_hello(self._node),
                expected_key=self._source.public_key,
                peer_name=self._source.name,
            )
        previous, link = routes.inbound(fabric, self._rank, self._own.rank, number % self._rails)
        member = self._grant.members[previous]
        host, port = link.from_socket
        return await connect(
            host,
            port,
            self._node.identity,
            hello=own_hello(self._node),
            expected_key=member.public_key,
            local_address=link.to_socket[0],
            peer_name=member.name,
        )

    def request(self, number: int, path: str, size: int, ranges: Ranges) -> Fetch | FetchFabric:
        """Return what stream `number` sends to get ranges of a file."""
        if not self._rails or self._rank is None:
            return Fetch(grant=self._record, file=path, ranges=ranges)
        return FetchFabric(
            grant=self._record,
            source_rank=self._rank,
            destination_rank=self._own.rank,
            rail=number % self._rails,
            file=path,
            size=size,
            ranges=ranges,
        )


def _checked_rank(grant: Grant, own: Member, source: TransferSource) -> int | None:
    """Return the source's rank in the grant; None outside the group."""
    if source.rank is None:
        package_source = grant.package.source
        if package_source is None or package_source.public_key != source.public_key:
            raise ForbiddenError("The request names a source that the grant does not name.")
        member = grant.member_of(source.public_key)
        if member is None:
            return None
        raise ForbiddenError(f"The request's source is rank {member.rank} of the grant, but it says none.")
    if source.rank >= len(grant.members) or grant.members[source.rank].public_key != source.public_key:
        raise ForbiddenError("The request's source is not the member at that rank of the grant.")
    if source.rank == own.rank:
        raise ForbiddenError("The request names this node as its own source.")
    return source.rank


def _has_links(fabric: TransferFabric, rank: int) -> bool:
    return any(fabric.links[rank]) or any(row[rank] for row in fabric.links)


class Stream:
    """One of a transfer's connections: opened when it is needed, kept for the next file.

    Args:
        node: this node.
        route: the way to the source.
        number: of the stream, from 0.
    """

    def __init__(self, node: Node, route: Route, number: int) -> None:
        self._node = node
        self._route = route
        self._number = number
        self._session: Session | None = None

    async def read(self, path: str, size: int, ranges: Ranges, limit: int) -> bytes:
        """Return a few bytes of a file; the rest of a file goes through `receive`.

        Raises:
            FlareError: what went wrong, with the stream's and the source's names.
        """
        label = f"Reading {path} {self._route.way(self._number)}"
        try:
            session = await self._ask(path, size, ranges)
            return await session.receive_data(limit, timeout=self._node.settings.agent.stall_timeout)
        except FlareError as problem:
            await self.close()
            raise explained(problem, label) from None

    async def receive(
        self,
        job: Receive,
        path: str,
        ranges: Ranges,
        descriptor: int,
        *,
        label: str,
        size: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Receive ranges of a file in a worker.

        Args:
            job: the worker's; its ranges are covered bytes.
            path: the file's, in the package.
            ranges: the same bytes, counted on disk.
            descriptor: open for writing.
            label: begins the sentence of an error, such as "Stream 3/8 of model.gguf from hertz".
            size: of the whole file in bytes.
            on_progress: called with the bytes done, at most four times a second and at the end.

        Raises:
            FlareError: what went wrong. The worker has let go of the file then.
        """
        try:
            session = await self._ask(path, size, ranges)
        except FlareError as problem:
            await self.close()
            raise explained(problem, label) from None
        sock, channel = session.detach()
        try:
            await self._run(session, sock, channel, job, descriptor, on_progress)
        except WorkerError as problem:
            if on_progress is not None:
                on_progress(problem.bytes_done)
            raise _failure(problem, label, path, self._route.source) from None

    async def _run(
        self,
        session: Session,
        sock: socket.socket,
        channel: Channel,
        job: Receive,
        descriptor: int,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        try:
            result = await self._node.pool.run(
                job, sockets=[(sock, channel)], files=[descriptor], on_progress=on_progress
            )
            assert result.channel is not None
            session.resume(sock, result.channel)
        except BaseException:
            self._session = None
            session.abort("its transfer failed")
            sock.close()
            raise

    async def _ask(self, path: str, size: int, ranges: Ranges) -> Session:
        self._node.check_workers()
        if self._session is None or self._session.ended:
            self._session = await self._route.connect(self._number)
        session = self._session
        request = self._route.request(self._number, path, size, ranges)
        reply = await session.request(request, timeout=self._node.settings.agent.stall_timeout)
        if reply.ranges != ranges:
            raise RemoteProtocolError(f"{session.peer_name} offers other ranges than it was asked for.")
        return session

    async def close(self) -> None:
        """End the connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def named(link: Link, source: Member, destination: Member, rail: int) -> str:
    """Return how messages name a link of the fabric: both its ends, and which of the parallel ones it is."""
    ends = (source, link.from_socket[0]), (destination, link.to_socket[0])
    return "link " + " -> ".join(f"{member.name} {address}" for member, address in ends) + f", rail {rail}"


def title(path: str, number: int, count: int, source: str) -> str:
    """Return what the process list shows of a stream's worker."""
    return f"receive {PurePosixPath(path).name} {number + 1}/{count} from {source}"


def explained(problem: FlareError, label: str) -> FlareError:
    """Return a source's failure as this node's: which stream it was, and never as the asker's own end."""
    message = f"{label}: {problem.message}"
    if isinstance(problem, SessionClosedError | UnreachableError):
        return UnreachableError(message)
    if isinstance(problem, ForbiddenError):
        return TransferError(f"{label} was refused: {problem.message}")
    return type(problem)(message) if isinstance(problem, _KEPT) else TransferError(message)


def _failure(problem: WorkerError, label: str, path: str, source: str) -> FlareError:
    if problem.code == CORRUPT:
        return IntegrityError(
            f'Block {problem.block} of "{path}" from {source} is not the one that its publisher signed: '
            f"{source}'s copy is damaged. The core was removed from this node's cache; verify the core on "
            f"{source} with `flare core verify`, then push it again."
        )
    kind = StorageError if problem.code == STORAGE else TransferError
    return kind(f"{label}: {sentence(problem.message)}")
