"""A peer: meets rank zero, comes by its bytes, runs its part of the engine, and ends with its group."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any, Final

from flare.engines.discovery import EngineInstall, find_engine, installed_engines
from flare.errors import EngineError, FlareError, RankError, RemoteProtocolError, UnreachableError
from flare.printable import printable
from flare.rank.bootstrap import MAX_METADATA, Offer, obtain
from flare.rank.capacity import Agreement, device_capacity
from flare.rank.engine_process import EngineProcess, engine_environment, program_name
from flare.rank.engines.base import EngineAdapter, RankContext
from flare.rank.hello import PeerFacts, words_of
from flare.rank.join import join
from flare.rank.launch import (
    Failure,
    RunRequest,
    StopSignals,
    adapter_for,
    check_index,
    check_unchanged,
    default_threads,
    first_of,
    show_lines,
    verify_stored,
    watch_engine,
)
from flare.rank.lifecycle import Lifecycle, Phase
from flare.rank.link import Link
from flare.rank.model_cache import Found
from flare.rank.proof import Purpose
from flare.rank.routes import Route, connector, own_endpoints, plan, read_offered
from flare.rank.sockets import show
from flare.rank.tunnel import TunnelPeer
from flare.strict_json import Reader
from flare.system import free_port
from flare.version import VERSION

ANSWER_LIMIT: Final = 60.0
"""Seconds for rank zero to answer a question."""
AGREEMENT_LIMIT: Final = 7200.0
"""Seconds for all other ranks to be ready: one may receive 200 GB over a slow link."""
LOADING_LIMIT: Final = 3600.0
"""As rank zero's: the engine's loading."""
ENGINE_START_LIMIT: Final = 60.0
"""Seconds for this rank's engine to listen."""
MAX_UNREAD: Final = 16
"""Messages of rank zero that nobody read yet: it says five to a peer in all, and each once."""
LEAVE_LIMIT: Final = 5.0
"""Seconds for rank zero to react when this rank asks it to drain before the group serves."""


