"""What `flare run` was asked to do, checked, and the small things that both kinds of rank need."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from flare.cores.index import CoreIndex
from flare.cores.primary import AcceptedPublishers, Primary
from flare.cores.verify import verify_core
from flare.engines.discovery import EngineInstall
from flare.errors import EngineError, FlareError, IntegrityError, UnreachableError
from flare.paths import Paths
from flare.rank.engine_process import EngineProcess
from flare.rank.engines.base import EngineAdapter
from flare.rank.engines.llama_cpp import LlamaCpp
from flare.rank.lifecycle import Lifecycle
from flare.rank.model_cache import mark_verified, stamps, verified_before
from flare.rank.proof import INSECURE_KEY
from flare.rank.rendezvous import LAUNCH_LIMIT, MEETING_LIMIT
from flare.rank.sockets import describe, is_unanswered
from flare.serving_options import ServingOptions
from flare.settings import Settings
from flare.system import take_signals
from flare.values import dataclass
from flare_workers.ranges import Ranges

SECOND_SIGNAL_AFTER: Final = 2.0
"""Seconds: the first SIGTERM can come twice, from systemd and from the agent."""
CAUSE_LIMIT: Final = 0.7
"""Seconds after a failure in which its cause may still come from elsewhere."""
VERIFY_LINE_EVERY: Final = 10.0
"""Seconds between two lines about a long verification."""
HELP_LIMIT: Final = 20.0
"""Seconds for an engine to print its help."""

ADAPTERS: Final[dict[str, Callable[[], EngineAdapter]]] = {"llama.cpp": LlamaCpp}


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One `flare run`.

    Args:
        core: the primary's path; None for a peer.
        rank: this rank; 0 also for a rank that is alone.
        ranks: what the starter said; None where it did not.
        rendezvous: (host, port) that rank zero binds or a peer goes to; None for a rank that is alone.
        options: the serving options.
        cache: root of the model cache.
        key: the launch key; None where there is none.
        insecure: other machines may join without a key.
        expect_index: SHA-256 of the index that the starter means; None where it did not say.
        accepted: publishers that are trusted.
        allow_code: also load cores that hold code.
        streams: parallel connections for one file.
        settings, paths, environment: of this process.
    """

    core: Path | None
    rank: int
    ranks: int | None
    rendezvous: tuple[str, int] | None
    options: ServingOptions
    cache: Path
    key: bytes | None = field(repr=False)
    insecure: bool
    expect_index: bytes | None
    accepted: AcceptedPublishers
    allow_code: bool
    streams: int
    settings: Settings
    paths: Paths
    environment: Mapping[str, str] = field(repr=False)

    @property
    def proof_key(self) -> bytes:
        """The key of every proof; a well-known one where the operator gave none."""
        return INSECURE_KEY if self.key is None else self.key

    @property
    def launched(self) -> bool:
        """Whether an agent started this rank, which says how many there are; a person need not."""
        return self.ranks is not None

    @property
    def meeting_seconds(self) -> float:
        """How long ranks wait for each other: those that agents start start all at once."""
        return LAUNCH_LIMIT if self.launched else MEETING_LIMIT


@dataclass(frozen=True, slots=True)
class Accepted:
    """The publishers that this rank trusts.

    Args:
        fingerprints: hex.
    """

    fingerprints: frozenset[str]

    def accepts(self, fingerprint: str) -> bool:
        """Tell whether the publisher with this fingerprint is among them."""
        return fingerprint in self.fingerprints


