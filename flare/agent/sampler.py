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
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from flare.agent.driver import ask_driver
from flare.agent.gpus import CPU_REVISION, Reading
from flare.agent.ranks import Ranks
from flare.errors import FlareError, RemoteProtocolError
from flare.strict_json import loads
from flare.values import dataclass

INTERVAL = 1.0  # seconds between two samples
DOCUMENT_TIMEOUT = 2.0  # seconds for one document, connection included
MAX_DOCUMENT = 64 * 1024  # bytes; a document has some five hundred
MAX_HEAD = 16 * 1024  # bytes of HTTP status line and headers
FRESH = 0.5  # seconds: a reading that is younger is used again
ANSWER_WITHIN = 5.0  # seconds; drivers take milliseconds, and one or two seconds after a reset

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
        self._reading_since: float | None = None  # when the one that is under way began
        self._told_silent = False
        self._reading: asyncio.Task[None] | None = None
        self._documents: dict[str, Document] = {}

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The devices as they were last read; GPUs with a problem while the driver does not answer."""
        problem = self.problem
        if problem is None:
            return self._readings
        return tuple(_silent(reading, problem) for reading in self._readings)

    @property
    def problem(self) -> str | None:
        """What is wrong with the driver while it does not answer, a clause; None when it does."""
        seconds = self._waited()
        if seconds < ANSWER_WITHIN:
            return None
        return f"the NVIDIA driver has not answered for {seconds:.0f} s; check `nvidia-smi`"

    @property
    def asking(self) -> bool:
        """Whether the driver is being asked now."""
        return self._reading_since is not None

    def _waited(self) -> float:
        """For how many seconds the driver has not answered the question that it is asked now."""
        return 0.0 if self._reading_since is None else self._clock() - self._reading_since

    async def answered_readings(self) -> tuple[Reading, ...]:
        """Return fresh readings, or after ANSWER_WITHIN without an answer what `readings` says."""
        try:
            async with asyncio.timeout(max(ANSWER_WITHIN - self._waited(), 0.0)):
                return await self.fresh_readings()
        except TimeoutError:
            return self.readings

    def document(self, launch: str) -> tuple[Mapping[str, Any], float] | None:
        """Return a launch's last document and its age in seconds, if there is one."""
        found = self._documents.get(launch)
        return None if found is None else (found.values, self._clock() - found.read_at)

    async def fresh_readings(self, max_age: float = FRESH) -> tuple[Reading, ...]:
        """Return readings that began at most `max_age` seconds before this call; with 0, new ones.

        Waits for as long as the driver takes.
        """
        wanted = self._clock() - max_age
        while self._read_from < wanted:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            # Whoever gives up leaves the others their reading, and a driver that hangs holds one thread only.
            await asyncio.shield(self._reading)
        return self._readings

    async def _read(self) -> None:
        self._reading_since = began = self._clock()
        try:
            self._readings = tuple(await ask_driver(self._devices.read))
            self._read_from = began
        finally:
            self._reading, self._reading_since = None, None

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
        await self.answered_readings()
        self._tell_problem()
        running = (run for run in self._ranks.running() if run.alive)
        serving = {run.spec.launch: run.url for run in running if run.url is not None}
        documents = await asyncio.gather(*(fetch_document(url) for url in serving.values()))
        for launch, values in zip(serving, documents, strict=True):
            if values is not None:
                self._documents[launch] = Document(values, self._clock())
        kept = {run.spec.launch for run in self._ranks.all()}
        self._documents = {launch: found for launch, found in self._documents.items() if launch in kept}

    def _tell_problem(self) -> None:
        """Log once that the driver does not answer, and once that it does again."""
        problem = self.problem
        if problem is not None and not self._told_silent:
            logger.warning("%s; nothing is placed on its GPUs until it answers", problem)
        elif problem is None and self._told_silent and self._reading is None:
            logger.info("the NVIDIA driver answers again")
        else:
            return
        self._told_silent = problem is not None


def _silent(reading: Reading, problem: str) -> Reading:
    """Return a GPU as one that does not answer; the CPU, which no driver is asked about, stays as it was."""
    if reading.revision == CPU_REVISION:
        return reading
    return replace(
        reading,
        memory_free=0,
        utilization=None,
        memory_utilization=None,
        temperature=None,
        clock=None,
        problem=f"GPU {reading.index} does not answer: {problem}; nothing is placed on it until it does",
    )


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
