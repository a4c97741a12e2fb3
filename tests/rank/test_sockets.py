from __future__ import annotations

import asyncio
import socket

import pytest

from flare.errors import BusyError, ConfigError
from flare.rank.sockets import listen_http, url_of
from tests.rank.lab import run


def test_a_port_that_is_taken_and_an_address_of_others_are_named() -> None:
    async def work() -> None:
        first = await listen_http("127.0.0.1", 0)
        port = first[0].getsockname()[1]
        with pytest.raises(BusyError, match=rf"Port {port} on 127\.0\.0\.1 is taken"):
            await listen_http("127.0.0.1", port)
        first[0].close()
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
            await listen_http("192.0.2.1", 0)

    run(work())


def test_who_connects_before_anybody_serves_waits() -> None:
    async def work() -> None:
        (listening,) = await listen_http("127.0.0.1", 0)
        client = socket.create_connection(listening.getsockname()[:2], 3)
        client.sendall(b"early")
        server = await asyncio.start_server(echo, sock=listening)
        assert await asyncio.to_thread(client.recv, 10) == b"early"
        client.close()
        server.close()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(10))
        await writer.drain()
        writer.close()

    run(work())


def test_a_wildcard_address_is_shown_as_one_that_can_be_opened() -> None:
    async def work() -> None:
        for host, shown in (("0.0.0.0", "http://127.0.0.1:"), ("::", "http://[::1]:")):
            (listening,) = await listen_http(host, 0)
            assert url_of(host, listening) == f"{shown}{listening.getsockname()[1]}"
            listening.close()

    run(work())


def resolved(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Make every name stand for these addresses."""

    def found(_host: object, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_all_addresses_of_a_name_have_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "127.0.0.1", "127.0.0.2", "127.0.0.2")

    async def work() -> None:
        first, second = await listen_http("here", 0)
        port = first.getsockname()[1]
        assert url_of("here", first) == f"http://here:{port}"
        assert second.getsockname() == ("127.0.0.2", port)
        first.close()
        with pytest.raises(BusyError):
            await listen_http("here", port)
        second.close()
        for each in await listen_http("here", port):  # the one that it had taken is free again
            each.close()

    run(work())


def test_an_address_that_this_machine_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "192.0.2.1", "127.0.0.1")

    async def work() -> None:
        (listening,) = await listen_http("here", 0)
        assert listening.getsockname()[0] == "127.0.0.1"
        listening.close()

    run(work())


def test_a_name_without_an_address_and_what_is_no_name_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def work() -> None:
        with pytest.raises(ConfigError, match=r"listen on a\.\.b:0: That is no host name\."):
            await listen_http("a..b", 0)
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        with pytest.raises(ConfigError, match=r"listen on nowhere:0: Name or service not known\."):
            await listen_http("nowhere", 0)

    run(work())
