"""Rank zero's HTTP: an exact list of paths to the engine, a bounded queue, a drain, health and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web

from flare.errors import RemoteProtocolError
from flare.rank.engines.base import EngineAdapter, EngineMetrics
from flare.rank.http_server import SERVER, HttpServer, refusal
from flare.rank.metrics import PROMETHEUS_TYPE, MetricsDocument, prometheus
from flare.rank.sockets import HTTP_BACKLOG
from flare.strict_json import loads

MAX_BODY: Final = 32 << 20
"""Bytes of a request: a long context with a few pictures in it."""
MAX_VALUES: Final = 1 << 20
"""Members and items of a request: a prompt as a list of tokens, longer than any context here."""
MAX_DEPTH: Final = 128
"""Levels of nesting of a request: the schemas of tools and answers are nested deeply."""
MAX_HELD: Final = 512 << 20
"""Bytes of all requests that are read, wait or run: what clients can make this process hold."""
BODY_LIMIT: Final = 120.0
"""Seconds for a request's body to come: the longest over a line of 2 Mbit/s."""
QUEUE_FACTOR: Final = 16
"""Requests that may wait for each one that runs; beyond that a client does better to come back."""
RETRY_AFTER: Final = "5"
"""Seconds that a refused client is asked to wait."""
METRICS_LIMIT: Final = 2.0
"""Seconds for the engine's own metrics: the agent's sampler waits no longer for all of it."""
METRICS_AGE: Final = 0.3
"""Seconds that an engine's answer is good for, however many ask."""
CONNECT_LIMIT: Final = 10.0
"""Seconds to connect to the engine on the loopback address."""

_OWN_PATHS: Final = ("/health", "/metrics")
_PASSED_HEADERS: Final = ("Content-Type", "Cache-Control")


