"""Which addresses bulk bytes take between a peer and rank zero: the fabric where both have one."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from flare.errors import RemoteProtocolError
from flare.fabric.endpoints import MAX_ENDPOINTS, read_endpoints
from flare.fabric.rails import Cables, FabricNode
from flare.fabric.values import Endpoint
from flare.rank.proof import Purpose
from flare.rank.sockets import PROOF_LIMIT, notice_death, prove_blocking, set_up
from flare.strict_json import Reader
from flare.values import dataclass

LOCAL_ANY: Final = ""
"""Leaves the choice of the local address to the kernel."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way to rank zero: the local address to bind, and where to go."""

    local: str
    host: str
    port: int


def own_endpoints(interfaces: Sequence[str]) -> tuple[Endpoint, ...]:
    """Return this node's fabric endpoints, without asking what is at the cables' other ends (slow).

    Raises:
        ConfigError: config.toml names an interface that is not there.
    """
    return read_endpoints(interfaces=interfaces, neighbours=lambda _indices: {})


def endpoints_message(endpoints: Sequence[Endpoint]) -> list[dict[str, Any]]:
    """Return what the welcome says of rank zero's endpoints."""
    return [
        {"address": endpoint.address, "prefix": endpoint.prefix, "pci": endpoint.pci}
        for endpoint in endpoints
    ]


def parse_endpoint(value: object, where: str) -> Endpoint:
    """Read one of them.

    Raises:
        RemoteProtocolError: it is none.
    """
    reader = Reader(value, where, RemoteProtocolError)
    return Endpoint(
        device="",
        port=0,
        interface="",
        address=reader.text("address", limit=64),
        prefix=reader.count("prefix", limit=32),
        mac="",
        pci=reader.text("pci", limit=32),
    )


def read_offered(welcome: Reader) -> tuple[Endpoint, ...]:
    """Return rank zero's endpoints out of its welcome."""
    offered: tuple[Endpoint, ...] = welcome.list_of(
        "endpoints", parse_endpoint, limit=MAX_ENDPOINTS, default=()
    )
    return tuple(offered)


def plan(
    own: Sequence[Endpoint], offered: Sequence[Endpoint], rendezvous: tuple[str, int]
) -> tuple[Route, ...]:
    """Return the best rails between both, or the rendezvous address where no subnet is shared.

    Args:
        own: this node's endpoints.
        offered: rank zero's.
        rendezvous: its address and port; the port serves on every address of that host.
    """
    host, port = rendezvous
    nodes = [FabricNode("zero", port, tuple(offered)), FabricNode("peer", port, tuple(own))]
    rails = Cables(nodes).rails(0, 1) if own and offered else []
    return tuple(Route(here.address, there.address, port) for there, here in rails) or (
        Route(LOCAL_ANY, host, port),
    )


def connector(
    routes: Sequence[Route], purpose: Purpose, rank: int, key: bytes
) -> Callable[[], socket.socket]:
    """Return what opens one proven, blocking connection to rank zero, on each route in turn.

    A route that fails is an error, not a reason to take another one: bulk bytes that silently leave the
    fabric for a slow network are worse than a message.
    """
    turns = itertools.cycle(routes)
    lock = threading.Lock()

    def connect() -> socket.socket:
        with lock:
            route = next(turns)
        source = (route.local, 0) if route.local else None
        try:
            connection = socket.create_connection((route.host, route.port), PROOF_LIMIT, source)
        except TimeoutError:  # without a number, as the socket's own are
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
        try:
            set_up(connection)
            if purpose is Purpose.RANGES:
                notice_death(connection)  # a request on its way, and nothing else, may hide a cut cable
            prove_blocking(connection, purpose, rank, key)
        except BaseException:
            connection.close()
            raise
        return connection

    return connect