class StopSignals:
    """SIGTERM and Ctrl-C: the first asks for a drain, one at least two seconds later for an end at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = asyncio.Event()
        self.hurry = asyncio.Event()
        self.name = ""
        self._clock = clock
        self._first = 0.0

    def install(self) -> None:
        """Take the signals over from now on; those that come after the event loop change nothing any more."""
        take_signals(asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self.take)

    def take(self, number: int) -> None:
        """Take one signal."""
        if not self.requested.is_set():
            self.name = signal.Signals(number).name
            self._first = self._clock()
            self.requested.set()
        elif self._clock() - self._first >= SECOND_SIGNAL_AFTER:
            self.hurry.set()


def adapter_for(engine: str) -> EngineAdapter:
    """Return the adapter of a core's engine.

    Raises:
        EngineError: this version of flare has none.
    """
    if engine not in ADAPTERS:
        raise EngineError(
            f"The engine {engine} is not supported on this node: this version of flare runs "
            f"{', '.join(ADAPTERS)}. Choose another core, or export it for one of these engines."
        )
    return ADAPTERS[engine]()


async def engine_help(install: EngineInstall, environment: Mapping[str, str]) -> str:
    """Return what the engine's server prints for --help; empty where it does not end in time.

    Under a keeper, as the engine itself: a program that hangs with children must not outlive this.

    Raises:
        EngineError: it cannot be started at all.
    """
    lines: list[str] = []

    def take(line: str) -> bool:
        lines.append(line)
        return True

    process = EngineProcess(install.server.name, take)
    try:
        await process.start([str(install.server), "--help"], install.environment(environment))
        async with asyncio.timeout(HELP_LIMIT):
            await asyncio.shield(process.exited)
    except TimeoutError:
        return ""
    finally:
        await process.kill()
    return "\n".join(lines)


async def verify_stored(
    primary: Primary, rank: int, *, always: bool, cache: Path, remark: Callable[[str], None]
) -> tuple[str, dict[Path, object]]:
    """Digest what `rank` reads, unless a marker says that it was done.

    Args:
        primary: of the stored core.
        rank: whose bytes.
        always: --verify-weights.
        cache: the model cache; what is digested in it is marked there.
        remark: prints one line; a long verification says how far it is.

    Returns:
        A clause that says what was done, and what the files look like now.

    Raises:
        IntegrityError: a block is not the signed one.
    """
    wanted = primary.index.wanted(rank)
    before = await asyncio.to_thread(stamps, primary, wanted)
    if any(wanted.values()) and not always and await asyncio.to_thread(verified_before, primary, wanted):
        return "the stored data was verified before", dict(before)
    if not any(wanted.values()):
        return "this rank reads no stored bytes", dict(before)
    verdict = await _verify(primary, wanted, remark)
    after = await asyncio.to_thread(stamps, primary, wanted)
    if after != before:
        raise IntegrityError(f"The core {primary.path} changed while it was being verified. Try again.")
    await asyncio.to_thread(mark_verified, primary, wanted, after, cache)
    return verdict, dict(after)


class _AbandonedError(Exception):
    """Ends a verification whose rank has ended."""


async def _verify(primary: Primary, wanted: Mapping[int, Ranges], remark: Callable[[str], None]) -> str:
    loop = asyncio.get_running_loop()
    abandoned = threading.Event()

    def stage(_label: str, total: int) -> Callable[[int], None]:
        done, told = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, told
            if abandoned.is_set():
                raise _AbandonedError
            done += count
            if time.monotonic() - told > VERIFY_LINE_EVERY:
                told = time.monotonic()
                text = f"verified {done / 1e9:.2f} of {total / 1e9:.2f} GB"
                loop.call_soon_threadsafe(remark, text)

        return advance

    work = asyncio.create_task(
        asyncio.to_thread(verify_core, primary, ranges=wanted, progress=stage), name="verify"
    )
    try:
        report = await asyncio.shield(work)
    except asyncio.CancelledError:
        abandoned.set()
        await asyncio.gather(work, return_exceptions=True)
        raise
    return f"{report.blocks} blocks ({report.bytes / 1e6:.1f} MB) are what the publisher signed"


def check_unchanged(primary: Primary, rank: int, before: Mapping[Path, object]) -> None:
    """Refuse to serve from files that were exchanged between their verification and their loading.

    Raises:
        IntegrityError: one was.
    """
    for path, stamp in stamps(primary, primary.index.wanted(rank)).items():
        if before.get(path) != stamp:
            raise IntegrityError(f"{path} changed while the engine loaded it. Verify the core, then retry.")


def default_threads() -> int:
    """Return how many CPUs this process may use."""
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_index(index: CoreIndex, request: RunRequest) -> None:
    """Hold the core against what the starter said of it.

    Raises:
        FlareError: it is another core, has another number of ranks, or brings code along.
    """
    if request.expect_index is not None and index.index_sha256 != request.expect_index:
        raise IntegrityError(
            f"The core {index.model} here is not the one that was launched. Transfer it again."
        )
    index.refuse_code(request.allow_code)


async def first_of(*waiting: asyncio.Future[Any]) -> None:
    """Return when one of these is done."""
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


class Failure:
    """The first thing that went wrong, from wherever it came."""

    def __init__(self) -> None:
        self.future: asyncio.Future[FlareError] = asyncio.get_running_loop().create_future()

    def report(self, problem: FlareError) -> None:
        """Keep `problem` if it is the first one."""
        if not self.future.done():
            self.future.set_result(problem)

    def report_broken(
        self, loop: asyncio.AbstractEventLoop, other: str, problem: FlareError | OSError
    ) -> None:
        """From another thread: report that the engine's connection to another rank broke.

        That is often only the consequence of something worse: where a rank or an engine is gone, whoever
        watches that says so before. When nothing answers there is nothing else to wait for.

        Args:
            other: the rank.
            problem: how it broke.
        """
        why = problem.message if isinstance(problem, FlareError) else f"{describe(problem)}."
        wait = 2 * CAUSE_LIMIT
        if is_unanswered(problem):
            why, wait = f"{why} Is a cable unplugged, or that host down?", 0.0
        broken = UnreachableError(f"The engine's connection to {other} broke: {why}")
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the rank with it
            loop.call_soon_threadsafe(loop.call_later, wait, self.report, broken)


def show_lines(
    adapter: EngineAdapter, lifecycle: Lifecycle, note: Callable[[str], None] = lambda _line: None
) -> Callable[[str], bool]:
    """Return what takes an engine's lines: it shows some, and says which ones an obituary can do without.

    Args:
        note: sees every line first.
    """

    def take(line: str) -> bool:
        note(line)
        shown = adapter.shows(line)
        if shown:
            lifecycle.remark(f"engine: {line}")
        return shown or adapter.trivial(line)

    return take


async def watch_engine(engine: EngineProcess, rank: int, failure: Failure, *, after: float = 0.0) -> None:
    """Report an engine's end as its rank's failure.

    Args:
        after: seconds in which somebody else can tell what caused it.
    """
    await asyncio.shield(engine.exited)
    await asyncio.sleep(after)
    failure.report(EngineError(f"The engine of rank {rank} is gone: {engine.obituary()}"))
