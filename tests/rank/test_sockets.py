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
