"""What the controller does with groups that run or ran: list, attach, stop, remove."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from flare.errors import BusyError, FlareError, NotFoundError, UnreachableError
from flare.orbit.client import Answer, Client, common_kind, required
from flare.orbit.follow import RankStream, follow, raise_for_failures
from flare.orbit.orbit_file import edit_orbit_file
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.runs import Run, SavedState, collect_runs, saved_states, select_runs
from flare.orbit.stopping import Stopped, stop_group
from flare.values import dataclass
from flare.wire.messages import Attach, Remove, StatusReply


@dataclass(frozen=True, slots=True)
class Listing:
    """Runs and saved groups of some nodes, and what each node answered."""

    runs: list[Run]
    saved: list[SavedState]
    answers: list[Answer[StatusReply]]

    def to_json(self) -> dict[str, Any]:
        """The listing for scripts; every member is always there, null where nothing is known."""
        references = {entry.definition.name: entry.definition.core for entry in self.saved}
        return {
            "runs": [
                {**run.to_json(), "core_reference": _reference(run, references.get(run.name))}
                for run in self.runs
            ],
            "saved": [{**asdict(entry.definition), "state": entry.state} for entry in self.saved],
            "unreachable": [answer.node.name for answer in self.answers if answer.reply is None],
        }


def _reference(run: Run, saved: str | None) -> str | None:
    """The word CORE of a run, where its saved group still names a file of that name; nodes keep no more."""
    return saved if saved is not None and PurePosixPath(saved).name == run.core else None


async def list_groups(client: Client, nodes: Sequence[NodeEntry]) -> Listing:
    """Ask the nodes for their groups; nodes that do not answer are in `answers`."""
    answers = await client.statuses(nodes)
    runs = collect_runs(answers)
    return Listing(runs, saved_states(client.controller.orbit.groups, runs, answers), answers)


async def attach(client: Client, nodes: Sequence[NodeEntry], selector: str | None) -> None:
    """Follow retained and live output until every chosen rank has ended.

    Args:
        selector: a group's name or launch identifier; None follows every retained run. Of the launches that
            share a name it means those that run, else the newest.

    Raises:
        NotFoundError: there is no such run.
        FlareError: no node answered, or not all did and the run is not on those that did, or none of the
            chosen ranks could be attached to; of the kind that the nodes' errors share, else
            UnreachableError.
        RankError: a followed group failed.
    """
    listing = await list_groups(client, nodes)
    away = warn_unreachable(client, listing.answers)
    matching = [run for run in listing.runs if selector is None or selector in (run.name, run.launch)]
    if not matching and away:
        raise common_kind(list(away.values()), UnreachableError)(
            f"No run{'' if selector is None else f' called {selector}'} was found on the nodes that "
            f"answered; {', '.join(away)} did not."
        )
    matching = select_runs(listing.runs, selector)
    runs = matching if selector is None else _meant_by_a_name(matching)
    if selector is not None and len(runs) < len(matching):
        _tell_which(client, selector, len(matching), runs)
    labels = _labels(runs)
    streams: dict[str, list[RankStream]] = {run.launch: [] for run in runs}
    problems: list[FlareError] = []
    for run in runs:
        for rank in run.ranks:
            try:
                session = await client.open(rank.node)
                await session.request(Attach(run.launch))
            except FlareError as problem:
                where = f"rank {rank.report.rank} of {run.name} on {rank.node.name}"
                client.controller.reporter.warn(f"cannot attach to {where}: {problem.message}")
                problems.append(problem)
                continue
            stream = RankStream.of(rank.report.rank, rank.node, session, group=labels[run.launch])
            streams[run.launch].append(stream)
    following = [stream for of_run in streams.values() for stream in of_run]
    if not following:
        kind = common_kind(problems, UnreachableError)
        again = " Try again when its node answers." if issubclass(kind, UnreachableError) else ""
        raise kind(f"No rank could be attached to.{again}")
    await follow(following, client.controller.reporter)
    for run in runs:
        raise_for_failures(streams[run.launch], run.name)


def _meant_by_a_name(matching: Sequence[Run]) -> list[Run]:
    """Return what runs of the launches that share a name, else the newest; others go by their identifiers."""
    return [run for run in matching if run.running] or list(matching[-1:])


def _tell_which(client: Client, name: str, launches: int, followed: Sequence[Run]) -> None:
    """Say which of the launches of one name are followed."""
    those = ", ".join(f"{run.launch} ({run.state})" for run in followed)
    client.controller.reporter.note(
        f"Of {launches} launches called {name} this follows {those}; `flare orbit ls` lists all, and "
        "`flare orbit attach LAUNCH` follows another one."
    )


def _labels(runs: Sequence[Run]) -> dict[str, str | None]:
    """What stands in front of each run's lines: nothing, its name, or its launch where names repeat."""
    if len(runs) == 1:
        return {runs[0].launch: None}
    names = [run.name for run in runs]
    return {run.launch: run.name if names.count(run.name) == 1 else run.launch for run in runs}


