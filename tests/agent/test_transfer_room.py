"""Transfers and the cache's room: what is kept for them, and what a failed one leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flare.errors import StorageError
from tests.agent.test_transfer_failures import a_push, outcome
from tests.agent.transfer_world import MIB, Gate, asking, start
from tests.agent.world import Agent, Peer, drive


def limit(agent: Agent, size: str) -> None:
    """Set the cache's limit, before the agent starts."""
    agent.paths.settings_file.parent.mkdir(parents=True)
    agent.paths.settings_file.write_text(f'[agent]\ncache_limit = "{size}"\n')


def test_two_cores_at_once_do_not_take_the_same_room(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    pair = new_agent("source"), new_agent("destination")
    limit(pair[1], "12MiB")
    start(pair, controller)
    first, second = (a_push(pair, controller, tmp_path / name, 8 * MIB) for name in ("first", "second"))

    async def scenario() -> None:
        async with Gate(pair[0], limit=2 * MIB) as gate:
            first.through = gate.address
            async with asking(first, pair[1]) as session:
                await gate.at_limit.wait()
                with pytest.raises(
                    StorageError, match=r"are kept for other transfers and uploads that run now"
                ):
                    await second.ask(pair[1])
                gate.open()
                assert (await outcome(session)).verified
        await second.ask(pair[1])  # it gave its room back, and is not used any more

    drive(scenario())
    second.same(pair[1])
