"""The agent with the real rank and the real engine: serves, is measured, leaves nothing when killed."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flare.cores.export import export_core
from flare.cores.primary import Primary, load_primary
from flare.wire import messages
from flare.wire.messages import Metrics, Status, Stop
from tests.agent.world import (
    PROFILE,
    PUBLISHER,
    Agent,
    Peer,
    cpu_of,
    descendants_of,
    drive,
    is_alive,
    local_source,
)
from tests.agent.world import wait_for as wait_until

SERVING_TIMEOUT = 90.0  # seconds for the engine to load on a machine that is busy with other tests

pytestmark = pytest.mark.engine


@pytest.fixture
def serving_agent(
    new_agent: Callable[..., Agent], controller: Peer, engine_data: Path, smollm: Path, tmp_path: Path
) -> tuple[Agent, Primary]:
    """An agent that obeys `controller` and finds the engine, and a core for it."""
    (tmp_path / "source").mkdir()
    source = shutil.copy(smollm, tmp_path / "source" / "tiny.gguf")
    path = export_core(
        Path(source), tmp_path / "core", revision="cpu", layout="single_host", publisher=PUBLISHER
    )
    agent = new_agent(real=True, environment={"XDG_DATA_HOME": str(engine_data)}).start("--accept-first")
    drive(controller.pair(agent, None))
    return agent, load_primary(path)


def run_request(controller: Peer, agent: Agent, primary: Primary) -> messages.Run:
    assert primary.path is not None
    good = controller.grant(agent)
    package = replace(
        good.package,
        export=primary.index.export.hex(),
        length=primary.size,
        files=(primary.path.name, *(file.path for file in primary.index.files)),
        source=local_source(agent, primary.path),
        index_sha256=primary.index_sha256.hex(),
        publisher=PROFILE.fingerprint,
    )
    return controller.run_request(
        agent,
        rank=0,
        members=(replace(good.members[1], rank=0, gpus=(cpu_of(agent),)),),
        single_host=True,
        rendezvous=None,
        package=package,
        serving=("--threads", "1", "--context-length", "256"),
        rank_zero=("--port", "0"),
    )


async def until_serving(controller: Peer, agent: Agent) -> messages.GroupReport:
    async with asyncio.timeout(SERVING_TIMEOUT):
        while True:
            [group] = (await controller.ask(agent, Status())).groups
            assert group.state == "running", group
            if group.phase == "serving":
                return group
            await asyncio.sleep(0.2)


async def document_of(controller: Peer, agent: Agent) -> Mapping[str, Any]:
    async with asyncio.timeout(20):
        while True:
            document = (await controller.ask(agent, Metrics())).groups[0].document
            if document is not None:
                return cast(Mapping[str, Any], document)
            await asyncio.sleep(0.2)


def test_serves_is_measured_and_drains(serving_agent: tuple[Agent, Primary], controller: Peer) -> None:
    agent, primary = serving_agent

    async def scenario() -> None:
        async with controller.session(agent) as session:
            await session.request(run_request(controller, agent, primary))
            group = await until_serving(controller, agent)
            assert group.url is not None
            assert (await document_of(controller, agent))["state"] == "serving"
            below = descendants_of(agent.process.pid if agent.process else 0)
            async with controller.session(agent) as other:
                await other.request(Stop())
                ended = await other.receive(messages.Exit, timeout=60)
            assert ended.status == 0
            left = set(descendants_of(agent.process.pid if agent.process else 0))
            assert len(left) < len(below)

    drive(scenario(), 180)


def test_killed_agent_takes_rank_and_engine(serving_agent: tuple[Agent, Primary], controller: Peer) -> None:
    agent, primary = serving_agent

    async def scenario() -> None:
        async with controller.session(agent) as session:
            await session.request(run_request(controller, agent, primary))
            await until_serving(controller, agent)

    drive(scenario(), 180)
    assert agent.process is not None
    below = descendants_of(agent.process.pid)
    commands = [Path(f"/proc/{process}/cmdline").read_bytes() for process in below]
    assert any(b"llama-server" in command for command in commands)
    agent.stop(signal.SIGKILL)
    wait_until(lambda: not any(is_alive(process) for process in below), 5, "the end of every process")
