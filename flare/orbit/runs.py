"""What the nodes' STATUS replies say about groups, put together: one run for each launch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flare.errors import NotFoundError
from flare.orbit.client import Answer
from flare.orbit.fronts import reported_url
from flare.orbit.orbit_records import GroupDefinition, NodeEntry
from flare.values import dataclass
from flare.wire.messages import GroupReport, StatusReply

RUNNING = "running"
_LAUNCH_TIME = re.compile(r"-(\d{8}T\d{6}Z)-[0-9a-f]+\Z")  # as new_launch_id writes it


@dataclass(frozen=True, slots=True)
class RankRun:
    """One rank where it runs or ran; `devices` are the indices of its GPUs on the node."""

    node: NodeEntry
    report: GroupReport
    devices: tuple[int, ...]

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.report.state == RUNNING


@dataclass(frozen=True, slots=True)
class Run:
    """One launch with the ranks that answered, in rank order."""

    launch: str
    name: str
    core: str
    ranks: tuple[RankRun, ...]
    size: int

    @property
    def running(self) -> bool:
        """Whether any rank's process is there."""
        return any(rank.running for rank in self.ranks)

    @property
    def state(self) -> str:
        """ "running" while any rank runs, "failed" when one failed, else "exited"."""
        if self.running:
            return RUNNING
        return "failed" if any(rank.report.state == "failed" for rank in self.ranks) else "exited"

    @property
    def phase(self) -> str | None:
        """Rank zero's phase, or the first seen rank's while rank zero's node is away."""
        return self.ranks[0].report.phase

    @property
    def uptime(self) -> float:
        """Seconds since its first rank started."""
        return max(rank.report.uptime for rank in self.ranks)

    @property
    def url(self) -> str | None:
        """Where it serves, as clients reach it."""
        return next(
            (
                reported_url(rank.report, rank.node)
                for rank in self.ranks
                if rank.report.url and rank.report.state == RUNNING
            ),
            None,
        )

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that no answering node knows."""
        seen = {rank.report.rank for rank in self.ranks}
        return tuple(rank for rank in range(self.size) if rank not in seen)

    def to_json(self) -> dict[str, Any]:
        """The run for scripts."""
        return {
            "launch": self.launch,
            "name": self.name,
            "core": self.core,
            "state": self.state,
            "phase": self.phase,
            "uptime": self.uptime,
            "url": self.url,
            "missing_ranks": list(self.missing),
            "ranks": [
                {
                    "rank": rank.report.rank,
                    "node": rank.node.name,
                    "devices": list(rank.devices),
                    "gpus": list(rank.report.gpus),
                    "state": rank.report.state,
                    "phase": rank.report.phase,
                    "status": rank.report.status,
                    "signal": rank.report.signal,
                    "reason": rank.report.reason,
                    "remark": rank.report.remark,
                    "pid": rank.report.pid,
                }
                for rank in self.ranks
            ],
        }


def report_of(launch: str, rank: int, answer: Answer[StatusReply]) -> GroupReport | None:
    """Return what a node says of one rank; None when it does not answer, or does not know it any more."""
    groups = answer.reply.groups if answer.reply is not None else ()
    return next((group for group in groups if (group.launch, group.rank) == (launch, rank)), None)


def collect_runs(answers: Sequence[Answer[StatusReply]]) -> list[Run]:
    """Put the nodes' reports together, oldest launch first."""
    found: dict[str, list[RankRun]] = {}
    for answer in answers:
        if answer.reply is None:
            continue
        index_of = {gpu.uuid: gpu.index for gpu in answer.reply.gpus}
        for report in answer.reply.groups:
            devices = tuple(index_of[uuid] for uuid in report.gpus if uuid in index_of)
            found.setdefault(report.launch, []).append(RankRun(answer.node, report, devices))
    runs = []
    for launch, ranks in found.items():
        ranks.sort(key=lambda rank: rank.report.rank)
        first = ranks[0].report
        runs.append(Run(launch, first.name, first.core, tuple(ranks), first.ranks))
    return sorted(runs, key=lambda run: (_launched_at(run.launch), -run.uptime))


def _launched_at(launch: str) -> str:
    """Return the UTC time that a launch's identifier ends with; those without one come first."""
    found = _LAUNCH_TIME.search(launch)
    return found[1] if found is not None else ""


def select_runs(runs: Sequence[Run], selector: str | None) -> list[Run]:
    """Return the runs of a name or with an exact launch identifier; all of them without a selector.

    Raises:
        NotFoundError: there is none; the message lists what there is.
    """
    chosen = [run for run in runs if selector is None or selector in (run.name, run.launch)]
    if chosen:
        return chosen
    known = ", ".join(sorted({run.name for run in runs}))
    there = f" There: {known}." if known else " Nothing runs or is retained there."
    if selector is None:
        raise NotFoundError(
            "No group runs or is retained on these nodes. Start one with `flare orbit run CORE`."
        )
    raise NotFoundError(
        f"No run is called {selector} on these nodes.{there} `flare orbit ls` shows them all."
    )


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved group and what is known of it: "running", "stopped", or "unknown" while a node is away."""

    definition: GroupDefinition
    state: str


def saved_states(
    groups: Mapping[str, GroupDefinition], runs: Sequence[Run], answers: Sequence[Answer[StatusReply]]
) -> list[SavedState]:
    """Return every saved group that these nodes may run, with its state."""
    asked = {answer.node.name for answer in answers}
    away = {answer.node.name for answer in answers if answer.reply is None}
    running = {run.name for run in runs if run.running}
    found = []
    for group in groups.values():
        candidates = set(group.nodes) or asked
        if not candidates & asked:
            continue
        state = RUNNING if group.name in running else "unknown" if candidates & away else "stopped"
        found.append(SavedState(group, state))
    return found