async def stop(
    client: Client, nodes: Sequence[NodeEntry], selector: str | None, *, now: bool
) -> list[Stopped]:
    """Stop the running groups that match, all at the same time, each with rank zero first.

    Args:
        selector: a group's name or launch identifier; None stops every running group on these nodes.
        now: without draining.

    Returns:
        The ranks that were stopped, and how each ended.

    Raises:
        NotFoundError: nothing that matches runs.
        FlareError: some of it may still run; of the kind that the nodes' errors share, else UnreachableError.
    """
    listing = await list_groups(client, nodes)
    away = warn_unreachable(client, listing.answers)
    running = [run for run in listing.runs if run.running]
    chosen = [run for run in running if selector is None or selector in (run.name, run.launch)]
    if not chosen:
        if away:
            raise common_kind(list(away.values()), UnreachableError)(
                f"Nothing to stop was found on the nodes that answered; {', '.join(away)} did not."
            )
        if selector is None:
            raise NotFoundError("No group runs on these nodes.")
        select_runs(listing.runs, selector)  # says which names there are
        raise NotFoundError(f"{selector} has ended already. `flare orbit rm {selector}` clears its history.")
    results: list[list[Stopped] | BaseException] = await asyncio.gather(
        *(
            stop_group(
                client,
                run.name,
                run.launch,
                [(rank.report.rank, rank.node) for rank in run.ranks if rank.running],
                now=now,
            )
            for run in chosen
        ),
        return_exceptions=True,
    )
    _raise_all(results)
    if away and any(run.missing for run in chosen):
        raise common_kind(list(away.values()), UnreachableError)(
            f"Ranks on {', '.join(away)} could not be asked. They stop when they notice that rank zero is "
            "gone; run this again when those nodes answer."
        )
    return [stopped for of_group in results if isinstance(of_group, list) for stopped in of_group]


def _raise_all(results: Sequence[list[Stopped] | BaseException]) -> None:
    """Raise what stopping groups ended in, with the messages of all that could not be stopped."""
    problems = [result for result in results if isinstance(result, FlareError)]
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, FlareError):
            raise result
    if problems:
        kind = common_kind(problems, UnreachableError)
        raise kind("\n".join(problem.message for problem in problems))


async def remove(client: Client, name: str) -> None:
    """Remove a saved group with all its history, or one launch's history alone.

    Args:
        name: a group's name, or a launch identifier.

    Raises:
        UnreachableError: a paired node did not answer; nothing was removed.
        BusyError: a selected rank runs.
        NotFoundError: there is neither a definition nor a run of that name.
    """
    reporter = client.controller.reporter
    nodes = client.controller.orbit.nodes
    answers = await client.statuses(nodes)
    try:
        required(answers, "Removing a group")
    except FlareError as problem:
        raise type(problem)(
            f"{problem.message}\n`flare orbit forget NODE` leaves out a host that is gone for good."
        ) from None
    runs = [run for run in collect_runs(answers) if name in (run.name, run.launch)]
    saved = name in client.controller.orbit.groups
    if not runs and not saved:
        raise NotFoundError(
            f"There is neither a saved group nor a run called {name}. `flare orbit ls` lists them."
        )
    running = [run for run in runs if run.running]
    if running:
        raise BusyError(f"{name} runs ({running[0].launch}). Stop it first: `flare orbit stop {name}`.")
    for run in runs:
        for rank in run.ranks:
            await client.ask(rank.node, Remove(run.launch))
        reporter.say(f"Removed the history of {run.launch}.")
    if saved:
        with edit_orbit_file(client.controller.paths.orbit_file) as edit:
            edit.remove_group(name)
        reporter.say(f"Removed the saved group {name}. Cached cores stay where they are.")


def warn_unreachable(client: Client, answers: Sequence[Answer[StatusReply]]) -> dict[str, FlareError]:
    """Warn of each node that did not answer and return why, by the node's name.

    Raises:
        FlareError: none did; of the kind that their errors share, else UnreachableError.
    """
    away = {answer.node.name: answer.error for answer in answers if answer.error is not None}
    if away and len(away) == len(answers):
        lines = "\n".join(f"  {error.message}" for error in away.values())
        raise common_kind(list(away.values()), UnreachableError)(f"No node answered:\n{lines}")
    for error in away.values():
        client.controller.reporter.warn(error.message)
    return away
