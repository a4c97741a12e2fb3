"""Sockets between ranks: how they are set up, and how a connection proves that it belongs to the launch."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Iterable
from typing import Any, Final

from flare.errors import BusyError, ConfigError, RemoteProtocolError, UnreachableError
from flare.rank.proof import (
    NONCE_LENGTH,
    PROOF_LENGTH,
    ZERO_HELLO_LENGTH,
    Purpose,
    parse_zero_hello,
    peer_hello,
    peer_proof,
    same,
    transcript,
    zero_proof,
)

DEAD_AFTER: Final = 4
"""Seconds until the kernel gives a silent connection up; the group has ended within the next one."""
UNANSWERED_LIMIT: Final = 3500
"""Milliseconds without an answer that end a connection at the kernel's look after them, and the
looks are a second apart: at the fourth, and not at the fifth because the fourth came a tick early."""
_UNANSWERED: Final = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)
HTTP_BACKLOG: Final = 1024
"""Clients that may connect before the front takes them."""
PROOF_LIMIT: Final = 10.0
"""Seconds for the whole proof, on either side."""


def set_up(connection: socket.socket) -> None:
    """Send small messages at once, and have the kernel ask whether the other side is still there.

    The kernel asks, not a heartbeat of ours: that would misfire while an engine loads.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", DEAD_AFTER - 1)):
        _set_if_known(connection, name, value)


def notice_death(connection: socket.socket) -> None:
    """Give a connection up after UNANSWERED_LIMIT, by the fourth second at the latest, also while
    something is on its way.

    Not on the side that sends bulk: the kernel counts a receiver that is busy and reads nothing for that
    long as dead too (`silence` tells the two apart).
    """
    _set_if_known(connection, "TCP_USER_TIMEOUT", UNANSWERED_LIMIT)


def _set_if_known(connection: socket.socket, name: str, value: int) -> None:
    option = getattr(socket, name, None)  # macOS lacks some; a manual peer there relies on the rest
    if option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
    except BaseException:
        listener.close()
        raise
    return listener


async def listen_http(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address of `host`; who connects waits until they are served.

    Args:
        port: the same on every address; 0 for one that is free.

    Raises:
        BusyError: the port is taken.
        ConfigError: no address of it is this machine's, or it has none.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return _listen_on_each([(family, address) for family, _, _, _, address in dict.fromkeys(found)])
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise BusyError(
                f"Port {port} on {host} is taken by another program. Choose another --port."
            ) from None
        why = describe(problem)
    except UnicodeError:  # of the codec for names: an empty label, or a long one
        why = "That is no host name"
    raise ConfigError(
        f"The HTTP front cannot listen on {show((host, port))}: {why}. Choose another --host or --port."
    )


def _listen_on_each(addresses: Iterable[tuple[int, tuple[Any, ...]]]) -> list[socket.socket]:
    """Return listeners at these addresses, but for those that this machine does not have.

    Raises:
        OSError: one is taken, or none is left.
    """
    bound: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, (host, port, *scope) in addresses:
            chosen = bound[0].getsockname()[1] if bound else port
            try:
                bound.append(_http_listener(family, (host, chosen, *scope)))
            except OSError as problem:
                # localhost is ::1 too in the files of machines without IPv6.
                if problem.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = problem
        if missing is not None and not bound:
            raise missing
    except BaseException:
        for each in bound:
            each.close()
        raise
    return bound


def _http_listener(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # an IPv4 address has a listener of its own
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(HTTP_BACKLOG)  # only now is it known that nobody else listens there
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(host: str, listening: socket.socket) -> str:
    """Return the URL at which this machine reaches what listens on `host`."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host  # noqa: S104
    return f"http://{show((shown, listening.getsockname()[1]))}"


def show(address: tuple[object, ...]) -> str:
    """Return a socket address as people write it."""
    host = str(address[0])
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


async def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """Return `length` bytes.

    Raises:
        EOFError: the other side closed the connection before.
    """
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < length:
        piece = await loop.sock_recv(connection, length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def prove_blocking(connection: socket.socket, purpose: Purpose, rank: int, key: bytes) -> tuple[int, bytes]:
    """Prove to rank zero that this connection belongs to the launch, and check that it does too.

    Args:
        connection: fresh and blocking.

    Returns:
        The number of ranks, and the transcript's digest.

    Raises:
        UnreachableError: rank zero ended the connection, which it does when the keys differ.
        RemoteProtocolError: it is not the rank zero of this launch.
    """
    connection.settimeout(PROOF_LIMIT)
    try:
        hello = peer_hello(purpose, rank, secrets.token_bytes(NONCE_LENGTH))
        connection.sendall(hello)
        answer = _receive_blocking(connection, ZERO_HELLO_LENGTH)
        ranks = parse_zero_hello(answer)
        digest = transcript(hello, answer)
        connection.sendall(peer_proof(key, digest))
        proof = _receive_blocking(connection, PROOF_LENGTH)
    except (EOFError, OSError):
        raise UnreachableError(
            "Rank zero ended the connection during the proof: it has another launch key, or no place for "
            "this rank. Rank zero's output says more."
        ) from None
    if not same(proof, zero_proof(key, digest)):
        raise RemoteProtocolError("What answers at the rendezvous address does not know the launch key.")
    connection.settimeout(None)
    return ranks, digest


def _receive_blocking(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def shut(connection: socket.socket) -> None:
    """End both directions, which also wakes a thread that waits on it; closing is its owner's."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def is_unanswered(problem: Exception) -> bool:
    """Tell whether the network, or the whole other host, ended a connection.

    When a program there dies, its kernel lives on and ends the connection with an answer.
    """
    return isinstance(problem, OSError) and problem.errno in _UNANSWERED


def describe(problem: OSError) -> str:
    """Return what an OSError means; asyncio writes the call's arguments where that should stand."""
    if isinstance(problem, socket.gaierror):  # its number is none of the system's
        return problem.strerror or str(problem)
    return os.strerror(problem.errno) if problem.errno else str(problem)
