"""Addresses: as people write them, and as sockets give them."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any

from flare.errors import UsageError
from flare.settings import DEFAULT_PORT

SocketAddress = tuple[str, int]
"""Host and port; an IPv4 address that an IPv6 socket gave is written as IPv4."""


def parse_address(text: str, default_port: int = DEFAULT_PORT, *, bound: bool = False) -> SocketAddress:
    """Return the host and port of "host", "host:port", "[address]:port" or a bare IPv6 address.

    Args:
        text: as an operator or orbit.toml wrote it.
        default_port: where the text names none.
        bound: it is to be bound here, where 0 stands for a port that the system chooses.

    Raises:
        UsageError: it is no address.
    """
    host, port_text = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(f'"{text[:80]}" is no address: write [ADDRESS]:PORT for IPv6.')
        port_text = rest[1:] if rest else ""
        if rest == ":":
            raise UsageError(f'"{text[:80]}" is no address: a port is missing after the colon.')
    elif text.count(":") == 1:
        host, _, port_text = text.partition(":")
        if not port_text:
            raise UsageError(f'"{text[:80]}" is no address: a port is missing after the colon.')
    if not host or len(host) > 253 or any(character <= " " or character in "/@" for character in host):
        raise UsageError(f'"{text[:80]}" is no address: write HOST or HOST:PORT.')
    if not port_text:
        return host, default_port
    smallest = 0 if bound else 1
    if not re.fullmatch("[0-9]{1,5}", port_text) or not smallest <= int(port_text) <= 0xFFFF:
        or_zero = ", or 0 for one that the system chooses" if bound else ""
        raise UsageError(f'"{text[:80]}" is no address: a port is a whole number from 1 to 65535{or_zero}.')
    return host, int(port_text)


def format_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_address(name: Any) -> SocketAddress:
    """Return the host and port of what getsockname or getpeername gave; a local socket has none."""
    if not isinstance(name, tuple):
        return ("local", 0)
    host = str(name[0]).partition("%")[0]
    if ":" in host:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        host = str(mapped) if mapped is not None else host
    return host, int(name[1])


def network_of(host: str) -> str:
    """Return what counts as one address for limits: an IPv4 address, or an IPv6 /64.

    Whoever holds one IPv6 address commonly holds all of its /64.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(ipaddress.IPv6Network((address.packed[:8] + bytes(8), 64)))


def prepare_socket(sock: socket.socket) -> socket.socket:
    """Set what every session's socket needs: no blocking, no delay, a dead peer is noticed."""
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # An ATTACH may be silent for hours: probe after 30 s, give up after a minute more.
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock
