"""A launched group while its operator watches: output, Ctrl-C, and the exit code."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flare.errors import FlareError
from flare.orbit.client import Client
from flare.orbit.follow import follow, raise_for_failures
from flare.orbit.launch import Group, Plan
from flare.orbit.stopping import stop_group


class LeftRunningError(Exception):
    """The operator pressed Ctrl-C twice and left while ranks may still run."""


def report_started(client: Client, plan: Plan, group: Group) -> None:
    """Say where the group will serve, that it is not ready yet, and what to do next."""
    reporter = client.controller.reporter
    zero = plan.nodes[0].name
    reporter.say(f"Started {group.name} ({group.launch}); it is loading and not ready yet.")
    reporter.say(
        f"  {group.url} on {zero} answers once its output says serving, or {group.url}/health gives 200."
    )
    if plan.request.options.http_host in ("127.0.0.1", "::1", "localhost"):
        reporter.note(f"Only {zero} itself can reach that address; --host 0.0.0.0 opens it to others.")
    reporter.note(f"Follow it: flare orbit attach {group.name}    Stop it: flare orbit stop {group.name}")


async def follow_group(client: Client, group: Group) -> None:
    """Follow a launched group to its end. Ctrl-C stops it; a second one leaves at once.

    Raises:
        LeftRunningError: Ctrl-C came twice; what remains was told.
        RankError: a rank failed.
        UnreachableError: a connection was lost, or ranks could not be stopped.
    """
    reporter = client.controller.reporter
    following: asyncio.Task[Any] = asyncio.create_task(follow(group.streams, reporter))
    first, second = asyncio.Event(), asyncio.Event()
    stopping: asyncio.Task[None] | None = None
    with _interrupts(first, second):
        waiting_first: asyncio.Task[Any] = asyncio.create_task(first.wait())
        waiting_second = asyncio.create_task(second.wait())
        try:
            await asyncio.wait({following, waiting_first}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                reporter.note(
                    f"Stopping {group.name}: running requests are finished first. Ctrl-C again leaves at "
                    f"once."
                )
                stopping = asyncio.create_task(stop_group(client, group.name, group.launch, group.members))
                ended = asyncio.ensure_future(asyncio.gather(stopping, following))
                either: set[asyncio.Future[Any]] = {ended, waiting_second}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    _tell_what_remains(client, group)
                    raise LeftRunningError
                await ended
            await following
        finally:
            for task in (following, waiting_first, waiting_second, stopping):
                if task is not None and not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError, FlareError):
                        await task
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
    """Turn SIGINT (and SIGTERM, as a service manager sends it) into the two events while the block runs."""

    def interrupted() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
