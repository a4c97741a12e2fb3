"""Transfers that go on where they were cut off: by a kill, a dead source, or a controller that left.

The rounds of the kill test are a number of the environment: `FLARE_KILL_ROUNDS=50 pytest -k killed_again`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from flare.agent.transfers.journal import HEADER_SIZE, RECORD_SIZE
from flare.errors import FlareError, IntegrityError, TransferError, UnreachableError
from tests.agent.transfer_world import (
    MIB,
    Gate,
    Push,
    asking,
    nothing_left,
    random_bytes,
    start,
    until,
)
from tests.agent.world import Agent, Peer, drive
from tests.cores.making import write_core, write_packed_core

ROUNDS = int(os.environ.get("FLARE_KILL_ROUNDS", "5"))
SIZE = 32 * MIB


@pytest.fixture
def pair(new_agent: Callable[..., Agent], controller: Peer) -> tuple[Agent, Agent]:
    """Return two paired agents; the second one resumes every transfer."""
    source, destination = new_agent("source"), new_agent("destination")
    settings = destination.paths.settings_file
    settings.parent.mkdir(parents=True)
    settings.write_text("[agent]\nresume_transfers = true\n")
    start((source, destination), controller)
    return source, destination


def a_push(pair: tuple[Agent, Agent], controller: Peer, folder: Path, size: int = SIZE) -> Push:
    """Return a push of a directory core with one large file."""
    files = {"model/weights.gguf": random_bytes(size), "model/config.json": b"{}"}
    return Push(controller, write_core(folder / "core", files), pair[0], list(pair))


def recorded(push: Push, agent: Agent) -> int:
    """Return how many bytes the journals of a core say are on the disk."""
    folder = agent.paths.cache / "resuming" / str(push.entry())
    total = 0
    for path in folder.glob("*.journal"):
        records = path.read_bytes()[HEADER_SIZE:]
        for position in range(0, len(records) - RECORD_SIZE + 1, RECORD_SIZE):
            total += struct.unpack_from("<Q", records, position + 8)[0]
    return total


async def cut_at(push: Push, pair: tuple[Agent, Agent], limit: int, how: Callable[[], object]) -> None:
    """Let so many bytes pass and be recorded, then cut the transfer off."""
    async with Gate(pair[0], limit=limit) as gate:
        push.through = gate.address
        async with asking(push, pair[1]):
            await gate.at_limit.wait()
            await until(lambda: recorded(push, pair[1]) > 8 * MIB)
            await asyncio.to_thread(how)
    push.through = None


def test_a_killed_destination_asks_for_the_rest(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path)
    drive(cut_at(push, pair, 20 * MIB, lambda: destination.stop(signal.SIGKILL)))
    assert list(destination.paths.cores.rglob("*.gguf")) == []
    destination.start()
    reply = drive(push.ask(destination))
    assert reply.bytes < SIZE - 8 * MIB
    push.same(destination)
    assert list((destination.paths.cache / "resuming").iterdir()) == []


def test_a_packed_primary_is_resumed(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = Push(controller, write_packed_core(tmp_path, random_bytes(SIZE)), pair[0], list(pair))
    drive(cut_at(push, pair, 20 * MIB, lambda: destination.stop(signal.SIGKILL)))
    destination.start()
    assert drive(push.ask(destination)).bytes < SIZE - 8 * MIB
    push.same(destination)


def test_a_controller_that_left_comes_back(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path)
    drive(cut_at(push, pair, 20 * MIB, lambda: None))
    assert drive(push.ask(destination)).bytes < SIZE - 8 * MIB
    push.same(destination)


def test_a_transfer_may_ask_for_it_itself(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    pair = new_agent("source"), new_agent("destination")
    start(pair, controller)
    push = a_push(pair, controller, tmp_path)

    async def scenario() -> None:
        async with Gate(pair[0], limit=20 * MIB) as gate:
            push.through = gate.address
            asked = asyncio.create_task(push.ask(pair[1], resume=True))
            await gate.at_limit.wait()
            await until(lambda: recorded(push, pair[1]) > 8 * MIB)
            gate.cut()
            with pytest.raises(
                (TransferError, UnreachableError), match=r"Stream [1-4]/4 of model/weights\.gguf from hertz"
            ):
                await asked
        push.through = None
        assert (await push.ask(pair[1], resume=True)).bytes < SIZE - 8 * MIB

    drive(scenario())
    push.same(pair[1])


def test_what_was_left_is_digested_again(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path)
    drive(cut_at(push, pair, 20 * MIB, lambda: destination.stop(signal.SIGKILL)))
    partials = (destination.paths.cache / "resuming").rglob("*.part")
    partial = max(partials, key=lambda path: path.stat().st_size)
    with partial.open("r+b") as file:
        file.write(bytes(MIB))
    destination.start()
    assert drive(push.ask(destination)).bytes >= SIZE
    push.same(destination)
    assert "what an earlier transfer left is damaged" in destination.log()


def test_a_wrong_byte_is_not_resumed(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    push = a_push(pair, controller, tmp_path)
    with (tmp_path / "core/model/weights.gguf").open("r+b") as file:
        file.seek(30 * MIB)
        file.write(b"wrong")
    with pytest.raises(IntegrityError, match="Block 30 of"):
        drive(push.ask(pair[1]))
    nothing_left(pair[1])


def test_killed_again_and_again(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    """Whenever it is killed: what is published is whole and right, and the last try finds all that came."""
    _, destination = pair
    push = a_push(pair, controller, tmp_path)
    chance = random.Random(7)
    original = (tmp_path / "core/model/weights.gguf").read_bytes()

    async def one_round() -> None:
        async with Gate(pair[0], pace=0.004) as gate:
            push.through = gate.address
            try:
                async with asking(push, destination) as session:
                    waiting = asyncio.create_task(session.receive(timeout=60))
                    await asyncio.wait({waiting}, timeout=chance.uniform(0.05, 1.8))
                    await asyncio.to_thread(destination.stop, signal.SIGKILL)
                    waiting.cancel()
                    await asyncio.gather(waiting, return_exceptions=True)
            except (UnreachableError, FlareError):
                pass
        push.through = None

    for _ in range(ROUNDS):
        drive(one_round())
        published = push.folder(destination) / "model/weights.gguf"
        assert not published.exists() or published.read_bytes() == original
        if (push.folder(destination) / ".verified").exists():
            push.same(destination)
        destination.start()
    drive(push.ask(destination))
    push.same(destination)
    assert list((destination.paths.cache / "resuming").iterdir()) == []
    assert list((destination.paths.cache / "arriving").iterdir()) == []
