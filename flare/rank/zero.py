"""Rank zero, or a rank that is alone: brings the group up, stands in front of it, and ends it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flare.cores.primary import Primary, check_trust, load_primary
from flare.engines.discovery import EngineInstall, find_engine
from flare.errors import CoreError, FlareError, RankError, UsageError
from flare.rank.api_keys import read_keys
from flare.rank.capacity import Agreement, CacheNeeds, agree, device_capacity
from flare.rank.engine_process import EngineProcess, engine_environment, program_name
from flare.rank.engines.base import EngineAdapter, RankContext
from flare.rank.group import PeerGroup
from flare.rank.launch import (
    CAUSE_LIMIT,
    Failure,
    RunRequest,
    StopSignals,
    adapter_for,
    check_index,
    check_unchanged,
    default_threads,
    engine_help,
    first_of,
    show_lines,
    verify_stored,
    watch_engine,
)
from flare.rank.lifecycle import Lifecycle, Phase
from flare.rank.metrics import MetricsDocument, Serving
from flare.rank.model_cache import FolderLock
from flare.rank.sockets import listen_http, url_of
from flare.system import free_port

if TYPE_CHECKING:
    from flare.rank.front import Front

QUIET_LIMIT: Final = 2.0
"""Seconds for the engine to finish what the front no longer sees, before SIGTERM."""


def _load_front() -> type[Front]:
    from flare.rank.front import Front

    return Front


class ZeroRank:
    """One run of rank zero.

    Args:
        request: what was asked for; its core is set.
        lifecycle: tells the phases.
        signals: SIGTERM and Ctrl-C.
    """

    def __init__(self, request: RunRequest, lifecycle: Lifecycle, signals: StopSignals) -> None:
        self._request = request
        self._lifecycle = lifecycle
        self._signals = signals
        self._failure = Failure()
        self._drain_asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._group: PeerGroup | None = None
        self._front: Front | None = None
        self._opening: asyncio.Task[None] | None = None
        self._engine: EngineProcess | None = None
        self._lock: FolderLock | None = None
        self._help: asyncio.Task[str] | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._holdings: dict[int, list[str]] = {}
        self._url = ""

    async def run(self) -> int:
        """Serve until a signal or a failure ends it; return the exit status.

        Raises:
            FlareError: why the group failed; everything of it has ended.
        """
        try:
            return await self._run()
        except FlareError as problem:
            await self._end(failed=problem)
            if not self._lifecycle.ended:
                self._lifecycle.fail(problem)
            raise
        except BaseException:
            await self._end(failed=RankError("Rank zero was interrupted."))
            raise

    async def _run(self) -> int:
        bring_up = asyncio.create_task(self._bring_up())
        if not await self._until(bring_up):
            bring_up.cancel()
            await asyncio.gather(bring_up, return_exceptions=True)
            self._lifecycle.enter(Phase.DRAINING, f"{self._why_stopping()} before the group served")
            await self._end(failed=None)
            self._lifecycle.enter(Phase.STOPPED, "nothing was running yet")
            return 0
        await bring_up
        forever: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._until(forever)
        return await self._drain()

    async def _until(self, work: asyncio.Future[None]) -> bool:
        """Wait for `work`; return False when the group shall stop first.

        Raises:
            FlareError: something failed first.
        """
        requested = asyncio.create_task(self._signals.requested.wait())
        try:
            await first_of(work, requested, self._failure.future, self._drain_asked)
        finally:
            requested.cancel()
        if self._failure.future.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise self._failure.future.result()
        return work.done()

    def _why_stopping(self) -> str:
        return self._drain_asked.result() if self._drain_asked.done() else f"{self._signals.name} came"

    # -- bringing it up ------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        request, lifecycle = self._request, self._lifecycle
        assert request.core is not None, "rank zero has a core"
        lifecycle.enter(Phase.RESOLVING, f"the core {request.core}")
        with lifecycle.reading(request.core.parent):
            primary = await asyncio.to_thread(load_primary, request.core)
        adapter, install = self._check(primary)
        index = primary.index
        # Asked while the ranks meet and verify, so that loading need not wait for it.
        self._help = asyncio.create_task(engine_help(install, engine_environment(request.environment)))
        self._lock = FolderLock(primary.root)
        document = MetricsDocument(
            Serving(request.options.served_name or index.model),
            state=lambda: str(lifecycle.phase),
            uptime=lambda: lifecycle.uptime,
        )
        keys = read_keys(request.options.api_key_file)
        listening = await listen_http(request.options.http_host, request.options.http_port)
        self._url = url_of(request.options.http_host, listening[0])
        self._opening = asyncio.create_task(self._open_front(adapter, document, keys, listening))
        warning = request.options.exposure()
        if warning:
            lifecycle.remark(f"warning: {warning}")
        group = None
        if request.rendezvous is not None and index.ranks > 1:
            group = PeerGroup(request, primary, install, lifecycle, self._failure, self._let_go)
            self._group = group
            await group.meet()
        capacities, verdict, before, needs = await self._supply_and_verify(group, primary, adapter)
        lifecycle.enter(Phase.AGREEING, verdict)
        capacities[0] = device_capacity(
            index, 0, request.options.memory_limit, environment=request.environment
        )
        agreement = agree(
            capacities.items(),
            needs,
            context_length=request.options.context_length,
            max_concurrency=request.options.max_concurrency,
        )
        document.serving = Serving(document.serving.model, agreement.tokens, index.decode_weight_bytes)
        await self._load(primary, adapter, install, agreement, document.serving.model)
        with lifecycle.reading(primary.root):
            check_unchanged(primary, 0, before)
        await self._announce(agreement)

    async def _open_front(
        self,
        adapter: EngineAdapter,
        document: MetricsDocument,
        keys: frozenset[bytes],
        listening: Sequence[socket.socket],
    ) -> None:
        """Serve who has connected since the port was taken.

        The HTTP library takes a tenth of a second to load; the ranks meet meanwhile.
        """
        front_class = await asyncio.to_thread(_load_front)
        front = front_class(adapter, document, lambda: str(self._lifecycle.phase), keys, time.monotonic)
        await front.start(self._request.options.http_host, listening)
        self._front = front

    async def _supply_and_verify(
        self, group: PeerGroup | None, primary: Primary, adapter: EngineAdapter
    ) -> tuple[dict[int, int], str, dict[Path, object], CacheNeeds]:
        """Let the peers take their bytes while this rank digests its own; the first failure ends both."""
        request, lifecycle = self._request, self._lifecycle

        async def verify() -> tuple[str, dict[Path, object], CacheNeeds]:
            with lifecycle.reading(primary.root):
                verdict, before = await verify_stored(
                    primary,
                    0,
                    always=request.options.verify_weights,
                    cache=request.cache,
                    remark=lifecycle.remark,
                )
            return verdict, before, await asyncio.to_thread(adapter.needs, primary)

        async def supply() -> dict[int, int]:
            return {} if group is None else await group.supply()

        if group is not None:
            lifecycle.enter(Phase.RECEIVING, "the peers take what they need")
        tasks = verifying, supplying = asyncio.create_task(verify()), asyncio.create_task(supply())
        try:
            while not supplying.done():
                await asyncio.wait(
                    {task for task in tasks if not task.done()}, return_when=asyncio.FIRST_COMPLETED
                )
                if verifying.done():
                    verifying.result()  # our own damage is told while the peers still receive
            capacities = await supplying
            lifecycle.enter(Phase.VERIFYING, f"the core {primary.index.model}")
            return capacities, *await verifying
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, primary: Primary) -> tuple[EngineAdapter, EngineInstall]:
        """Refuse what cannot work before a byte is transferred."""
        request, index = self._request, primary.index
        check_index(index, request)
        check_trust(primary, request.accepted)
        if request.rendezvous is None and index.layout == "multi_host" and index.ranks > 1:
            raise UsageError(
                f"The core {index.model} is made for {index.ranks} ranks. Start rank zero with "
                "--rank 0 --rendezvous ADDRESS:PORT and a peer for each other rank, or use `flare orbit run`."
            )
        if request.ranks is not None and request.rendezvous is not None and request.ranks != index.ranks:
            raise CoreError(
                f"The core {index.model} has {index.ranks} ranks; this launch has {request.ranks}."
            )
        adapter = adapter_for(index.engine)
        adapter.check(primary)
        return adapter, find_engine(index.engine, request.settings, request.paths, request.environment)

    # -- loading -------------------------------------------------------------------------------------

    async def _load(
        self,
        primary: Primary,
        adapter: EngineAdapter,
        install: EngineInstall,
        agreement: Agreement,
        served_name: str,
    ) -> None:
        request = self._request
        self._lifecycle.enter(
            Phase.LOADING,
            f"{agreement.slots} request(s) of {agreement.context_length} tokens; "
            f"{install.name} {install.version}",
        )
        if self._group is not None:
            await self._group.load(agreement)
        environment = engine_environment(request.environment)
        assert self._help is not None
        context = RankContext(
            primary=primary,
            rank=0,
            ranks=primary.index.ranks,
            install=install,
            options=request.options,
            agreement=agreement,
            port=free_port(),
            served_name=served_name,
            threads=default_threads(),
            peers=self._group.ports if self._group is not None else (),
            help_text=await self._help,
        )
        nearly_ready = asyncio.Event()

        def note(line: str) -> None:
            self._note_holding(adapter, line)
            if adapter.nearly_ready(line):
                nearly_ready.set()

        engine = EngineProcess(program_name(install.server), show_lines(adapter, self._lifecycle, note))
        self._engine = engine
        await engine.start(adapter.command(context), adapter.environment(context, environment))
        # An engine dies when a peer does; then that peer is the cause, and its own words come in a moment.
        watching = watch_engine(engine, 0, self._failure, after=CAUSE_LIMIT)
        self._watchers.append(asyncio.create_task(watching))
        assert self._opening is not None
        await self._opening
        from flare.rank.readiness import served_paths, wait_until_ready

        url = f"http://127.0.0.1:{context.port}"
        await wait_until_ready(url + adapter.health_path, nearly_ready)
        paths = await served_paths(url, adapter)
        assert self._front is not None
        self._front.open(context.port, agreement.slots, paths)

    def _note_holding(self, adapter: EngineAdapter, line: str) -> None:
        """Note what a rank holds, where the engine tells it of that rank's port."""
        ports = self._group.ports if self._group is not None else ()
        ranks = {port: rank for rank, port in enumerate(ports, 1)}
        holding = adapter.holding(line)
        if holding is not None and (holding[0] is None or holding[0] in ranks):
            rank = 0 if holding[0] is None else ranks[holding[0]]
            self._holdings.setdefault(rank, []).append(holding[1])

    async def _announce(self, agreement: Agreement) -> None:
        """Say that the group serves, here and on every peer, with what each rank holds."""
        if self._group is not None:
            await self._group.announce(self._holdings)
            own = ", ".join(self._holdings.get(0, ())) or "nothing that the engine tells of"
            self._lifecycle.remark(f"rank 0 holds {own}")
        self._lifecycle.enter(
            Phase.SERVING,
            f"{self._url} answers; up to {agreement.slots} request(s) at once",
            url=self._url,
        )

    def _let_go(self, rank: int, host: str) -> None:
        """Drain the group when a peer was asked to stop; a group that does not serve yet cannot go on."""
        if self._lifecycle.phase not in (Phase.SERVING, Phase.DRAINING):
            self._failure.report(RankError(f"Rank {rank} ({host}) was stopped on its node."))
        elif not self._drain_asked.done():
            self._drain_asked.set_result(f"rank {rank} ({host}) was asked to stop")

    # -- ending it -----------------------------------------------------------------------------------

    async def _drain(self) -> int:
        """Finish what runs, then end everything; return the exit status."""
        assert self._front is not None
        running = self._front.busy
        seconds = self._request.options.drain_seconds
        what = f"{running} request(s) have up to {seconds:g} s" if running else "no request runs"
        self._lifecycle.enter(Phase.DRAINING, f"{self._why_stopping()}; {what}")
        if self._group is not None:
            await self._group.tell({"type": "draining"})
        draining = asyncio.create_task(self._front.drain(seconds))
        hurry = asyncio.create_task(self._signals.hurry.wait())
        await first_of(draining, hurry, self._failure.future)
        hurried = hurry.done()
        drained = draining.done() and draining.result()
        for task in (draining, hurry):
            task.cancel()
        if self._failure.future.done() and not drained:
            raise self._failure.future.result()
        cut = self._front.busy
        if drained:
            await self._wait_until_quiet()
        await self._end(failed=None, now=not drained)
        if cut:
            why = "stopped at once" if hurried else f"{seconds:g} s were over"
            self._lifecycle.enter(Phase.STOPPED, f"{cut} request(s) were cut: {why}")
            return 1
        self._lifecycle.enter(Phase.STOPPED, "every request was finished")
        return 0

    async def _wait_until_quiet(self) -> None:
        """Wait until the engine works on nothing: its SIGTERM does not drain, and can make it hang."""
        assert self._front is not None
        limit = time.monotonic() + QUIET_LIMIT
        while time.monotonic() < limit:
            if not (await self._front.engine_metrics()).processing:
                return
            await asyncio.sleep(0.3)

    async def _end(self, *, failed: FlareError | None, now: bool = False) -> None:
        """End the engine, then the peers, then every connection; nothing of the group is left here."""
        for task in self._watchers:
            task.cancel()
        if self._help is not None:
            self._help.cancel()
            await asyncio.gather(self._help, return_exceptions=True)
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        engine, self._engine = self._engine, None
        group, self._group = self._group, None
        front, self._front = self._front, None

        async def end_engine() -> None:
            if engine is not None:
                await (engine.kill() if failed is not None or now else engine.stop())

        async def end_group() -> None:
            if group is not None:
                await group.end(failed)

        async def end_front() -> None:
            if front is not None:
                await front.close()

        if failed is not None:  # all at once: the peers wait for the word
            await asyncio.gather(end_engine(), end_group(), end_front())
        else:
            await end_engine()
            await end_group()
            await end_front()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