class Front:
    """The HTTP server of a group.

    Args:
        adapter: which paths the engine serves.
        document: the metrics; its counters are kept here.
        state: returns the phase.
        keys: SHA-256 of each key that clients may show; empty for none needed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        document: MetricsDocument,
        state: Callable[[], str],
        keys: frozenset[bytes],
        clock: Callable[[], float],
    ) -> None:
        self._adapter = adapter
        self._document = document
        self._state = state
        self._keys = keys
        self._clock = clock
        self._paths = adapter.http_paths | adapter.optional_paths  # until the engine can be asked
        self._names: frozenset[str] = frozenset()
        self._held = 0  # bytes of bodies
        self._engine = ""
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(1)
        self._slot_count = 1
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_metrics = EngineMetrics()
        self._metrics_at = -1e9
        self._scraping = asyncio.Lock()
        self._runner: web.ServerRunner | None = None

    async def start(self, host: str, listening: Sequence[socket.socket]) -> None:
        """Answer /health with the state from now on.

        Args:
            host: that the sockets listen on; they are this object's from here on.
        """
        self._names = own_names(host)
        # A client that leaves cancels its handler, which ends the request in the engine too.
        server = HttpServer(self._handle, handler_cancellation=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.5)
        await self._runner.setup()
        for each in listening:
            await web.SockSite(self._runner, each, backlog=HTTP_BACKLOG).start()

    def open(self, engine_port: int, slots: int, paths: frozenset[str]) -> None:
        """Begin to pass requests on.

        Args:
            engine_port: the engine's, on the loopback address.
            slots: requests that it runs at once.
            paths: what it serves.
        """
        self._paths = paths
        self._engine = f"http://127.0.0.1:{engine_port}"
        self._slots = asyncio.Semaphore(slots)
        self._slot_count = slots
        # No limit on the whole answer, and none between two tokens: the engine's end is noticed elsewhere.
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_LIMIT)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, trust_env=False, auto_decompress=False, read_bufsize=1 << 16
        )

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and return when the running ones are done (True) or `seconds` are over."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def busy(self) -> int:
        """Requests that run or wait."""
        counts = self._document.requests
        return counts.active + counts.queued

    async def close(self) -> None:
        """Cut what still runs and stop listening."""
        self._draining = True
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def engine_metrics(self) -> EngineMetrics:
        """Return what the engine tells of itself, not older than METRICS_AGE; all None where it does not."""
        if self._session is None:
            return EngineMetrics()
        async with self._scraping:
            if self._clock() - self._metrics_at > METRICS_AGE:
                self._metrics_at = self._clock()
                try:
                    async with asyncio.timeout(METRICS_LIMIT):
                        async with self._session.get(self._engine + self._adapter.metrics_path) as response:
                            text = await response.text()
                    if response.status == 200:
                        self._last_metrics = self._adapter.parse_metrics(text)
                except (aiohttp.ClientError, OSError, RuntimeError, UnicodeDecodeError):
                    pass  # the last ones are still the best that is known
        return self._last_metrics

    # -- handlers ------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._serve(request)
        if not response.prepared:
            response.headers["Server"] = SERVER
            if "Expect" in request.headers and not request.content.is_eof():
                response.force_close()  # the client may send the body all the same, or the next request
        return response

    def _health(self) -> web.Response:
        state = "draining" if self._draining else self._state()
        return web.json_response({"status": state}, status=200 if state == "serving" else 503)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        document = self._document.build(await self.engine_metrics())
        if request.query.get("format") == "json":
            return web.json_response(document)
        return web.Response(body=prometheus(document).encode(), headers={"Content-Type": PROMETHEUS_TYPE})

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in (*_OWN_PATHS, *self._paths):
            known = ", ".join(sorted(self._paths))
            return refusal(
                404, "not_found", f"There is no such path here. Served: {known}, {', '.join(_OWN_PATHS)}."
            )
        method = "GET" if request.path in (*_OWN_PATHS, "/v1/models") else "POST"
        if request.method != method and not (request.method == "HEAD" and request.path in _OWN_PATHS):
            return refusal(405, "method_not_allowed", f"{request.path} takes {method}.", Allow=method)
        if request.path == "/health":
            return self._health()
        if request.path == "/metrics":
            return await self._metrics(request)
        if not self._allowed(request):
            return refusal(
                401, "invalid_api_key", "The API key is missing or wrong.", **{"WWW-Authenticate": "Bearer"}
            )
        if not self._keys and not _is_own(request.headers.get("Host"), self._names):
            # A page of another site whose name was made to lead here: its browser takes us for that site.
            return refusal(
                403,
                "unknown_host",
                f"{request.headers['Host'][:300]} is no name of this machine that is known here. Use its "
                "address, or give `flare run` an --api-key-file: with a key any name will do.",
            )
        if self._draining:
            return _draining()
        if self._session is None:
            return refusal(503, "loading", f"The group is {self._state()}.", **{"Retry-After": RETRY_AFTER})
        if method == "GET":
            return await self._pass_on(request, b"")
        if request.content_type != "application/json":
            # A page of another site can make a browser send anything but this without asking first.
            return refusal(415, "unsupported_media_type", "Send the request as application/json.")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            return refusal(415, "unsupported_media_type", "Send the request uncompressed.")
        if (request.content_length or 0) > MAX_BODY:
            return _too_large()
        return await self._queue(request)

    def _allowed(self, request: web.BaseRequest) -> bool:
        """Compare the bearer key with every known one, in the same time whichever fits."""
        if not self._keys:
            return True
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        fits = [hmac.compare_digest(digest, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(fits)

    async def _queue(self, request: web.BaseRequest) -> web.StreamResponse:
        body = bytearray()
        try:
            refused = await self._take(request, body)
            return refused if refused is not None else await self._wait_and_pass_on(request, body)
        finally:
            self._held -= len(body)

    async def _take(self, request: web.BaseRequest, body: bytearray) -> web.Response | None:
        """Read a request into `body`; return the refusal of one that cannot go on."""
        refused = self._full()  # each compared with None: an answer of aiohttp before 3.12 counts as false
        if refused is None:
            refused = await self._read(request, body)
        if refused is None:
            refused = _check_json(body)
        return self._full() if refused is None else refused

    def _full(self) -> web.Response | None:
        """Return the refusal of a request that cannot wait here; it waits only when all of it has come."""
        if self._draining:
            return _draining()
        if self._document.requests.queued >= self._slot_count * QUEUE_FACTOR:
            return refusal(
                429, "queue_full", "Too many requests wait already.", **{"Retry-After": RETRY_AFTER}
            )
        return None

    async def _read(self, request: web.BaseRequest, body: bytearray) -> web.Response | None:
        """Read a request's body; return a refusal where that is too long, too slow, or one too many."""
        try:
            async with asyncio.timeout(BODY_LIMIT):
                if request.headers.get("Expect", "").lower() == "100-continue":
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    request.writer.output_size = 0  # that was no part of the answer
                async for piece in request.content.iter_any():
                    body += piece
                    self._held += len(piece)
                    if len(body) > MAX_BODY:
                        return _too_large()
                    if self._held > MAX_HELD:
                        return refusal(
                            503,
                            "too_much_held",
                            "Requests take all the memory that they may already.",
                            **{"Retry-After": RETRY_AFTER},
                        )
        except TimeoutError:
            return refusal(408, "too_slow", f"The request did not come within {BODY_LIMIT:.0f} s.")
        except web.RequestPayloadError:
            return refusal(400, "bad_request", "The request's body cannot be read.")
        return None

    async def _wait_and_pass_on(self, request: web.BaseRequest, body: bytearray) -> web.StreamResponse:
        counts = self._document.requests
        counts.queued += 1
        self._idle.clear()
        queued = True
        try:
            async with self._slots:
                counts.queued -= 1
                queued = False
                counts.active += 1
                try:
                    response = await self._pass_on(request, body)
                except BaseException:
                    counts.failed_total += 1
                    raise
                finally:
                    counts.active -= 1
                if response.status < 500:
                    counts.completed_total += 1
                else:
                    counts.failed_total += 1
                return response
        finally:
            counts.queued -= queued
            if self.busy == 0:
                self._idle.set()

    async def _pass_on(self, request: web.BaseRequest, body: bytes | bytearray) -> web.StreamResponse:
        assert self._session is not None
        response: web.StreamResponse | None = None
        headers = {"Content-Type": "application/json", "Accept": request.headers.get("Accept", "*/*")}
        try:
            async with self._session.request(
                request.method, self._engine + request.path, data=body or None, headers=headers
            ) as upstream:
                response = web.StreamResponse(status=upstream.status, headers={"Server": SERVER})
                for name in _PASSED_HEADERS:
                    if name in upstream.headers:
                        response.headers[name] = upstream.headers[name]
                if upstream.content_length is not None:
                    response.content_length = upstream.content_length
                await response.prepare(request)
                async for piece in upstream.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError:
            return refusal(502, "engine_gone", "The engine does not answer; the group is ending.")
        except (aiohttp.ClientError, ConnectionError) as problem:
            if request.transport is None or request.transport.is_closing():
                raise  # the client is gone; nobody is there to be told
            if response is None or not response.prepared:
                return refusal(502, "engine_gone", "The engine ended the request without an answer.")
            # The answer has begun: cutting the connection is the only way left to say that it is not whole.
            request.transport.close()
            raise web.HTTPBadGateway(reason="the engine ended the answer") from problem


