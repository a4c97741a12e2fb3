"""The end of one rank is the end of its group, also of ranks that never met it and so cannot notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from flare.errors import FlareError, RankError
from flare.orbit.client import WATCHED_TIMEOUT, Client
from flare.orbit.follow import RankStream, describe_end
from flare.orbit.launch import Group
from flare.orbit.runs import RUNNING, report_of
from flare.orbit.stopping import BEFORE_THE_MEETING, PEER_GRACE, stop_group
from flare.wire.messages import GroupReport, Status

BEGIN_SECONDS = 10.0  # for the first word of a rank: a fraction of that where the CPUs are idle
START_SECONDS = 2.0  # from there on, for a rank that fails at once
START_POLL = 0.1  # seconds between looks
CAUSE_SECONDS = 0.5  # from the first failure that is seen to a look at all: a consequence may be seen first
NOTICE_SECONDS = 1.0  # for ranks that have met to notice each other's end themselves
LEFT_POLL = 1.0  # seconds between looks at those that are still there
FIRST_PHASE = "resolving"  # rank zero opens the core and binds its HTTP port in it
FAILED = "failed"  # as a phase and as a state


async def check_started(client: Client, group: Group) -> None:
    """Look for a moment whether a rank fails at once, as rank zero does when its HTTP port is taken.

    Returns when all have gone on to work on the core, or after BEGIN_SECONDS and START_SECONDS.

    Raises:
        RankError: one failed; has its reason. The others were stopped.
    """
    limits = dict.fromkeys(range(len(group.streams)), time.monotonic() + BEGIN_SECONDS)
    begun: set[int] = set()
    while limits:
        reports = await _reports(client, group, [group.streams[number] for number in limits])
        now = time.monotonic()
        for number, report in zip(tuple(limits), reports, strict=True):
            if report is not None and report.phase is not None and number not in begun:
                begun.add(number)
                limits[number] = min(limits[number], now + START_SECONDS)
            over = now >= limits[number]
            if report is not None and _has_failed(report, over):
                await _end_at_once(client, group, over)
            # Of one whose node does not answer `flare orbit ls` tells more when it does again.
            if report is None or over or report.phase not in (None, FIRST_PHASE, FAILED):
                del limits[number]
        if limits:
            await asyncio.sleep(START_POLL)


async def _reports(client: Client, group: Group, streams: Sequence[RankStream]) -> list[GroupReport | None]:
    nodes = [stream.node for stream in streams]
    answers = await client.ask_all(nodes, Status(), connect_timeout=WATCHED_TIMEOUT)
    return [
        report_of(group.launch, stream.rank, answer) for stream, answer in zip(streams, answers, strict=True)
    ]


def _has_failed(report: GroupReport, over: bool) -> bool:
    return report.state == FAILED or (report.phase == FAILED and over)


async def _end_at_once(client: Client, group: Group, over: bool) -> None:
    await asyncio.sleep(CAUSE_SECONDS)
    reports = await _reports(client, group, group.streams)
    failed, left = [], []
    for stream, report in zip(group.streams, reports, strict=True):
        if report is not None and _has_failed(report, over):
            end = describe_end(report.status, report.signal, report.reason, report.remark)
            failed.append(f"rank {stream.rank} on {stream.node.name} {end or f'failed: {report.reason}'}")
        else:
            left.append(stream)
    await _stop(client, group, left, f"Stopping the other ranks of {group.name}.")
    raise RankError(
        f"The group {group.name} ended as soon as it was started: "
        + "\n  ".join(failed)
        + f"\n`flare orbit attach {group.name}` shows its output; `flare orbit rm {group.name}` clears it."
    )


async def end_with_the_first(client: Client, group: Group) -> None:
    """Once one rank has ended, see to it that the others end; does not return before it knows.

    Those that have met it notice by themselves, and get PEER_GRACE seconds for it. Those that wait for it
    in vain would wait for a minute: they are told to stop.
    """
    ended = await _first_ended(group.streams)
    if ended is None:
        return
    where = f"rank {ended.rank} on {ended.node.name}"
    limit = time.monotonic() + PEER_GRACE
    await asyncio.sleep(NOTICE_SECONDS)
    while left := [stream for stream in group.streams if not stream.ended.is_set()]:
        over = time.monotonic() >= limit
        reports = await _reports(client, group, left)
        waiting = [
            stream
            for stream, report in zip(left, reports, strict=True)
            if report is not None and report.state == RUNNING and (report.phase or "") in BEFORE_THE_MEETING
        ]
        if over:
            why = f"{where} of {group.name} ended {PEER_GRACE:.0f} s ago: stopping the ranks that are left."
            await _stop(client, group, left, why[0].upper() + why[1:])
            return
        await _stop(
            client, group, waiting, f"{group.name}: {_named(waiting)} will not meet {where}: stopping."
        )
        await asyncio.sleep(LEFT_POLL)


async def _first_ended(streams: Sequence[RankStream]) -> RankStream | None:
    """Wait for the first rank that is known to have ended; None when all connections are lost."""
    tasks = [asyncio.create_task(stream.ended.wait()) for stream in streams]
    try:
        waiting = set(tasks)
        while waiting:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for stream in streams:
                if stream.exit is not None:
                    return stream
        return None
    finally:
        for task in tasks:
            task.cancel()


async def _stop(client: Client, group: Group, streams: Sequence[RankStream], why: str) -> None:
    if not streams:
        return
    client.controller.reporter.note(why)
    members = [(stream.rank, stream.node) for stream in streams]
    try:
        await stop_group(client, group.name, group.launch, members, now=True, announce=False)
    except FlareError as problem:
        client.controller.reporter.warn(problem.message)


def _named(streams: Sequence[RankStream]) -> str:
    return ", ".join(f"rank {stream.rank} on {stream.node.name}" for stream in streams)
