"""Addresses as people write them and as sockets give them."""

from __future__ import annotations

import socket

import pytest

from flare.errors import UsageError
from flare.session import format_address, network_of, parse_address, socket_address
from flare.session.addresses import prepare_socket


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("maxwell", ("maxwell", 29900)),
        ("maxwell:1", ("maxwell", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("::1", ("::1", 29900)),
        ("fd00::1:2", ("fd00::1:2", 29900)),
        ("[::1]", ("::1", 29900)),
        ("[fd00::1]:8000", ("fd00::1", 8000)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert parse_address(format_address(*expected)) == expected


def test_another_default_port() -> None:
    assert parse_address("maxwell", 5) == ("maxwell", 5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "write HOST or HOST:PORT"),
        (":29900", "write HOST or HOST:PORT"),
        ("a b", "write HOST or HOST:PORT"),
        ("user@host", "write HOST or HOST:PORT"),
        ("http://host", "a port is a whole number|write HOST"),
        ("x" * 254, "write HOST or HOST:PORT"),
        ("host:", "a port is missing"),
        ("[::1]:", "a port is missing"),
        ("host:0", "a port is a whole number from 1 to 65535\\.$"),
        ("host:65536", "a port is a whole number from 1 to 65535\\.$"),
        ("host:12x", "a port is a whole number from 1 to 65535\\.$"),
        ("host:00000199999", "a port is a whole number from 1 to 65535\\.$"),
        ("host:" + "9" * 5000, "a port is a whole number from 1 to 65535\\.$"),
        ("host:١", "a port is a whole number from 1 to 65535\\.$"),
        ("[::1", "for IPv6"),
        ("[::1]x", "for IPv6"),
        ("[]:1", "write HOST"),
    ],
)
def test_what_is_no_address(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_address(text)


@pytest.mark.parametrize(("text", "port"), [("host:0", 0), ("[::1]:0", 0), ("host:65535", 65535)])
def test_a_port_to_bind_may_be_the_systems_choice(text: str, port: int) -> None:
    assert parse_address(text, bound=True)[1] == port
    with pytest.raises(UsageError, match=r"from 1 to 65535, or 0 for one that the system chooses\.$"):
        parse_address("host:65536", bound=True)


def test_what_sockets_give() -> None:
    assert socket_address(("10.0.0.1", 5)) == ("10.0.0.1", 5)
    assert socket_address(("::ffff:10.0.0.1", 5, 0, 0)) == ("10.0.0.1", 5)
    assert socket_address(("fe80::1%eth0", 5, 0, 2)) == ("fe80::1", 5)
    assert socket_address("") == ("local", 0)


def test_what_counts_as_one_address() -> None:
    assert network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("2001:db8:1:2::1") == network_of("2001:db8:1:2:ffff::9") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:3::1") != network_of("2001:db8:1:2::1")
    assert network_of("local") == "local"


def test_a_prepared_socket() -> None:
    with socket.socket() as sock:
        prepare_socket(sock)
        assert not sock.getblocking()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
