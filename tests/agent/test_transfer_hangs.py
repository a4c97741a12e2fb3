"""Transfers whose worker, or whose disk, answers no more: they fail in time, and the agent goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flare.errors import BusyError, TransferError, UnreachableError
from flare.wire.messages import Put, Status
from tests.agent.test_transfer_kills import workers
from tests.agent.transfer_world import MIB, Gate, Push, nothing_left, random_bytes, start, until
from tests.agent.world import Agent, Peer, drive, wait_for
from tests.cores.making import write_packed_core

SIZE = 48 * MIB
STALL = 1  # seconds
SOON = 30.0  # seconds: the limit, its margin, and what a kill and clearing up may take on a busy machine


def settle(agent: Agent) -> None:
    settings = agent.paths.settings_file
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[agent]\nstall_timeout = {STALL}\n")


@pytest.fixture
def pair(new_agent: Callable[..., Agent], controller: Peer) -> tuple[Agent, Agent]:
    """Return two paired agents that wait for a second only."""
    agents = new_agent("source"), new_agent("destination")
    for agent in agents:
        settle(agent)
    start(agents, controller)
    return agents


@pytest.mark.parametrize(
    ("which", "title", "words"),
    [
        (1, "receive", "the worker gave no sign of life for 1 seconds: it was stopped by a signal"),
        (0, "send", "(the connection broke|nothing moved for 1 seconds)"),
    ],
)
@pytest.mark.parametrize("resume", [False, True], ids=["", "resume"])
def test_a_worker_is_stopped(
    pair: tuple[Agent, Agent],
    controller: Peer,
    tmp_path: Path,
    which: int,
    title: str,
    words: str,
    resume: bool,
) -> None:
    push = Push(controller, write_packed_core(tmp_path, random_bytes(SIZE)), pair[0], list(pair))

    async def scenario() -> None:
        async with Gate(pair[0], pace=0.02) as gate:
            push.through = gate.address
            asked = asyncio.create_task(push.ask(pair[1], resume=resume))
            await until(lambda: bool(workers(pair[which], title)) and gate.passed > 2 * MIB)
            stopped = workers(pair[which], title)
            for each in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(TransferError, match=f"Stream [1-4]/4 of .* from hertz .*: {words}"):
                await asked
            assert time.monotonic() - began < SOON
        push.through = None
        if not resume:
            nothing_left(pair[1])
        wait_for(lambda: not set(workers(pair[which], title)).intersection(stopped))
        await push.ask(pair[1], resume=resume)

    drive(scenario())
    push.same(pair[1])


# A disk that does not answer


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of its own that can be frozen."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(512 * MIB)
    folder.mkdir()
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False).returncode:
        pytest.skip("this machine mounts no images")
    try:
        yield folder
    finally:
        thaw(folder)
        subprocess.run(["umount", "--lazy", folder], check=True)


def freeze(folder: Path) -> None:
    subprocess.run(["fsfreeze", "--freeze", folder], check=True)


def thaw(folder: Path) -> None:
    subprocess.run(["fsfreeze", "--unfreeze", folder], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.root
@pytest.mark.parametrize("resume", [False, True], ids=["", "resume"])
def test_the_disk_of_the_cache_hangs(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path, disk: Path, resume: bool
) -> None:
    source = new_agent("source")
    destination = new_agent("destination", environment={"XDG_CACHE_HOME": str(disk / "cache")})
    destination.paths = type(destination.paths).from_environment(destination.environment)
    settle(destination)
    start((source, destination), controller)
    push = Push(controller, write_packed_core(tmp_path, random_bytes(SIZE)), source, [source, destination])

    async def scenario() -> None:
        async with Gate(source, pace=0.02) as gate:
            push.through = gate.address
            asked = asyncio.create_task(push.ask(destination, resume=resume))
            await until(lambda: gate.passed > 8 * MIB)
            freeze(disk)
            began = time.monotonic()
            with pytest.raises(
                TransferError, match=r"from hertz .*: .* The disk of this node's cache does not answer"
            ):
                await asked
            assert time.monotonic() - began < SOON
        # The agent answers, and says what the next transfer has to wait for.
        assert (await controller.ask(destination, Status())).name
        with pytest.raises(BusyError, match="is still being removed: the disk of this node's cache is slow"):
            await push.ask(destination, resume=resume)
        thaw(disk)
        await until(lambda: not workers(destination, "receive"))
        if not resume:  # else what was recorded before is gone on with, now that nobody writes to it
            nothing_left(destination, soon=True)
        push.through = None
        await until_it_is_over(push, destination, resume)

    drive(scenario())
    push.same(destination)


async def until_it_is_over(push: Push, agent: Agent, resume: bool) -> None:
    """Ask for a transfer until an earlier one has cleared up."""
    while True:
        try:
            await push.ask(agent, resume=resume)
        except BusyError:
            await asyncio.sleep(0.1)
        else:
            return


@pytest.mark.root
def test_the_disk_hangs_while_an_upload_comes(
    new_agent: Callable[..., Agent], controller: Peer, disk: Path
) -> None:
    agent = new_agent("node", environment={"XDG_CACHE_HOME": str(disk / "cache")})
    agent.paths = type(agent.paths).from_environment(agent.environment)
    settle(agent)
    start((agent,), controller)
    request = Put(kind="core", name=f"{'ab' * 16}-{SIZE}/x.safetensors", size=SIZE)

    async def scenario() -> None:
        async with controller.session(agent) as session:
            await session.request(request)
            freeze(disk)
            sending = asyncio.create_task(session.send_data(random_bytes(SIZE)))
            await asyncio.sleep(SOON / 2)
            # The agent answers, and does not begin the same file on that disk anew.
            with pytest.raises(BusyError, match="is being given up after a failure"):
                await controller.ask(agent, request)
            assert (await controller.ask(agent, Status())).name
            thaw(disk)
            with pytest.raises(UnreachableError):
                await sending
        nothing_left(agent, soon=True)

    drive(scenario())


@pytest.mark.root
def test_the_disk_hangs_before_many_uploads(
    new_agent: Callable[..., Agent], controller: Peer, disk: Path
) -> None:
    agent = new_agent("node", environment={"XDG_CACHE_HOME": str(disk / "cache")})
    agent.paths = type(agent.paths).from_environment(agent.environment)
    start((agent,), controller)

    async def scenario() -> None:
        freeze(disk)
        asked = [
            asyncio.create_task(
                controller.ask(agent, Put(kind="core", name=f"{number:032x}-{MIB}/x.safetensors", size=MIB))
            )
            for number in range(48)  # more than an event loop has threads of its own
        ]
        await asyncio.sleep(1)
        for _ in range(3):
            began = time.monotonic()
            assert (await controller.ask(agent, Status())).name
            assert time.monotonic() - began < SOON / 2
        assert not any(task.done() for task in asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (await controller.ask(agent, Status())).name
        thaw(disk)
        await asyncio.to_thread(nothing_left, agent, soon=True)

    drive(scenario())