def own_names(host: str) -> frozenset[str]:
    """Return the names by which clients call this machine.

    Args:
        host: that the front listens on.
    """
    full = socket.gethostname().lower()
    short = full.partition(".")[0]
    names = {"localhost", host.lower(), full, short, f"{short}.local"}
    # What the resolver adds to a bare name here, others write out; asking it for ours could take long.
    return frozenset({*names, *(f"{short}.{domain}" for domain in resolver_domains())})


def resolver_domains() -> list[str]:
    """Return the domains of this machine's resolver, none where it has none."""
    try:
        return domains_in(Path("/etc/resolv.conf").read_text())
    except (OSError, UnicodeDecodeError):
        return []


def domains_in(text: str) -> list[str]:
    """Return the domains that a resolv.conf names."""
    lines = [line.split() for line in text.splitlines()]
    return [
        domain.strip(".").lower()
        for line in lines
        if line[:1] in (["search"], ["domain"])
        for domain in line[1:]
    ]


def _is_own(host: str | None, names: frozenset[str]) -> bool:
    """Tell whether a Host header is an address or one of `names`; no browser leaves it out."""
    if host is None:
        return True
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name in names or name.endswith(".localhost")
    return True


def _check_json(body: bytearray) -> web.Response | None:
    """Return the refusal of what is not a JSON object: the engine takes that for a fault of its own."""
    try:
        loads(bytes(body), limit=MAX_BODY, what="The request", values=MAX_VALUES, depth=MAX_DEPTH)
    except RemoteProtocolError as problem:
        return refusal(400, "invalid_json", problem.message)
    return None


def _too_large() -> web.Response:
    answer = refusal(413, "too_large", f"A request has at most {MAX_BODY} bytes.")
    answer.force_close()
    return answer


def _draining() -> web.Response:
    return refusal(503, "draining", "The group is stopping.", **{"Retry-After": RETRY_AFTER})
