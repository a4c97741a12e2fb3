"""The sampler: readings, and metrics documents from whatever answers at a rank's URL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator

import pytest

from flare.agent.gpus import Reading
from flare.agent.ranks import Ranks
from flare.agent.run import RankSpec
from flare.agent.sampler import MAX_DOCUMENT, Sampler, fetch_document, local_address
from tests.agent.transfer_world import until
from tests.agent.world import drive

DOCUMENT = {"time": 1.0, "state": "serving", "model": "tiny"}


class Devices:
    def __init__(self) -> None:
        self.reads = 0
        self.fails = False

    def read(self) -> list[Reading]:
        self.reads += 1
        if self.fails:
            raise RuntimeError("driver fault")
        return [Reading(0, "CPU-0", "cpu", "cpu", 100, 50)]


def http(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{extra}\r\n".encode() + body


@contextlib.asynccontextmanager
async def serving(answer: bytes, *, hangs: bool = False) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Serve one raw answer to everybody; yield the port and the requests that came."""
    requests: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        if not hangs:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def fetched(answer: bytes, *, hangs: bool = False) -> tuple[dict[str, object] | None, bytes]:
    """Fetch from a server that gives one raw answer; return the document and the request."""
    async with serving(answer, hangs=hangs) as (port, requests):
        found = await fetch_document(f"http://0.0.0.0:{port}")
        return found, b"".join(requests)


def test_asks_for_json_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://203.0.113.1:1")
    found, request = drive(fetched(http(json.dumps(DOCUMENT).encode())))
    assert found == DOCUMENT
    assert request.startswith(b"GET /metrics?format=json HTTP/1.0\r\n")


@pytest.mark.parametrize(
    "answer",
    [
        http(b"{}", "503 Service Unavailable"),
        http(b"", "302 Found", "Location: http://203.0.113.1/\r\n"),
        http(b"no json"),
        http(b"[1, 2]"),
        http(b'{"a": NaN}'),
        http(b'{"a": 1, "a": 2}'),
        http(b'{"a": "' + b"x" * MAX_DOCUMENT + b'"}'),
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: yes\r\n" * 5000,
        b"HTTP/1.1 200 OK\r\nX-Line: " + b"x" * 100_000,
    ],
)
def test_what_is_no_document_is_none(answer: bytes) -> None:
    assert drive(fetched(answer))[0] is None


def test_an_endpoint_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.agent.sampler.DOCUMENT_TIMEOUT", 0.3)
    started = time.monotonic()
    assert drive(fetched(http(b'{"a": '), hangs=True))[0] is None
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://0.0.0.0:8000", ("127.0.0.1", 8000)),
        ("http://[::]:8000", ("::1", 8000)),
        ("http://localhost:8000", ("127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/x", ("127.0.0.1", 8000)),
        ("http://203.0.113.1:8000", None),
        ("http://example.org:8000", None),
        ("https://127.0.0.1:8000", None),
        ("http://127.0.0.1", None),
        ("http://127.0.0.1:99999", None),
        ("file:///etc/passwd", None),
        ("", None),
    ],
)
def test_only_this_hosts_own_addresses(url: str, expected: tuple[str, int] | None) -> None:
    assert local_address(url) == expected


def test_an_address_of_an_interface_of_this_host() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        own = probe.getsockname()[0]
    assert local_address(f"http://{own}:8000") == (own, 8000)


def test_samples_serving_groups_and_forgets_those_that_are_gone() -> None:
    program = (
        "import os, sys, time\n"
        "fd = int(sys.argv[sys.argv.index('--status-fd') + 1])\n"
        "os.write(fd, sys.argv[1].encode() + b'\\n')\n"
        "time.sleep(60)\n"
    )

    async def scenario() -> None:
        ranks, devices, calls = Ranks(), Devices(), []
        sampler = Sampler(devices, ranks, each_second=lambda: calls.append(1))
        async with serving(http(json.dumps(DOCUMENT).encode())) as (port, _):
            status = json.dumps({"phase": "serving", "url": f"http://127.0.0.1:{port}"})
            command = (sys.executable, "-c", program, status)
            run = ranks.reserve(RankSpec("a-1", "a", "c", 0, 1, (), command, dict(os.environ)), [])
            await ranks.start(run)
            while run.url is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await sampler.sample()
            found = sampler.document("a-1")
            assert found is not None
            assert found[0] == DOCUMENT
            assert 0 <= found[1] < 5
            assert sampler.readings[0].uuid == "CPU-0"
            assert calls == [1]
            await ranks.close()
            ranks.remove("a-1")
            await sampler.sample()
            assert sampler.document("a-1") is None

    drive(scenario())


def test_a_failing_driver_does_not_end_the_sampler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flare.agent.sampler.INTERVAL", 0.05)

    async def scenario() -> None:
        devices = Devices()
        devices.fails = True
        sampler = Sampler(devices, Ranks())
        task = asyncio.create_task(sampler.run())
        await until(lambda: "a sample failed" in caplog.text)
        devices.fails = False
        await until(lambda: bool(sampler.readings))
        task.cancel()

    drive(scenario())


def test_a_reading_is_shared_for_half_a_second() -> None:
    async def scenario() -> None:
        devices = Devices()
        sampler = Sampler(devices, Ranks())
        await asyncio.gather(*(sampler.fresh_readings() for _ in range(10)))
        assert devices.reads == 1

    drive(scenario())


class HeldDevices:
    """Devices whose driver answers when it is told to."""

    def __init__(self) -> None:
        self.began = 0
        self.answer = threading.Event()

    def read(self) -> list[Reading]:
        self.began += 1
        assert self.answer.wait(30)
        return [Reading(0, f"CPU-{self.began}", "cpu", "cpu", 100, 50)]


def test_whoever_gives_up_leaves_the_reading_to_others() -> None:
    async def scenario() -> None:
        devices = HeldDevices()
        sampler = Sampler(devices, Ranks())
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sampler.fresh_readings(), 0.05)
        waiting = asyncio.create_task(sampler.fresh_readings())
        devices.answer.set()
        assert [reading.uuid for reading in await waiting] == ["CPU-1"]
        assert devices.began == 1

    drive(scenario())


def test_a_new_reading_is_one_that_began_after_it_was_asked_for() -> None:
    async def scenario() -> None:
        devices = HeldDevices()
        sampler = Sampler(devices, Ranks())
        first = asyncio.create_task(sampler.fresh_readings())
        await until(lambda: devices.began == 1)
        second = asyncio.create_task(sampler.fresh_readings(0.0))
        await asyncio.sleep(0)
        devices.answer.set()
        assert [reading.uuid for reading in await first] == ["CPU-1"]
        assert [reading.uuid for reading in await second] == ["CPU-2"]

    drive(scenario())