class PeerRank:
    """One run of a peer.

    Args:
        request: what was asked for; its rendezvous is set.
        lifecycle: tells the phases.
        signals: SIGTERM and Ctrl-C.
    """

    def __init__(self, request: RunRequest, lifecycle: Lifecycle, signals: StopSignals) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self._lifecycle = lifecycle
        self._signals = signals
        self._failure = Failure()
        self._stop: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_UNREAD)
        self._link: Link | None = None
        self._engine: EngineProcess | None = None
        self._tunnel: TunnelPeer | None = None
        self._found: Found | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._routes: tuple[Route, ...] = ()

    async def run(self) -> int:
        """Serve until the group ends; return the exit status.

        Raises:
            FlareError: why this rank, or the group, failed.
        """
        try:
            return await self._run()
        except FlareError as problem:
            await self._end(problem)
            if not self._lifecycle.ended:
                self._lifecycle.fail(problem)
            raise
        except BaseException:
            await self._end(RankError("The rank was interrupted."))
            raise

    async def _run(self) -> int:
        work = asyncio.create_task(self._work())
        leaving = asyncio.create_task(self._leave_when_asked())
        try:
            await first_of(work, leaving, self._stop, self._failure.future)
            if not self._stop.done() and not self._failure.future.done():
                if work.done():
                    await work  # raises why it ended; serving itself never returns
                await leaving
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
        if self._stop.done():
            message = self._stop.result()
            if message.get("failed") and not self._signals.requested.is_set():
                raise RankError(f"Rank zero ended the group: {words_of(message)}")
        elif self._failure.future.done():
            raise self._failure.future.result()
        if self._lifecycle.phase is not Phase.DRAINING:
            self._lifecycle.enter(Phase.DRAINING, "the group is stopping")
        await self._end(None)
        self._lifecycle.enter(Phase.STOPPED, "the group has stopped")
        return 0

    def _advance(self, phase: Phase, reason: str) -> None:
        """Enter a phase on the way to serving, unless the group is on its way down already."""
        if self._lifecycle.phase is not Phase.DRAINING:
            self._lifecycle.enter(phase, reason)

    async def _leave_when_asked(self) -> None:
        """On SIGTERM ask rank zero to drain the group; return when this rank shall end by itself."""
        await self._signals.requested.wait()
        serving = self._lifecycle.phase in (Phase.SERVING, Phase.DRAINING)
        self._advance(Phase.DRAINING, f"{self._signals.name} came; rank zero drains the group")
        if self._link is None:
            return
        with contextlib.suppress(FlareError):
            await self._link.send({"type": "leave"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if serving else LEAVE_LIMIT):
                await self._signals.hurry.wait()

    # -- the way to serving ----------------------------------------------------------------------------

    async def _work(self) -> None:
        request, lifecycle = self._request, self._lifecycle
        assert request.rendezvous is not None, "a peer has a rendezvous"
        host, port = request.rendezvous
        self._advance(Phase.RESOLVING, f"rank {request.rank} of the group at {show((host, port))}")
        engines = installed_engines(request.settings, request.paths)
        self._advance(Phase.RENDEZVOUS, f"going to rank zero at {show((host, port))}")
        facts = PeerFacts(request.expect_index, request.ranks, VERSION, engines)
        self._link, welcome = await join(
            host,
            port,
            rank=request.rank,
            key=request.proof_key,
            facts=facts,
            remark=lifecycle.remark,
            seconds=request.meeting_seconds,
            launched=request.launched,
        )
        self._tasks.append(asyncio.create_task(self._read(self._link)))
        offer = Offer.from_message(welcome)
        adapter = adapter_for(offer.engine)
        install = find_engine(offer.engine, request.settings, request.paths, request.environment)
        self._check_engine(install, welcome)
        own = await asyncio.to_thread(own_endpoints, request.settings.fabric_interfaces)
        self._routes = plan(own, read_offered(welcome), request.rendezvous)
        self._advance(Phase.RECEIVING, f"the core {printable(offer.model)} from rank zero")
        found = await obtain(
            offer,
            ask=self._ask_for_metadata,
            report=self._report_progress,
            rank=request.rank,
            root=request.cache,
            accepted=request.accepted,
            connect=connector(self._routes, Purpose.RANGES, request.rank, request.proof_key),
            streams=request.streams,
            remark=lifecycle.remark,
        )
        self._found = found
        index = found.primary.index
        check_index(index, request)
        adapter.check(found.primary)
        self._advance(Phase.VERIFYING, f"rank {request.rank}'s bytes in {found.primary.root}")
        always = request.options.verify_weights or not found.verified
        with lifecycle.reading(found.primary.root):
            verdict, before = await verify_stored(
                found.primary, request.rank, always=always, cache=request.cache, remark=lifecycle.remark
            )
        self._advance(Phase.AGREEING, verdict)
        capacity = device_capacity(
            index, request.rank, request.options.memory_limit, environment=request.environment
        )
        await self._link.send({"type": "ready", "capacity": capacity})
        agreed = await self._expect("agreed", AGREEMENT_LIMIT, "the other ranks to be ready")
        agreement = Agreement(agreed.count("context_length"), agreed.count("slots"), agreed.count("capacity"))
        await self._load(found, adapter, install, agreement)
        serving = await self._expect("serving", LOADING_LIMIT, "rank zero's engine to be ready")
        with lifecycle.reading(found.primary.root):
            check_unchanged(found.primary, request.rank, before)
        self._advance(Phase.SERVING, f"holds {printable(serving.text('holds', limit=4000))} for rank zero")
        await asyncio.get_running_loop().create_future()  # until the group ends

    def _check_engine(self, install: EngineInstall, welcome: Reader) -> None:
        """Refuse two builds that are known to differ: their RPC protocols may, and then one aborts."""
        theirs = welcome.text("engine_version", limit=200, default="external")
        if "external" not in (theirs, install.version) and theirs != install.version:
            raise EngineError(
                f"Rank zero runs {install.name} {printable(theirs)}, but this node has {install.version}. "
                f"Run `flare engine install {install.name}` on both nodes with the same flare."
            )

    async def _ask_for_metadata(self) -> bytes:
        assert self._link is not None
        await self._link.send({"type": "want"})
        message = await self._next("metadata", ANSWER_LIMIT, "the core's metadata")
        data: bytes = message["data"]
        return data

    async def _report_progress(self, received: int) -> None:
        assert self._link is not None
        await self._link.send({"type": "progress", "bytes": received})

    async def _load(
        self, found: Found, adapter: EngineAdapter, install: EngineInstall, agreement: Agreement
    ) -> None:
        request = self._request
        assert self._link is not None
        self._advance(
            Phase.LOADING,
            f"{agreement.slots} request(s) of {agreement.context_length} tokens; "
            f"{install.name} {install.version}",
        )
        context = RankContext(
            primary=found.primary,
            rank=request.rank,
            ranks=found.primary.index.ranks,
            install=install,
            options=request.options,
            agreement=agreement,
            port=free_port(),
            served_name=found.primary.index.model,
            threads=default_threads(),
        )
        engine = EngineProcess(program_name(install.peer), show_lines(adapter, self._lifecycle))
        self._engine = engine
        environment = engine_environment(request.environment)
        await engine.start(adapter.command(context), adapter.environment(context, environment))
        self._tasks.append(asyncio.create_task(watch_engine(engine, request.rank, self._failure)))
        await self._wait_for_engine(context.port, engine)
        loop = asyncio.get_running_loop()
        self._tunnel = TunnelPeer(
            connector(self._routes, Purpose.ENGINE, request.rank, request.proof_key),
            context.port,
            lambda problem: self._failure.report_broken(loop, "rank zero", problem),
        )
        self._tunnel.start()
        await self._link.send({"type": "listening"})

    async def _wait_for_engine(self, port: int, engine: EngineProcess) -> None:
        loop = asyncio.get_running_loop()
        limit = time.monotonic() + ENGINE_START_LIMIT
        while time.monotonic() < limit:
            with socket.socket() as probe:
                probe.setblocking(False)
                try:
                    async with asyncio.timeout(2.0):
                        await loop.sock_connect(probe, ("127.0.0.1", port))
                except (OSError, TimeoutError):
                    await asyncio.sleep(0.01)
                else:
                    return
        raise EngineError(f"{engine.name} did not listen within {ENGINE_START_LIMIT:.0f} s.")

    # -- what rank zero says ---------------------------------------------------------------------------

    async def _read(self, link: Link) -> None:
        """Take rank zero's messages as they come; its end is this rank's end."""
        try:
            while True:
                message = await link.receive()
                match message["type"]:
                    case "metadata":
                        length = Reader(message, "Rank zero's metadata").count("length", limit=MAX_METADATA)
                        message["data"] = await link.receive_bulk(length)
                        self._messages.put_nowait(message)
                    case "stop":
                        self._stop.set_result(message)
                        return
                    case "draining":
                        if self._lifecycle.phase is not Phase.DRAINING:
                            self._lifecycle.enter(Phase.DRAINING, "rank zero drains the group")
                    case _:
                        self._messages.put_nowait(message)
        except asyncio.QueueFull:
            self._failure.report(RankError("Rank zero says more than anybody asked for."))
        except UnreachableError as problem:
            self._failure.report(
                RankError(f"Rank zero is gone: {problem.message} No rank outlives its group.")
            )
        except FlareError as problem:
            self._failure.report(problem)

    async def _next(self, wanted: str, seconds: float, waiting_for: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):  # wait_for loses a cancellation when a message comes with it
                message = await self._messages.get()
        except TimeoutError:
            raise RankError(f"After {seconds:.0f} s this rank still waited for {waiting_for}.") from None
        if message["type"] != wanted:
            raise RemoteProtocolError(
                f"Rank zero sent {printable(message['type'][:40])} where {wanted} was due."
            )
        return message

    async def _expect(self, wanted: str, seconds: float, waiting_for: str) -> Reader:
        return Reader(await self._next(wanted, seconds, waiting_for), "Rank zero's message")

    # -- the end -----------------------------------------------------------------------------------------

    async def _end(self, failed: FlareError | None) -> None:
        """End the engine and every connection; rank zero hears why, where it does not know."""
        for task in self._tasks:
            task.cancel()
        link, self._link = self._link, None
        engine, self._engine = self._engine, None
        if failed is None:
            if engine is not None:
                await engine.stop()
        else:
            await asyncio.gather(
                self._say_why(link, failed), *([engine.kill()] if engine is not None else [])
            )
        if self._tunnel is not None:
            self._tunnel.close()
        if link is not None:
            link.close()
        if self._found is not None:
            self._found.lock.release()
            self._found = None

    async def _say_why(self, link: Link | None, failed: FlareError) -> None:
        """Tell rank zero why this rank failed, unless it said so itself."""
        if link is not None and not self._stop.done():
            with contextlib.suppress(FlareError):
                await link.send({"type": "failed", "message": failed.message[:2000]})
