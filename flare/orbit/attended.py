"""A launched group while its operator watches: output, Ctrl-C, and the exit code."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flare.orbit.client import Client
from flare.orbit.first_end import check_started, end_with_the_first
from flare.orbit.follow import follow, raise_for_failures
from flare.orbit.launch import Group, Plan, launch
from flare.orbit.stopping import stop_group
from flare.serving_options import is_loopback
from flare_workers.spawner import SpawnerHandle


class OperatorLeftError(Exception):
    """The operator pressed Ctrl-C and was told what became of the group; the command's exit code is 130."""


async def run_attended(client: Client, plan: Plan, spawner: SpawnerHandle | None, *, detach: bool) -> Group:
    """Launch a group and follow it to its end, or return once it runs.

    Ctrl-C while it is launched takes the launch back; later it stops the group; a second one leaves at once.

    Args:
        detach: return once the ranks run and none of them failed at once.

    Returns:
        The group as it was started.

    Raises:
        OperatorLeftError: Ctrl-C during the launch, or twice.
        RankError: a rank failed.
        FlareError: the launch was refused, a connection was lost, or ranks could not be stopped.
    """
    first, second = asyncio.Event(), asyncio.Event()
    # One pair of handlers for all of it: a Ctrl-C between two steps must not leave ranks behind unsaid.
    with _interrupts(first, second):
        group = await _launched(client, plan, spawner, first, second)
        if detach and not first.is_set():
            await check_started(client, group)
        report_started(client, plan, group)
        if detach and not first.is_set():
            for stream in group.streams:
                await stream.session.close()
        else:
            await follow_group(client, group, first, second)
        return group


async def _launched(
    client: Client, plan: Plan, spawner: SpawnerHandle | None, first: asyncio.Event, second: asyncio.Event
) -> Group:
    reporter = client.controller.reporter
    launching: asyncio.Task[Any] = asyncio.create_task(launch(client, plan, spawner))
    waiting: asyncio.Task[Any] = asyncio.create_task(first.wait())
    leaving: asyncio.Task[Any] = asyncio.create_task(second.wait())
    try:
        await asyncio.wait({launching, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not launching.done():
            launching.cancel()
            await asyncio.wait({launching, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if launching.done() and launching.cancelled():
                reporter.warn(f"Interrupted: {plan.name} was not started.")
                raise OperatorLeftError
            if not launching.done():
                nodes = ", ".join(node.name for node in plan.nodes)
                reporter.warn(
                    f"Left while the launch of {plan.name} was taken back: ranks may run on {nodes}. Look "
                    f"with `flare orbit ls`, end them with `flare orbit stop {plan.name} --now`."
                )
                raise OperatorLeftError
        group: Group = launching.result()
        return group
    finally:
        for task in (launching, waiting, leaving):
            task.cancel()


def report_started(client: Client, plan: Plan, group: Group) -> None:
    """Say where the group will serve, that it is not ready yet, and what to do next."""
    reporter = client.controller.reporter
    zero = plan.nodes[0].name
    reporter.say(f"Started {group.name} ({group.launch}); it is loading and not ready yet.")
    reporter.say(
        f"  {group.url} on {zero} answers once its output says serving, or {group.url}/health gives 200."
    )
    if is_loopback(plan.request.options.http_host):
        reporter.note(f"Only {zero} itself can reach that address; --host 0.0.0.0 opens it to others.")
    reporter.note(f"Follow it: flare orbit attach {group.name}    Stop it: flare orbit stop {group.name}")


async def follow_group(client: Client, group: Group, first: asyncio.Event, second: asyncio.Event) -> None:
    """Follow a launched group to its end.

    Args:
        first: set by Ctrl-C: the group is stopped, rank zero first.
        second: set by another one: this returns at once.

    Raises:
        OperatorLeftError: `second` was set; what remains was told.
        RankError: a rank failed.
        UnreachableError: a connection was lost, or ranks could not be stopped.
    """
    reporter = client.controller.reporter
    following: asyncio.Task[Any] = asyncio.create_task(follow(group.streams, reporter))
    waiting: asyncio.Task[Any] = asyncio.create_task(first.wait())
    leaving: asyncio.Task[Any] = asyncio.create_task(second.wait())
    tidying: asyncio.Task[Any] = asyncio.create_task(end_with_the_first(client, group))
    tasks = [following, waiting, leaving, tidying]
    try:
        await asyncio.wait({following, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            tidying.cancel()  # who stops a group looks after its peers as well
            reporter.note(
                f"Stopping {group.name}: running requests are finished first. Ctrl-C again leaves at once."
            )
            stopping: asyncio.Task[Any] = asyncio.create_task(
                stop_group(client, group.name, group.launch, group.members, announce=False)
            )
            tasks.append(stopping)
            await asyncio.wait({stopping, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                _tell_what_remains(client, group)
                raise OperatorLeftError
            await stopping
        await following
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise_for_failures(group.streams, group.name)


def _tell_what_remains(client: Client, group: Group) -> None:
    left = [stream for stream in group.streams if stream.exit is None]
    where = ", ".join(f"rank {stream.rank} on {stream.node.name}" for stream in left)
    client.controller.reporter.warn(
        f"Left while {where} may still run. Look with `flare orbit ls`, end it with `flare orbit stop "
        f"{group.name} --now`."
    )


@contextmanager
def _interrupts(first: asyncio.Event, second: asyncio.Event) -> Iterator[None]:
    """Turn Ctrl-C into the two events while the block runs; other signals end the command, not the group."""

    def interrupted() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
