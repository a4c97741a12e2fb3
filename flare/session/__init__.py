"""Sessions: a socket, the handshake, frames both ways (asyncio). `connect` and `Listener` make them."""

from __future__ import annotations

from flare.session.addresses import (
    SocketAddress,
    format_address,
    network_of,
    parse_address,
    socket_address,
)
from flare.session.admission import (
    HANDSHAKE_TIMEOUT,
    MAX_STRANGERS,
    MAX_UNFINISHED,
    MAX_UNFINISHED_PER_ADDRESS,
    STRANGER_FRAME_TIMEOUT,
    Admission,
)
from flare.session.connecting import CONNECT_TIMEOUT, HANDSHAKES_PER_ADDRESS, connect
from flare.session.connection import REQUEST_TIMEOUT, Session, SessionClosedError
from flare.session.listener import Listener, accept

__all__ = [
    "CONNECT_TIMEOUT",
    "HANDSHAKES_PER_ADDRESS",
    "HANDSHAKE_TIMEOUT",
    "MAX_STRANGERS",
    "MAX_UNFINISHED",
    "MAX_UNFINISHED_PER_ADDRESS",
    "REQUEST_TIMEOUT",
    "STRANGER_FRAME_TIMEOUT",
    "Admission",
    "Listener",
    "Session",
    "SessionClosedError",
    "SocketAddress",
    "accept",
    "connect",
    "format_address",
    "network_of",
    "parse_address",
    "socket_address",
]
