"""Processes that are killed in the middle of a transfer: each ends it with a sentence, and cleanly."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flare.errors import FlareError, StorageError, TransferError
from tests.agent.transfer_world import MIB, Gate, Push, fabric_of, nothing_left, random_bytes, start, until
from tests.agent.world import Agent, Peer, descendants_of, drive
from tests.cores.making import write_core, write_packed_core

SIZE = 96 * MIB  # more than sockets hold: who is killed has something to send


def workers(agent: Agent, title: str) -> list[int]:
    """Return an agent's workers whose title begins so."""
    assert agent.process is not None
    found = []
    for process in descendants_of(agent.process.pid):
        try:
            line = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:
            continue
        if line.startswith(f"flare: {title}"):
            found.append(process)
    return found


@pytest.fixture
def pair(new_agent: Callable[..., Agent], controller: Peer) -> tuple[Agent, Agent]:
    """Return two paired agents."""
    agents = new_agent("source"), new_agent("destination")
    start(agents, controller)
    return agents


@pytest.mark.parametrize(
    ("which", "title", "words"),
    [(1, "receive", "the worker process of"), (0, "send", "the connection broke")],
)
def test_a_worker_is_killed(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path, which: int, title: str, words: str
) -> None:
    push = Push(controller, write_packed_core(tmp_path, random_bytes(SIZE)), pair[0], list(pair))

    found: list[int] = []

    def begun() -> bool:
        found[:] = workers(pair[which], title)
        return bool(found)

    async def scenario() -> None:
        async with Gate(pair[0], limit=8 * MIB) as gate:
            push.through = gate.address
            asked = asyncio.create_task(push.ask(pair[1]))
            await gate.at_limit.wait()
            await until(begun)
            os.kill(found[0], signal.SIGKILL)
            await asyncio.sleep(0.1)
            gate.open()
            with pytest.raises(TransferError, match=f"Stream [1-4]/4 of .* from hertz .*: {words}"):
                await asked
        push.through = None
        nothing_left(pair[1])
        await push.ask(pair[1])  # both agents go on

    drive(scenario())
    push.same(pair[1])


def test_a_relay_is_killed(new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path) -> None:
    agents = [new_agent(f"rank{rank}") for rank in range(3)]
    start(agents, controller, listen="0.0.0.0:0")
    fabric = fabric_of(agents, ring=True)
    links = [list(row) for row in fabric.links]
    links[0][2] = links[2][0] = ()
    chain = replace(fabric, ring=False, chain=True, links=tuple(map(tuple, links)))
    path = write_packed_core(tmp_path, bytes(160 * MIB))  # long enough to be met in its middle
    push = Push(controller, path, agents[0], agents, chain)

    async def scenario() -> None:
        asked = asyncio.create_task(push.ask(agents[2], streams=2))
        await until(lambda: bool(workers(agents[2], "receive packed.safetensors 2/2 from hertz")))
        assert workers(agents[1], "relay packed.safetensors from node0 to node2")
        assert workers(agents[0], "send packed.safetensors to node2 over node1")
        agents[1].stop(signal.SIGKILL)
        link = r"link node1 127\.1\.2\.3 -> node2 127\.1\.3\.2, rail 0"
        with pytest.raises(FlareError, match=rf"Stream [12]/2 of .* from hertz over node1 \({link}\): "):
            await asked

    drive(scenario())
    nothing_left(agents[2])
    # Neither end holds on to anything: what was sent went with the relay.
    drive(asyncio.wait_for(until(lambda: not workers(agents[0], "send")), 60))
    link = r"link node0 127\.1\.1\.2 -> node1 127\.1\.2\.1, rail 0"
    assert re.search(rf"Sending packed\.safetensors to node2 over node1 \({link}\): ", agents[0].log())


def test_several_destinations_at_once(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    agents = [new_agent(f"rank{rank}") for rank in range(4)]
    start(agents, controller)
    push = Push(controller, write_packed_core(tmp_path, random_bytes(8 * MIB)), agents[0], agents)

    async def scenario() -> None:
        await asyncio.gather(*(push.ask(agent, streams=16) for agent in agents[1:]))

    drive(scenario())
    for agent in agents[1:]:
        push.same(agent)


def test_somebody_takes_the_cache_away(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    files = {"model/a.gguf": random_bytes(16 * MIB), "model/b.json": b"{}"}
    push = Push(controller, write_core(tmp_path / "core", files), pair[0], list(pair))

    async def scenario() -> None:
        async with Gate(pair[0], limit=4 * MIB) as gate:
            push.through = gate.address
            asked = asyncio.create_task(push.ask(pair[1]))
            await gate.at_limit.wait()
            for file in (pair[1].paths.cache / "arriving").iterdir():
                file.unlink()
            gate.open()
            with pytest.raises(StorageError, match=r"No such file|Cannot"):
                await asked
        push.through = None
        await push.ask(pair[1])

    drive(scenario())
    push.same(pair[1])
