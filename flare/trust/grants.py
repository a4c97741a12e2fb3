"""What a grant allows: the checks before anything is reserved, read or sent. Time is an argument.

The order of the checks is docs/protocol.md's: who signed, then the signature, then the strict parse,
then what it says. All of them raise ForbiddenError, ClockSkewError, ConflictError or, for a body that is
no grant, RemoteProtocolError; and NotFoundError where a grant is good, and what it names has gone. Their
sentences are for this node's log (`wire.messages.Error.of` tells a peer that was refused nothing but that).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from flare.errors import (
    ClockSkewError,
    ConflictError,
    FlareError,
    ForbiddenError,
    NotFoundError,
    RemoteProtocolError,
)
from flare.limits import MAX_RANGES
from flare.trust.controllers import ControllerSet
from flare.trust.grant_body import (
    KIND_RUN_GRANT,
    KIND_TRANSFER_GRANT,
    Grant,
    Link,
    Member,
    Package,
    Source,
    TransferFabric,
    new_launch_id,
    open_grant,
    parse_socket_address,
    sign_grant,
)
from flare.trust.signed import SignedRecord
from flare.values import dataclass

CLOCK_TOLERANCE = 60  # seconds that a node's clock may be behind the controller's
GRANT_LIFETIME = 600  # seconds: a grant bounds the launch, not the serving
FETCH_LIFETIME = 24 * 3600  # seconds after `issued`: a long push outlives ten minutes

Ranges = Sequence[tuple[int, int]]
PathFor = Callable[[TransferFabric, int, int], Sequence[int]]
"""Computes the path of ranks, source first, that bytes take through a fabric."""


@dataclass(frozen=True, slots=True)
class CheckedGrant:
    """A grant that passed, and the member it was checked for."""

    grant: Grant
    member: Member


@dataclass(frozen=True, slots=True)
class FabricHop:
    """A FETCH_FABRIC that passed.

    Args:
        grant: the grant.
        own: this node's member.
        requester: who asked; bytes go there.
        link: the rail that the request came over.
        upstream: the member to connect to for the bytes; None at the source.
        upstream_link: the rail to it: connect to its `from`, bind its `to` address.
    """

    grant: Grant
    own: Member
    requester: Member
    link: Link
    upstream: Member | None
    upstream_link: Link | None


def check_run(
    record: SignedRecord,
    *,
    rank: int,
    launch_key: bytes,
    session_key: bytes,
    controllers: ControllerSet,
    own_key: bytes,
    now: float,
    seen: Callable[[str], bool],
) -> CheckedGrant:
    """Check a RUN's grant for this node.

    Args:
        record: the signed run grant.
        rank: the rank that RUN names.
        launch_key: the 32 bytes that RUN carries.
        session_key: who asks.
        controllers: the set now.
        own_key: this node's key.
        now: Unix seconds.
        seen: tells whether a launch was started, or stopped before it came.

    Raises:
        FlareError: what the module says.
    """
    grant = _controllers_own_grant(record, KIND_RUN_GRANT, session_key, controllers)
    _check_window(grant, now)
    _check_members(grant)
    if rank >= len(grant.members) or grant.members[rank].public_key != own_key:
        raise ForbiddenError(f"The grant does not name this node at rank {rank}.")
    if seen(grant.launch):
        raise ConflictError(
            f"The launch {grant.launch} was started or stopped on this node already. Start it anew."
        )
    digest = hashlib.sha256(launch_key).hexdigest()
    if not hmac.compare_digest(digest, grant.launch_key_sha256 or ""):
        raise ForbiddenError("The launch key is not the one that the grant names.")
    return CheckedGrant(grant, grant.members[rank])


def check_transfer(
    record: SignedRecord,
    *,
    session_key: bytes,
    controllers: ControllerSet,
    own_key: bytes,
    now: float,
    seen: Callable[[str], bool] = lambda launch: False,
) -> CheckedGrant:
    """Check a TRANSFER's grant for this node; whether the ranges are inside the index is for its reader.

    Args:
        record: the signed transfer grant.
        session_key, controllers, own_key, now: as in check_run.
        seen: tells whether the launch was stopped before it came.

    Raises:
        FlareError: what the module says.
    """
    grant = _controllers_own_grant(record, KIND_TRANSFER_GRANT, session_key, controllers)
    _check_window(grant, now)
    _check_members(grant)
    member = grant.member_of(own_key)
    if member is None:
        raise ForbiddenError("The grant does not name this node.")
    if seen(grant.launch):
        raise ConflictError(f"The launch {grant.launch} was stopped on this node already. Start it anew.")
    return CheckedGrant(grant, member)


def check_fetch(
    record: SignedRecord,
    *,
    session_key: bytes,
    controllers: ControllerSet,
    own_key: bytes,
    file: str | None,
    ranges: Ranges,
    now: float,
    holds: Callable[[Package], bool],
) -> CheckedGrant:
    """Check a FETCH, or a node's HAVE. `check_ranges` with the file's size remains to be done.

    Args:
        record: the signed transfer grant.
        session_key: the node that asks.
        controllers, own_key, now: as in check_run.
        file: exactly one of the package's files; None for HAVE.
        ranges: of that file.
        holds: tells whether this node has an entry with the package's index.

    Returns:
        The grant and the member that asks.

    Raises:
        FlareError: what the module says.
    """
    grant = _any_controllers_grant(record, controllers)
    member = grant.member_of(session_key)
    if member is None:
        raise ForbiddenError("The grant does not name the node that asks.")
    _check_fetch_age(grant, now)
    _check_file(grant, file)
    _check_holder(grant, own_key, holds)
    check_ranges(ranges, None)
    return CheckedGrant(grant, member)


def check_fetch_fabric(
    record: SignedRecord,
    *,
    session_key: bytes,
    controllers: ControllerSet,
    own_key: bytes,
    source_rank: int,
    destination_rank: int,
    rail: int,
    path: Sequence[int] | PathFor,
    file: str,
    ranges: Ranges,
    local: tuple[str, int],
    remote: tuple[str, int],
    now: float,
    holds: Callable[[Package], bool],
) -> FabricHop:
    """Check a FETCH_FABRIC at its source or at a relay.

    Args:
        record: the signed transfer grant.
        session_key: the node that asks: the next one towards the destination.
        controllers, own_key, now: as in check_run.
        source_rank, destination_rank, rail: as the frame says.
        path: the ranks from source to destination, or what computes them from the grant's fabric.
        file, ranges, holds: as in check_fetch; only the source must hold the core.
        local, remote: what getsockname and getpeername say, (address, port).

    Raises:
        FlareError: what the module says.
    """
    grant = _any_controllers_grant(record, controllers)
    own = grant.member_of(own_key)
    requester = grant.member_of(session_key)
    if requester is None:
        raise ForbiddenError("The grant does not name the node that asks.")
    _check_fetch_age(grant, now)
    _check_members(grant)
    _check_file(grant, file)
    if own is None:
        raise ForbiddenError("The grant does not name this node.")
    ranks = _path(grant, source_rank, destination_rank, path)
    place = ranks.index(own.rank) if own.rank in ranks[:-1] else None
    if place is None or ranks[place + 1] != requester.rank:
        raise ForbiddenError("The request does not come over the path that the grant's fabric gives.")
    link = _rail(grant, own.rank, requester.rank, rail)
    if _same(local) != link.from_socket or _same(remote)[0] != link.to_socket[0]:
        raise ForbiddenError("The request does not come over the link that the grant names.")
    upstream, upstream_link = None, None
    if place:
        upstream = grant.members[ranks[place - 1]]
        upstream_link = _rail(grant, upstream.rank, own.rank, rail)
    else:
        _check_holder(grant, own_key, holds)
    check_ranges(ranges, None)
    return FabricHop(grant, own, requester, link, upstream, upstream_link)


def check_ranges(ranges: Ranges, size: int | None) -> int:
    """Check that ranges are sorted, disjoint, not empty, in bounds and not too many.

    Args:
        ranges: (offset, length) pairs in bytes.
        size: the file's, or None where it is not known yet.

    Returns:
        Their total length in bytes.

    Raises:
        RemoteProtocolError: they are not.
    """
    if len(ranges) > MAX_RANGES:
        raise RemoteProtocolError(
            f"{len(ranges)} ranges of one file were asked for; at most {MAX_RANGES} may be."
        )
    end = 0
    total = 0
    for offset, length in ranges:
        if length < 1:
            raise RemoteProtocolError("An empty range was asked for.")
        if offset < end:
            raise RemoteProtocolError("The ranges that were asked for are not sorted and disjoint.")
        end = offset + length
        total += length
    if size is not None and end > size:
        raise RemoteProtocolError("The ranges that were asked for pass the file's end.")
    return total


def _controllers_own_grant(
    record: SignedRecord, kind: str, session_key: bytes, controllers: ControllerSet
) -> Grant:
    """Open a grant that its own signer presents."""
    if not controllers.contains(session_key):
        raise ForbiddenError("The key that asks is no controller of this node.")
    if not hmac.compare_digest(record.signer, session_key):
        raise ForbiddenError("The grant was signed by another key than the one that asks.")
    return open_grant(record, kind)


def _any_controllers_grant(record: SignedRecord, controllers: ControllerSet) -> Grant:
    """Open a transfer grant that a node presents: a controller of now must have signed it."""
    if not controllers.contains(record.signer):
        raise ForbiddenError("The grant was signed by a key that is no controller of this node.")
    return open_grant(record, KIND_TRANSFER_GRANT)


def _check_window(grant: Grant, now: float) -> None:
    if not grant.issued - CLOCK_TOLERANCE <= now < grant.expires:
        raise ClockSkewError(
            f"The grant holds from {_moment(grant.issued)} to {_moment(grant.expires)}, and this node's "
            f"clock says {_moment(now)}. Set both hosts' clocks (`timedatectl set-ntp true`), then try again."
        )
    if grant.expires - grant.issued > GRANT_LIFETIME:
        raise ForbiddenError(f"The grant would hold for more than {GRANT_LIFETIME} s.")


def _check_fetch_age(grant: Grant, now: float) -> None:
    if now >= grant.issued + FETCH_LIFETIME:
        raise ClockSkewError(
            f"The grant was issued at {_moment(grant.issued)}, and this node's clock says {_moment(now)}: "
            f"more than {FETCH_LIFETIME // 3600} hours later. Check the clocks, then start it anew."
        )


def _check_members(grant: Grant) -> None:
    if [member.rank for member in grant.members] != list(range(len(grant.members))):
        raise ForbiddenError("The grant's members are not its ranks from 0 upward.")
    if len({member.public_key for member in grant.members}) != len(grant.members):
        raise ForbiddenError("The grant names one key at two ranks.")


def _check_file(grant: Grant, file: str | None) -> None:
    if file is not None and file not in grant.package.files:
        raise ForbiddenError("The grant does not name the file that was asked for.")


def _check_holder(grant: Grant, own_key: bytes, holds: Callable[[Package], bool]) -> None:
    source = grant.package.source
    if not (source is not None and source.public_key == own_key) and not holds(grant.package):
        raise NotFoundError(
            "This node is not the grant's source, and its copy of the core is no longer here. Run the "
            "command again."
        )


def _path(grant: Grant, source: int, destination: int, path: Sequence[int] | PathFor) -> list[int]:
    size = len(grant.members)
    fabric = grant.transfer_fabric
    if fabric is None or source >= size or destination >= size or source == destination:
        raise ForbiddenError("The grant's fabric has no path between those ranks.")
    try:
        ranks = list(path(fabric, source, destination) if callable(path) else path)
    except FlareError:  # a link on the way is missing
        ranks = []
    if (
        len(ranks) < 2
        or ranks[0] != source
        or ranks[-1] != destination
        or len(set(ranks)) != len(ranks)
        or not all(0 <= rank < size for rank in ranks)
    ):
        raise ForbiddenError("The grant's fabric has no path between those ranks.")
    return ranks


def _rail(grant: Grant, source: int, destination: int, rail: int) -> Link:
    assert grant.transfer_fabric is not None
    rails = grant.transfer_fabric.links[source][destination]
    if rail >= len(rails):
        raise ForbiddenError(f"The grant has no rail {rail} from rank {source} to rank {destination}.")
    return rails[rail]


def _same(address: tuple[Any, ...]) -> tuple[str, int]:
    """Return an address in the one form that `Link` has: an IPv4 address in IPv6 clothes is IPv4."""
    try:
        host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return str(address[0]), int(address[1])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host), int(address[1])


def _moment(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # a year that no calendar has
        return f"second {seconds:.0f}"


__all__ = [
    "CLOCK_TOLERANCE",
    "FETCH_LIFETIME",
    "GRANT_LIFETIME",
    "KIND_RUN_GRANT",
    "KIND_TRANSFER_GRANT",
    "CheckedGrant",
    "FabricHop",
    "Grant",
    "Link",
    "Member",
    "Package",
    "Source",
    "TransferFabric",
    "check_fetch",
    "check_fetch_fabric",
    "check_ranges",
    "check_run",
    "check_transfer",
    "new_launch_id",
    "open_grant",
    "parse_socket_address",
    "sign_grant",
]
