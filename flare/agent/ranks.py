"""The only starter and signaller of ranks: who holds which device, what ran, what is retained."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

from flare.agent.run import RankSpec, Run
from flare.errors import BusyError, ConflictError, FlareError, NotFoundError
from flare.printable import printable
from flare.strict_json import canonical
from flare.wire.messages import GroupReport

RETAIN_SECONDS = 300.0  # a successful run's history; failures stay until they are removed
RETAIN_SUCCESSES = 16  # successful runs kept, in launch order
GRANT_WINDOW = 660.0  # seconds: a grant lives 600 and may be issued 60 before our clock
MAX_REMEMBERED = 4096  # launch identifiers; each lives at most a grant's window
RETAIN_FULL_FAILURES = 256  # failed runs are never dropped, but only the newest keep all of their output
FAILURE_TAIL = 4096  # bytes of output that an older failed run keeps: what it said last
MAX_REPORTED = 1024  # runs; more than a person looks at
MAX_REPORTS = 1024 * 1024  # bytes without their reasons, of the 4 MiB that STATUS has
MAX_REASONS = 1024 * 1024  # bytes of reasons, as much again; the rest is for devices and cores
SHUTDOWN_GRACE = 10.0  # seconds for ranks to end by themselves when the agent ends


class Ranks:
    """Every run of this node, running or retained.

    Args:
        clock: monotonic seconds; supervision never reads the wall clock.
        wall_clock: Unix seconds; grants carry those.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._runs: dict[str, Run] = {}
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._stopped: OrderedDict[str, float] = OrderedDict()
        self._closing = False

    # -- starting --------------------------------------------------------------------------------

    def check_unseen(self, launch: str) -> None:
        """Refuse a launch that was started or stopped here before.

        Raises:
            ConflictError: it was.
        """
        self._forget_expired()
        if launch in self._seen or launch in self._runs:
            raise ConflictError(
                f"The launch {launch} was started on this node before. Launch the group again."
            )
        if launch in self._stopped:
            raise ConflictError(f"The launch {launch} was stopped before it started here.")

    def reserve(self, spec: RankSpec, known_gpus: Iterable[str]) -> Run:
        """Take the launch identifier and the devices in one step; of two that ask, exactly one wins.

        There is no await in here, and there must never be one.

        Args:
            spec: what is to run.
            known_gpus: UUIDs of this node's devices.

        Raises:
            ConflictError: the launch was seen before.
            NotFoundError: the node has no such device.
            BusyError: a running group holds a device or the rendezvous port, or the agent is ending.
        """
        if self._closing:
            raise BusyError("This node's agent is stopping. Launch the group again when it is back.")
        self.check_unseen(spec.launch)
        missing = sorted(set(spec.gpus) - set(known_gpus))
        if missing:
            raise NotFoundError(f"This node has no GPU {missing[0]}. Ask for its status and place again.")
        for run in self._runs.values():
            if not run.running:
                continue
            if not spec.gpus or not run.spec.gpus:
                whole = "the whole node" if not run.spec.gpus else "a GPU of this node"
                raise BusyError(
                    f"The group {run.spec.name} ({run.spec.launch}) holds {whole}. "
                    "Stop it first, or name GPUs that are free."
                )
            # Two launches may have been offered the same port, since their ranks bind it only later.
            if spec.rendezvous_port is not None and spec.rendezvous_port == run.spec.rendezvous_port:
                raise BusyError(
                    f"The group {run.spec.name} ({run.spec.launch}) has the rendezvous port "
                    f"{spec.rendezvous_port} of this node. Launch the group again: it gets another port."
                )
            for gpu in spec.gpus:
                if gpu in run.spec.gpus:
                    raise BusyError(
                        f"The group {run.spec.name} ({run.spec.launch}) holds the GPU {gpu}. "
                        "Stop it first, or choose another GPU."
                    )
        run = Run(spec, self._clock)
        self._runs[spec.launch] = run
        self._remember(self._seen, spec.launch, max(spec.expires, self._wall_clock() + GRANT_WINDOW))
        return run

    async def start(self, run: Run) -> int:
        """Start a reserved run; return its process number.

        Raises:
            RankError: it could not be started; its devices are free again.
        """
        try:
            return await run.start()
        except FlareError:
            await run.gone.wait()
            self._runs.pop(run.spec.launch, None)
            raise

    def _remember(self, memory: OrderedDict[str, float], launch: str, until: float) -> None:
        memory[launch] = until
        while len(memory) > MAX_REMEMBERED:
            memory.popitem(last=False)

    def _forget_expired(self) -> None:
        now = self._wall_clock()
        for memory in (self._seen, self._stopped):
            for launch in [launch for launch, until in memory.items() if until < now]:
                del memory[launch]

    # -- finding ---------------------------------------------------------------------------------

    def all(self) -> tuple[Run, ...]:
        """Return every run, oldest first, after history that is too old was dropped."""
        self.prune()
        return tuple(self._runs.values())

    def running(self) -> tuple[Run, ...]:
        """Return the runs that hold devices: a process may be left, or memory is not back yet."""
        return tuple(run for run in self._runs.values() if run.running)

    def find(self, selector: str | None, *, running_only: bool) -> Run:
        """Return the one run that a name, a launch identifier, or nothing at all means.

        Args:
            selector: a launch identifier, a group's name, or None for "the only one".
            running_only: whether runs that ended do not count.

        Raises:
            NotFoundError: there is none; for a launch not seen yet this is remembered by `stopped_before`.
            ConflictError: several fit.
        """
        runs = [run for run in self.all() if run.running or not running_only]
        if selector is None:
            found = runs
        else:
            found = [run for run in runs if run.spec.launch == selector]
            found = found or [run for run in runs if run.spec.name == selector]
            # A name means what runs under it now; without that, its last launch.
            alive = [run for run in found if run.running]
            found = alive or found[-1:]
        if not found:
            kind = "running group" if running_only else "group"
            named = f" {printable(selector)}" if selector is not None else ""
            raise NotFoundError(f"There is no {kind}{named} on this node.")
        if len(found) > 1:
            names = ", ".join(f"{run.spec.name} ({run.spec.launch})" for run in found)
            raise ConflictError(
                f"Several groups are on this node: {names}. Name one by its launch identifier."
            )
        return found[0]

    def stopped_before(self, launch: str) -> None:
        """Remember that a launch which is not here yet was stopped: its RUN will be refused."""
        if launch not in self._seen:
            self._remember(self._stopped, launch, self._wall_clock() + GRANT_WINDOW)

    def was_stopped(self, launch: str) -> bool:
        """Tell whether a launch was stopped before it came here; bytes for it are not fetched any more."""
        self._forget_expired()
        return launch in self._stopped

    def holder_of(self, gpu: str) -> str | None:
        """Return the launch of the running group that holds a device, if any."""
        for run in self.running():
            if not run.spec.gpus or gpu in run.spec.gpus:
                return run.spec.launch
        return None

    def reports(self) -> tuple[GroupReport, ...]:
        """Return what STATUS and METRICS say of the runs, oldest first.

        It always fits into them: of too many runs what runs is told and the newest, and of those the oldest
        without their reasons.
        """
        newest = [*reversed(self.all())]
        order = sorted(newest, key=lambda run: not run.running)  # what runs first; else as they were
        room, reason_room = MAX_REPORTS, MAX_REASONS
        told = {}
        for run in order[:MAX_REPORTED]:
            report = _report(run)
            bare = replace(report, reason=None, remark=None)
            size = _size(bare)
            reason_size = _size(report) - size
            if size > room:
                continue
            room -= size
            told[run.spec.launch] = report if reason_size <= reason_room else bare
            reason_room = max(reason_room - reason_size, 0)
        return tuple(told[launch] for launch in self._runs if launch in told)

    # -- ending ----------------------------------------------------------------------------------

    async def stop(self, run: Run, *, now: bool) -> None:
        """Ask a run to end and wait until nothing of it is left, on its devices neither."""
        if run.running:
            if now:
                await run.hurry()
            else:
                run.terminate()
        await run.gone.wait()

    def remove(self, launch: str) -> None:
        """Drop the history of one ended launch.

        Raises:
            NotFoundError: there is no such launch.
            BusyError: it still runs.
        """
        run = self._runs.get(launch)
        if run is None:
            raise NotFoundError(f"There is no launch {launch} on this node.")
        if run.running:
            raise BusyError(f"The launch {launch} still runs. Stop it first.")
        del self._runs[launch]

    def prune(self) -> None:
        """Drop successful runs that ended five minutes ago, and all but the last sixteen.

        Failed runs stay, as the specification has it; of many the older ones keep the end of their output.
        """
        now = self._clock()
        successes = [run for run in self._runs.values() if run.state == "exited"]
        excess = len(successes) - RETAIN_SUCCESSES
        for number, run in enumerate(successes):
            if number < excess or (run.ended is not None and now - run.ended >= RETAIN_SECONDS):
                del self._runs[run.spec.launch]
        failures = [run for run in self._runs.values() if run.state == "failed"]
        for run in failures[:-RETAIN_FULL_FAILURES]:
            run.output.keep_tail(FAILURE_TAIL)

    async def close(self) -> None:
        """End every rank: a chance to drain, then SIGKILL; return when nothing is left."""
        self._closing = True
        runs = self.running()
        for run in runs:
            # Nobody will be given the devices any more, and the unit's TimeoutStopSec has no room for it.
            run.end_without_waiting()
            run.terminate()
        if runs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_GRACE):
                    await asyncio.gather(*(run.gone.wait() for run in runs))
        for run in runs:
            run.kill()
        for run in runs:
            await run.gone.wait()


def _report(run: Run) -> GroupReport:
    return GroupReport(
        launch=run.spec.launch,
        name=run.spec.name,
        core=run.spec.core,
        rank=run.spec.rank,
        ranks=run.spec.ranks,
        gpus=run.spec.gpus,
        pid=run.pid if run.alive else None,
        state=run.state,
        phase=run.phase,
        status=run.status,
        signal=run.signal,
        uptime=run.uptime,
        url=run.url if run.alive else None,  # nobody answers there any more
        reason=run.reason,
        remark=run.remark,
        front=run.spec.front,
    )


def _size(report: GroupReport) -> int:
    """Return the bytes that a report takes in a body, with the comma behind it."""
    return len(canonical(report.to_json())) + 1
