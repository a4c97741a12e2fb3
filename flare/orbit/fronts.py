"""Where the HTTP fronts of groups are: as clients reach them, and whether two are in each other's way."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from flare.errors import UsageError
from flare.orbit.orbit_records import NodeEntry
from flare.serving_options import WILDCARDS
from flare.session import SocketAddress, format_address, parse_address
from flare.wire.messages import GroupReport

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def front_url(host: str, port: int, node: NodeEntry) -> str:
    """Return a front's URL, with the node's paired address where it listens on every one.

    Args:
        host, port: what it binds, or bound.
    """
    if host in WILDCARDS:
        host = parse_address(node.address)[0]
    return f"http://{format_address(host, port)}"


def reported_url(report: GroupReport, node: NodeEntry) -> str | None:
    """Return where a group that a node reports serves; None while it does not."""
    front, url = _launched(report), _served(report)
    if url is None or front is None or front[0] not in WILDCARDS:
        return report.url
    return front_url(front[0], url[1], node)


def front_of(report: GroupReport) -> SocketAddress | None:
    """Return what a group's front binds, or will when it has loaded; None where the node does not tell."""
    return _launched(report) or _served(report)


def _launched(report: GroupReport) -> SocketAddress | None:
    """The address that its launch asked for, where the node tells of it."""
    if report.front is None:
        return None
    try:
        return parse_address(report.front)
    except UsageError:
        return None  # a node's word, and no address


def _served(report: GroupReport) -> SocketAddress | None:
    """The address that its rank serves at."""
    try:
        url = urlsplit(report.url or "")
        return (url.hostname, url.port) if url.hostname and url.port else None
    except ValueError:
        return None


def may_share(one: str, other: str) -> bool:
    """Tell whether two hosts, as --host takes them, may be one address of the same machine.

    Only that machine knows what its names are, so a name may be any address of it.
    """
    ours, theirs = _addresses(one), _addresses(other)
    if ours is None or theirs is None:
        return True
    return any(
        mine.version == yours.version and (mine == yours or mine.is_unspecified or yours.is_unspecified)
        for mine in ours
        for yours in theirs
    )


def _addresses(host: str) -> tuple[Address, ...] | None:
    if host.lower() == "localhost":
        return ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address,)
