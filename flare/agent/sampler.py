"""Once a second: every device, and the metrics document of every group whose rank zero runs here.

The document is asked of local addresses only, without redirect or proxy, at most 64 KiB in at most two
seconds: whatever answers there cannot hold the sampler up, fill its memory or send it elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from flare.agent.gpus import Reading
from flare.agent.ranks import Ranks
from flare.errors import FlareError, RemoteProtocolError
from flare.strict_json import loads

INTERVAL = 1.0  # seconds between two samples
DOCUMENT_TIMEOUT = 2.0  # seconds for one document, connection included
MAX_DOCUMENT = 64 * 1024  # bytes; a document has some five hundred
MAX_HEAD = 16 * 1024  # bytes of HTTP status line and headers
FRESH = 0.5  # seconds: a reading that is younger is used again

logger = logging.getLogger("flare.agent")


class DeviceReader(Protocol):
    """What the sampler needs of flare.agent.gpus.Devices."""

    def read(self) -> list[Reading]:
        """Read every device now; may block for as long as the driver takes."""


@dataclass(frozen=True, slots=True)
class Document:
    """A metrics document and when it was read, in monotonic seconds."""

    values: Mapping[str, Any]
    read_at: float


class Sampler:
    """The node's last readings.

    Args:
        devices: read in a thread, one at a time.
        ranks: says which groups serve where; its expired history is dropped with every sample.
        each_second: also called with every sample; for other housekeeping.
    """

    def __init__(
        self,
        devices: DeviceReader,
        ranks: Ranks,
        *,
        each_second: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices = devices
        self._ranks = ranks
        self._each_second = each_second
        self._clock = clock
        self._readings: tuple[Reading, ...] = ()
        self._read_from = -math.inf  # when the last reading began
        self._reading: asyncio.Task[None] | None = None
        self._documents: dict[str, Document] = {}

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The devices as they were last read."""
        return self._readings

    def document(self, launch: str) -> tuple[Mapping[str, Any], float] | None:
        """Return a launch's last document and its age in seconds, if there is one."""
        found = self._documents.get(launch)
        return None if found is None else (found.values, self._clock() - found.read_at)

    async def fresh_readings(self, max_age: float = FRESH) -> tuple[Reading, ...]:
        """Return readings that began at most `max_age` seconds before this call; with 0, new ones."""
        wanted = self._clock() - max_age
        while self._read_from < wanted:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            # Whoever gives up leaves the others their reading, and a driver that hangs holds one thread only.
            await asyncio.shield(self._reading)
        return self._readings

    async def _read(self) -> None:
        try:
            began = self._clock()
            self._readings = tuple(await asyncio.to_thread(self._devices.read))
            self._read_from = began
        finally:
            self._reading = None

    async def run(self) -> None:
        """Sample for ever, until cancelled."""
        while True:
            started = self._clock()
            try:
                await self.sample()
            except Exception:
                # Observation must never end the node; the next second is another chance.
                logger.exception("a sample failed")
            await asyncio.sleep(max(INTERVAL - (self._clock() - started), 0.05))

    async def sample(self) -> None:
        """Take one sample of everything."""
        self._each_second()
        await self.fresh_readings()
        running = (run for run in self._ranks.running() if run.alive)
        serving = {run.spec.launch: run.url for run in running if run.url is not None}
        documents = await asyncio.gather(*(fetch_document(url) for url in serving.values()))
        for launch, values in zip(serving, documents, strict=True):
            if values is not None:
                self._documents[launch] = Document(values, self._clock())
        kept = {run.spec.launch for run in self._ranks.all()}
        self._documents = {launch: found for launch, found in self._documents.items() if launch in kept}


async def fetch_document(url: str) -> dict[str, Any] | None:
    """Return the metrics document that a rank zero serves at `url`, or None.

    Args:
        url: what the rank said of itself, such as "http://0.0.0.0:8000".
    """
    address = local_address(url)
    if address is None:
        return None
    try:
        async with asyncio.timeout(DOCUMENT_TIMEOUT):
            return await _fetch(*address)
    except (TimeoutError, OSError, FlareError, ValueError):
        return None  # not ready, draining, or gone: the age of the last document tells


def local_address(url: str) -> tuple[str, int] | None:
    """Return the host and port to ask, where they are this host's own; a wildcard means loopback."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    if parts.scheme != "http" or port is None:
        return None
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return (str(address), port) if address.is_loopback or _is_own(str(address)) else None


def _is_own(address: str) -> bool:
    """Tell whether a socket can be bound to `address`: the kernel's own answer to whether it is ours."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


async def _fetch(host: str, port: int) -> dict[str, Any] | None:
    # HTTP/1.0 by hand: no redirects, no proxies, no chunks, no keep-alive, and a bound on every byte.
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD)
    try:
        writer.write(
            f"GET /metrics?format=json HTTP/1.0\r\nHost: {host}\r\nAccept: application/json\r\n\r\n".encode()
        )
        status = (await reader.readline()).split()
        if len(status) < 2 or status[1] != b"200":
            return None
        head = 0
        while (line := await reader.readline()) not in (b"\r\n", b"\n"):
            head += len(line)
            if not line or head > MAX_HEAD:
                return None
        body = bytearray()
        while chunk := await reader.read(MAX_DOCUMENT + 1 - len(body)):
            body += chunk
            if len(body) > MAX_DOCUMENT:
                raise RemoteProtocolError("the metrics document is too long")
        return loads(bytes(body), limit=MAX_DOCUMENT, what="the metrics document")
    finally:
        writer.transport.abort()
