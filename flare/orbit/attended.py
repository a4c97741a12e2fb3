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
    """The operator left, by Ctrl-C or SIGTERM, and was told what became of the group.

    Args:
        number: the signal; the command's exit code is 128 and that.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


async def run_attended(client: Client, plan: Plan, spawner: SpawnerHandle | None, *, detach: bool) -> Group:
    """Launch a group and follow it to its end, or return once it runs.

    Ctrl-C while it is launched takes the launch back; later it stops the group; a second one leaves at once.
    SIGTERM takes a launch back, too; a group that is followed goes on without whoever followed it.

    Args:
        detach: return once the ranks run and none of them failed at once.

    Returns:
        The group as it was started.

    Raises:
        OperatorLeftError: Ctrl-C during the launch, or twice; or SIGTERM.
        RankError: a rank failed.
        FlareError: the launch was refused, a connection was lost, or ranks could not be stopped.
    """
    # One set of handlers for all of it: a Ctrl-C between two steps must not leave ranks behind unsaid.
    with _interrupts() as signals:
        group = await _launched(client, plan, spawner, signals)
        if detach and not signals.first.is_set():
            signals.release_sigterm()  # the group is to run without this command anyway
            await check_started(client, group)
        attended = not detach or signals.first.is_set()
        report_started(client, plan, group, attended=attended)
        if attended:
            await follow_group(client, group, signals)
        else:
            for stream in group.streams:
                await stream.session.close()
        return group


async def _launched(client: Client, plan: Plan, spawner: SpawnerHandle | None, signals: _Signals) -> Group:
    reporter = client.controller.reporter
    launching: asyncio.Task[Any] = asyncio.create_task(launch(client, plan, spawner))
    waiting: asyncio.Task[Any] = asyncio.create_task(signals.first.wait())
    leaving: asyncio.Task[Any] = asyncio.create_task(signals.second.wait())
    try:
        await asyncio.wait({launching, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not launching.done():
            launching.cancel()
            await asyncio.wait({launching, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if launching.done() and launching.cancelled():
                reporter.warn(f"Interrupted: {plan.name} was not started.")
                raise OperatorLeftError(signals.number)
            if not launching.done():
                nodes = ", ".join(node.name for node in plan.nodes)
                reporter.warn(
                    f"Left while the launch of {plan.name} was taken back: ranks may run on {nodes}. Look "
                    f"with `flare orbit ls`, end them with `flare orbit stop {plan.name} --now`."
                )
                raise OperatorLeftError(signals.number)
        group: Group = launching.result()
        signals.launched = True
        return group
    finally:
        for task in (launching, waiting, leaving):
            task.cancel()


def report_started(client: Client, plan: Plan, group: Group, *, attended: bool) -> None:
    """Say where the group will serve, that it is not ready yet, and what to do next.

    Args:
        attended: its output follows, and Ctrl-C stops it.
    """
    reporter = client.controller.reporter
    zero = plan.nodes[0].name
    reporter.say(f"Started {group.name} ({group.launch}); it is loading and not ready yet.")
    reporter.say(
        f"  {group.url} on {zero} answers once its output says serving, or {group.url}/health gives 200."
    )
    if is_loopback(plan.request.options.http_host):
        reporter.note(f"Only {zero} itself can reach that address; --host 0.0.0.0 opens it to others.")
    if attended:
        reporter.note("Its output follows. Ctrl-C stops the group; with --detach it runs on by itself.")
    else:
        reporter.note(f"Follow it: flare orbit attach {group.name}    Stop it: flare orbit stop {group.name}")


async def follow_group(client: Client, group: Group, signals: _Signals) -> None:
    """Follow a launched group to its end.

    Args:
        signals: after the first the group is stopped, rank zero first; at the second this returns at once.

    Raises:
        OperatorLeftError: the second came; what remains was told.
        RankError: a rank failed.
        UnreachableError: a connection was lost, or ranks could not be stopped.
    """
    reporter = client.controller.reporter
    following: asyncio.Task[Any] = asyncio.create_task(follow(group.streams, reporter))
    waiting: asyncio.Task[Any] = asyncio.create_task(signals.first.wait())
    leaving: asyncio.Task[Any] = asyncio.create_task(signals.second.wait())
    tidying: asyncio.Task[Any] = asyncio.create_task(end_with_the_first(client, group))
    tasks = [following, waiting, leaving, tidying]
    try:
        await asyncio.wait({following, waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done() and not signals.first.is_set():
            _tell_that_it_runs_on(client, group)
            raise OperatorLeftError(signals.number)
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
                raise OperatorLeftError(signals.number)
            await stopping
        await following
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise_for_failures(group.streams, group.name)


def _what_is_left(group: Group) -> str:
    return ", ".join(
        f"rank {stream.rank} on {stream.node.name}" for stream in group.streams if stream.exit is None
    )


def _tell_that_it_runs_on(client: Client, group: Group) -> None:
    client.controller.reporter.warn(
        f"Terminated: {group.name} runs on ({_what_is_left(group)}). Follow it with "
        f"`flare orbit attach {group.name}`, end it with `flare orbit stop {group.name}`."
    )


def _tell_what_remains(client: Client, group: Group) -> None:
    client.controller.reporter.warn(
        f"Left while {_what_is_left(group)} may still run. Look with `flare orbit ls`, "
        f"end it with `flare orbit stop {group.name} --now`."
    )


class _Signals:
    """What Ctrl-C and SIGTERM ask for.

    Attributes:
        first: Ctrl-C once, or SIGTERM during the launch: take back or stop what runs.
        second: Ctrl-C again, or SIGTERM later: leave at once.
        number: the signal that came last.
        launched: whether all ranks were started.
    """

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.number: int = signal.SIGINT
        self.launched = False

    def interrupted(self) -> None:
        self.number = signal.SIGINT
        (self.second if self.first.is_set() else self.first).set()

    def terminated(self) -> None:
        self.number = signal.SIGTERM
        (self.second if self.launched or self.first.is_set() else self.first).set()

    def release_sigterm(self) -> None:
        """Let SIGTERM end the command as it does by default."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


@contextmanager
def _interrupts() -> Iterator[_Signals]:
    """Watch for Ctrl-C and SIGTERM while the block runs; other signals end the command, not the group."""
    signals = _Signals()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, signals.interrupted)
    loop.add_signal_handler(signal.SIGTERM, signals.terminated)
    try:
        yield signals
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
