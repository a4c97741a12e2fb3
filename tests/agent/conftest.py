"""Agents for the tests of their room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.agent.world import Agent, Peer, drive


@pytest.fixture
def new_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Return a maker of agents that are stopped at the end of the test."""
    with ExitStack() as stack:

        def make(name: str = "node", **options: Any) -> Agent:
            return stack.enter_context(Agent(tmp_path / name, **options))

        yield make


@pytest.fixture
def agent(new_agent: Callable[..., Agent]) -> Agent:
    """Return a running, unpaired agent."""
    return new_agent().start()


@pytest.fixture
def controller() -> Peer:
    """Return somebody who may become a controller."""
    return Peer(1, "workstation")


@pytest.fixture
def paired(new_agent: Callable[..., Agent], controller: Peer) -> Agent:
    """Return a running agent that obeys `controller`."""
    agent = new_agent().start("--accept-first")
    drive(controller.pair(agent, None))
    return agent
