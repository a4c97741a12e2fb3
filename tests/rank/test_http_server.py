from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import aiohttp
import pytest
from aiohttp import web

from flare.rank.front import MAX_BODY, Front
from tests.rank.lab import run
from tests.rank.test_front import PATH, Lab, opened


async def said(lab: Lab, *pieces: bytes) -> bytes:
    """Send what no client library would, piece by piece, and return the answer up to the connection's end."""
    host, _, port = lab.url.removeprefix("http://").partition(":")
    loop = asyncio.get_running_loop()
    answer = b""
    with socket.socket() as client, contextlib.suppress(ConnectionError):
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        for piece in pieces:
            with contextlib.suppress(ConnectionError):  # it was refused before it was read whole
                await loop.sock_sendall(client, piece)
            await asyncio.sleep(0.05)
        while data := await loop.sock_recv(client, 65536):
            answer += data
    return answer


def head(*lines: str, path: str = PATH) -> bytes:
    words = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines)
    return "".join(f"{line}\r\n" for line in words).encode() + b"\r\n"


def test_a_client_that_asks_first_is_asked_for_a_body_that_is_wanted_alone() -> None:
    async def work() -> None:
        expect = "Expect: 100-continue"
        async with opened() as lab:
            lines = expect, "Content-Length: 2", "Connection: close"
            answer = await said(lab, head(*lines), b"{}")
            assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        async with opened() as lab:
            for path, length, status in (
                (PATH, MAX_BODY + 1, b"413 "),
                ("/props", 2, b"404 "),
            ):
                host, _, port = lab.url.removeprefix("http://").partition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head(expect, f"Content-Length: {length}", path=path))
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert b"Connection: close" in answer
                writer.close()

    run(work())


def test_the_server_does_not_say_what_it_is_made_of() -> None:
    async def work() -> None:
        async with opened() as lab:
            lab.upstream.release.set()
            for method, path in (
                ("GET", "/health"),
                ("HEAD", "/metrics"),
                ("GET", "/v1/models"),
                ("PUT", "/"),
            ):
                async with lab.client.request(method, lab.url + path) as response:
                    assert response.headers["Server"] == "flare"
            async with lab.post({"stream": True}) as response:
                assert response.headers["Server"] == "flare"

    run(work())


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"\x16\x03\x01\x02\x00\x01\r\n\r\n"], b"400"),
        ([b"no request at all\r\n\r\n"], b"400"),
        ([head("Content-Length: -1")], b"400"),
        ([head("Content-Length: 1" + "0" * 30)], b"400"),
        ([head("Content-Length: 2", "Transfer-Encoding: chunked"), b"{}"], b"400"),
        ([head("Transfer-Encoding: chunked") + b"no length\r\n"], b"400"),
        ([head("X-Long: " + "a" * 20_000)], b"431"),
        ([head(path="/" + "a" * 20_000)], b"404"),
        ([head(path="/" + "a" * 200_000)], b"404"),
    ],
    ids=["tls", "words", "negative", "overflow", "two lengths", "chunk", "header", "path", "longer path"],
)
def test_what_is_no_request_is_answered_in_a_sentence_and_fills_no_log(
    pieces: list[bytes], status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with opened() as lab:
            answer = await said(lab, *pieces)
            assert answer.split()[1] == status
            assert b"Server: flare\r\n" in answer
            assert b"aiohttp" not in answer
            assert b'{"error": {"message": ' in answer
            assert not lab.upstream.seen

    run(work())
    assert not caplog.records


def test_a_client_that_leaves_before_it_is_asked_for_its_body_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with opened() as lab:
            host, _, port = lab.url.removeprefix("http://").partition(":")
            for _ in range(20):
                with socket.create_connection((host, int(port))) as client:
                    reset = struct.pack("ii", 1, 0)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                    client.sendall(head("Expect: 100-continue", "Content-Length: 7"))
            await said(lab, head("Content-Length: 0", "Connection: close"))

    run(work())
    assert not caplog.records


def test_a_fault_of_the_front_is_told_and_printed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_front: Front, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/begun":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"half of")
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Front, "_serve", fail)

    async def work() -> None:
        async with opened() as lab:
            async with lab.client.get(lab.url + "/") as response:
                assert (response.status, response.headers["Server"]) == (500, "flare")
                assert (await response.json())["error"]["type"] == "internal_error"
            async with lab.client.get(lab.url + "/begun") as response:
                with pytest.raises(aiohttp.ClientError):  # cut, not made to look whole
                    await response.read()

    run(work())
    assert "a fault of ours" in caplog.text
