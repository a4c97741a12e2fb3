"""Transfers that fail: wrong bytes, dead sources, full disks, controllers that leave. Nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flare.agent.transfers.holding import shared_lock
from flare.cores.export import encode_primary
from flare.errors import (
    BusyError,
    ConflictError,
    CoreError,
    IntegrityError,
    NotFoundError,
    StorageError,
    TransferError,
    TrustError,
    UnreachableError,
)
from flare.session import Session
from flare.wire.messages import Controllers, Get, Put, Status, Stop, TransferProgress, TransferReply
from tests.agent.transfer_world import (
    LAUNCH,
    MIB,
    Gate,
    Push,
    asking,
    fabric_of,
    midway,
    nothing_left,
    random_bytes,
    start,
    until,
)
from tests.agent.world import Agent, Peer, descendants_of, drive, wait_for
from tests.cores.making import digest_table, members, write_core, write_packed_core


@pytest.fixture
def pair(new_agent: Callable[..., Agent], controller: Peer) -> tuple[Agent, Agent]:
    """Return two paired agents."""
    agents = new_agent("source"), new_agent("destination")
    start(agents, controller)
    return agents


def a_push(
    pair: tuple[Agent, Agent], controller: Peer, folder: Path, size: int = 16 * MIB, **options: object
) -> Push:
    """Return a push of a directory core with one large file."""
    files = {"model/weights.gguf": random_bytes(size), "model/config.json": b"{}"}
    return Push(controller, write_core(folder / "core", files), pair[0], list(pair))


def flip(path: Path, position: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


async def outcome(session: Session) -> TransferReply:
    """Wait for a transfer's end."""
    while True:
        frame = await session.receive(TransferProgress, TransferReply, timeout=60)
        if isinstance(frame, TransferReply):
            return frame


def busy_workers(agent: Agent) -> list[str]:
    """Return the titles of an agent's workers that carry out a job."""
    assert agent.process is not None
    titles = []
    for process in descendants_of(agent.process.pid):
        try:
            title = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:
            continue
        if title.startswith("flare: ") and title not in ("flare: worker idle", "flare: spawner"):
            titles.append(title)
    return sorted(titles)


def connected_ports(agent: Agent) -> set[int]:
    """Return the ports of those whom an agent still has a connection with."""
    assert agent.process is not None
    found = psutil.Process(agent.process.pid).net_connections("tcp")
    return {each.raddr.port for each in found if each.raddr}


# -- wrong bytes -----------------------------------------------------------------------------------


def test_a_flipped_byte_at_the_source(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path)
    flip(tmp_path / "core/model/weights.gguf", 11 * MIB + 17)
    with pytest.raises(IntegrityError, match=r'Block 11 of "model/weights\.gguf" from hertz is not the one'):
        drive(push.ask(destination))
    nothing_left(destination)
    flip(tmp_path / "core/model/weights.gguf", 11 * MIB + 17)
    drive(push.ask(destination))
    push.same(destination)


def test_a_wrong_byte_removes_what_was_there_before(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path)
    drive(push.ask(destination))
    stored = push.folder(destination) / "model/weights.gguf"
    stored.chmod(0o644)
    flip(stored, 3 * MIB)
    with pytest.raises(IntegrityError, match=r'Block 3 of "model/weights\.gguf" in this node\'s cache'):
        drive(push.ask(destination))
    nothing_left(destination)


@pytest.mark.parametrize("position", ["header", "index", "table"])
def test_a_flipped_byte_in_the_primary(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path, position: str
) -> None:
    _, destination = pair
    path = write_packed_core(tmp_path, random_bytes(3 * MIB))
    push = Push(controller, path, pair[0], list(pair))
    at = {
        "header": 1,
        "index": path.read_bytes().index(b"serving_reserve"),
        "table": push.primary.digests_offset,
    }
    flip(path, at[position])
    with pytest.raises(
        (CoreError, TrustError, IntegrityError), match=r"packed\.safetensors from hertz|digest table"
    ):
        drive(push.ask(destination))
    nothing_left(destination)


def test_a_stored_primary_that_is_damaged(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, MIB)
    drive(push.ask(destination))
    stored = push.folder(destination) / push.package.files[0]
    stored.chmod(0o644)
    flip(stored, push.primary.digests_offset)
    with pytest.raises(IntegrityError, match="is damaged and was removed"):
        drive(push.ask(destination))
    nothing_left(destination)


def test_a_damaged_core_that_a_rank_serves_stays(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, MIB)
    drive(push.ask(destination))
    folder = push.folder(destination)
    stored = folder / push.package.files[0]
    stored.chmod(0o644)
    flip(stored, push.primary.digests_offset)
    with shared_lock(folder), pytest.raises(IntegrityError, match="uses that directory, so it stays"):
        drive(push.ask(destination))
    assert stored.exists()
    assert not (folder / ".verified").exists()
    with pytest.raises(IntegrityError, match="is damaged and was removed"):
        drive(push.ask(destination))
    nothing_left(destination)


def test_another_core_in_the_directory(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, MIB)
    folder = push.folder(destination) / "model"
    folder.mkdir(mode=0o700, parents=True)
    (folder / "config.json").write_text("other")
    with pytest.raises(ConflictError, match=r"holds another file named model/config\.json"):
        drive(push.ask(destination))
    assert (folder / "config.json").read_text() == "other"


def test_another_publishers_primary_gives_way(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, MIB)
    drive(push.ask(destination))
    names = ("model/weights.gguf", "model/config.json")
    files = {name: (tmp_path / "core" / name).read_bytes() for name in names}
    primary = push.folder(destination) / push.package.files[0]
    primary.unlink()
    primary.write_bytes(encode_primary(members(files), digest_table(files), Peer(9).identity))
    assert primary.stat().st_size == push.package.length
    with shared_lock(primary.parent), pytest.raises(BusyError, match="signed by another publisher"):
        drive(push.ask(destination))
    assert drive(push.ask(destination)).bytes == push.primary.metadata_length
    push.same(destination)


def test_another_core_at_the_source(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, MIB)
    files = {"model/weights.gguf": random_bytes(MIB), "model/config.json": b"{}"}
    write_core(tmp_path / "core", files)
    assert push.path.stat().st_size == push.package.length
    with pytest.raises(ConflictError, match="is not the core that the grant names"):
        drive(push.ask(destination))
    nothing_left(destination)


# -- streams that break ----------------------------------------------------------------------------


def test_the_source_is_killed(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    source, destination = pair
    push = a_push(pair, controller, tmp_path, 32 * MIB)

    async def scenario() -> None:
        async with Gate(source, limit=8 * MIB) as gate:
            push.through = gate.address
            asked = asyncio.create_task(push.ask(destination))
            await gate.at_limit.wait()
            titles = [f"flare: receive weights.gguf {number}/4 from hertz" for number in range(1, 5)]
            await until(lambda: busy_workers(destination) == titles)
            await until(lambda: "flare: send weights.gguf to node1" in busy_workers(source))
            source.stop(signal.SIGKILL)
            gate.open()
            with pytest.raises(TransferError, match=r"Stream [1-4]/4 of model/weights\.gguf from hertz"):
                await asked
        assert (await controller.ask(destination, Status())).cores == ()

    drive(scenario())
    nothing_left(destination)
    assert busy_workers(destination) == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_node_whose_spawner_was_killed_says_so(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path, which: int
) -> None:
    push = a_push(pair, controller, tmp_path)
    process = pair[which].process
    assert process is not None
    (spawner,) = psutil.Process(process.pid).children()
    spawner.kill()
    wait_for(lambda: not psutil.pid_exists(spawner.pid), what="collecting it")
    name = drive(controller.ask(pair[which], Status())).name
    sentence = f"Node {name} moves no bytes any more: .* `systemctl --user restart flare-agent`"
    with pytest.raises(TransferError, match=f"from hertz .*: .*{sentence}"):
        drive(push.ask(pair[1]))
    for request in (Get(str(push.path), 0, 9), Put(kind="core", name=f"{push.entry()}/x", size=9)):
        with pytest.raises(TransferError, match=sentence):
            drive(controller.ask(pair[which], request))
    nothing_left(pair[1])
    assert pair[which].stop() == 0


def test_a_stream_that_stalls(new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path) -> None:
    source, destination = new_agent("source"), new_agent("destination")
    settings = destination.paths.settings_file
    settings.parent.mkdir(parents=True)
    settings.write_text("[agent]\nstall_timeout = 1\n")
    start((source, destination), controller)
    push = a_push((source, destination), controller, tmp_path)

    async def scenario() -> None:
        async with Gate(source, limit=4 * MIB) as gate:
            push.through = gate.address
            with pytest.raises(
                TransferError, match=r"Stream [1-4]/4 of .* from hertz \(link .*\): nothing moved for 1 s"
            ):
                await push.ask(destination)

    drive(scenario())
    nothing_left(destination)


def test_the_source_cannot_be_reached(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    source, destination = pair
    push = a_push(pair, controller, tmp_path, MIB)
    source.stop()
    link = r"link hertz 127\.0\.0\.1:\d+ -> node1 127\.0\.0\.1:\d+"
    with pytest.raises(UnreachableError, match=rf"from hertz \({link}\): hertz \(.*\) refused the conn"):
        drive(push.ask(destination))
    nothing_left(destination)


def test_a_fabric_link_that_is_down_is_not_gone_around(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    agents = [new_agent(f"rank{rank}") for rank in range(3)]
    start(agents, controller, listen="0.0.0.0:0")
    path = write_packed_core(tmp_path, random_bytes(MIB))
    push = Push(controller, path, agents[0], agents, fabric_of(agents, ring=True))
    # In a ring of three every way is one hop, so the middle of a chain is what relays.
    fabric = fabric_of(agents, ring=True)
    chain = [list(row) for row in fabric.links]
    chain[0][2] = chain[2][0] = ()
    push.grant = replace(
        push.grant, transfer_fabric=replace(fabric, ring=False, chain=True, links=tuple(map(tuple, chain)))
    )
    drive(push.ask(agents[2]))
    push.same(agents[2])
    agents[0].stop()
    (agents[2].paths.cores / str(push.entry()) / ".verified").unlink()
    for file in push.folder(agents[2]).iterdir():
        file.unlink()
    first = r"link node0 127\.1\.1\.2 -> node1 127\.1\.2\.1, rail 0"
    second = r"link node1 127\.1\.2\.3 -> node2 127\.1\.3\.2, rail 0"
    passing = rf"Passing packed\.safetensors on from node0 to node2 \({first}\): node0 .* refused"
    with pytest.raises(UnreachableError, match=rf"from hertz over node1 \({second}\): .*{passing}"):
        drive(push.ask(agents[2]))
    assert re.search(passing, agents[1].log()), "the relay's log has it, too"
    agents[1].stop()
    with pytest.raises(UnreachableError, match=rf"from hertz over node1 \({second}\): node1 .* refused"):
        drive(push.ask(agents[2]))


def test_the_source_lacks_a_file(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, MIB)
    (tmp_path / "core/model/weights.gguf").unlink()
    with pytest.raises(NotFoundError, match=r"Stream 1/1 of model/weights\.gguf from hertz"):
        drive(push.ask(destination))
    nothing_left(destination)


# -- those who ask ---------------------------------------------------------------------------------


def test_a_controller_that_leaves(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    source, destination = pair
    push = a_push(pair, controller, tmp_path, 32 * MIB)

    async def scenario() -> None:
        async with midway(push, destination) as (gate, session):
            await session.close()
            await until(lambda: not busy_workers(destination) and not busy_workers(source))
            await asyncio.to_thread(nothing_left, destination, soon=True)
            gate.open()
            await push.ask(destination)

    drive(scenario())
    push.same(destination)


def test_one_of_two_that_wait_leaves(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, 32 * MIB)

    async def scenario() -> None:
        async with midway(push, destination) as (gate, first), asking(push, destination) as second:
            await second.receive(TransferProgress, timeout=60)  # it has joined
            port = first.local_address[1]
            await first.close()
            await until(lambda: port not in connected_ports(destination))
            gate.open()
            assert (await outcome(second)).verified

    drive(scenario())
    push.same(destination)


def test_a_launch_that_is_stopped(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, 32 * MIB)

    async def scenario() -> None:
        async with midway(push, destination) as (gate, session):
            with pytest.raises(NotFoundError):
                await controller.ask(destination, Stop(LAUNCH))
            with pytest.raises(ConflictError, match="was stopped while its bytes came"):
                await outcome(session)
            await asyncio.to_thread(nothing_left, destination)  # before the answer, as after any failure
            with pytest.raises(ConflictError, match="was stopped on this node already"):
                await push.ask(destination)
            gate.open()
            push.grant = replace(push.grant, launch="push-20261130T120000Z-0002")
            await push.ask(destination)

    drive(scenario())
    push.same(destination)


def test_another_launch_that_waits_for_the_same_bytes_gets_them(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, 32 * MIB)

    async def scenario() -> None:
        async with midway(push, destination) as (gate, first):
            push.grant = replace(push.grant, launch="push-20261130T120000Z-0002")
            async with asking(push, destination) as second:
                await second.receive(TransferProgress, timeout=60)  # it has joined
                with pytest.raises(NotFoundError):
                    await controller.ask(destination, Stop(LAUNCH))
                with pytest.raises(ConflictError, match="was stopped while its bytes came"):
                    await outcome(first)
                gate.open()
                assert (await outcome(second)).verified

    drive(scenario())
    push.same(destination)


@contextlib.asynccontextmanager
async def of_a_laptop(
    pair: tuple[Agent, Agent], controller: Peer, folder: Path
) -> AsyncIterator[tuple[Gate, Session, Controllers]]:
    """A transfer of a second controller, midway, and what tells an agent that this one was removed."""
    laptop = Peer(2, "laptop")
    both = controller.controllers.with_added(controller.identity, "laptop", laptop.key)
    alone = both.with_removed(controller.identity, "laptop")
    for agent in pair:
        await controller.ask(agent, Controllers(both.after(1)))
    async with midway(a_push(pair, laptop, folder, 32 * MIB), pair[1]) as (gate, session):
        yield gate, session, Controllers(alone.after(2))


def test_a_controller_that_is_removed(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    source, destination = pair

    async def scenario() -> None:
        async with of_a_laptop(pair, controller, tmp_path) as (gate, session, removed):
            # The source alone hears it first: what the removed key allowed ends there.
            await controller.ask(source, removed)
            await until(lambda: not busy_workers(source))
            gate.open()
            with pytest.raises((TransferError, UnreachableError), match="Stream"):
                await outcome(session)
        nothing_left(destination)
        await controller.ask(source, removed)

    drive(scenario())


def test_a_removed_controllers_transfer_ends(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    _, destination = pair

    async def scenario() -> None:
        async with of_a_laptop(pair, controller, tmp_path) as (_, session, removed):
            await controller.ask(destination, removed)
            with pytest.raises(UnreachableError):
                await outcome(session)
            await until(lambda: not busy_workers(destination))

    drive(scenario())
    nothing_left(destination, soon=True)


def test_the_agent_stops_in_the_middle(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    _, destination = pair
    push = a_push(pair, controller, tmp_path, 32 * MIB)

    async def scenario() -> None:
        async with midway(push, destination) as (_, session):
            assert await asyncio.to_thread(destination.stop) == 0
            with pytest.raises(UnreachableError):
                await outcome(session)

    drive(scenario())
    nothing_left(destination)
    assert "Traceback" not in destination.log()


# -- room ------------------------------------------------------------------------------------------


def fill(path: Path) -> None:
    """Take the room of a file system up to its last megabytes, although others take some meanwhile."""
    with path.open("wb") as file:
        for spare in range(2, 64, 2):
            free = os.statvfs(path)
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(free.f_bavail * free.f_frsize - spare * MIB, 1))
                return


@pytest.mark.root
def test_the_disk_fills_in_the_middle(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = new_agent("source"), new_agent("destination")
    cache = destination.paths.cache
    cache.mkdir(parents=True)
    # The agent wants 256 MiB to stay free; somebody else takes them while the transfer is under way.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=310m,mode=0700", "tmpfs", cache], check=True)
    try:
        start((source, destination), controller)
        push = a_push((source, destination), controller, tmp_path, 32 * MIB)

        async def scenario() -> None:
            async with midway(push, destination) as (gate, session):
                fill(cache / "somebody-elses")
                gate.open()
                with pytest.raises(StorageError, match=r"Stream .* bytes of the whole transfer are still"):
                    await outcome(session)

        drive(scenario())
        nothing_left(destination)
        destination.stop()
    finally:
        subprocess.run(["umount", "-l", cache], check=True)


def test_no_room_is_said_before_anything_comes(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = new_agent("source"), new_agent("destination")
    destination.paths.settings_file.parent.mkdir(parents=True)
    destination.paths.settings_file.write_text('[agent]\ncache_limit = "4MiB"\n')
    start((source, destination), controller)
    push = a_push((source, destination), controller, tmp_path, 8 * MIB)
    with pytest.raises(StorageError, match=r"has room for \d+ bytes, but 8388610 are needed"):
        drive(push.ask(destination))
    nothing_left(destination)


def test_what_is_not_used_makes_room(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = new_agent("source"), new_agent("destination")
    destination.paths.settings_file.parent.mkdir(parents=True)
    destination.paths.settings_file.write_text('[agent]\ncache_limit = "20MiB"\n')
    start((source, destination), controller)
    pushes = [
        a_push((source, destination), controller, tmp_path / str(number), 8 * MIB) for number in range(3)
    ]

    async def scenario() -> None:
        for push in pushes[:2]:
            await push.ask(destination)
            await asyncio.sleep(0.05)
        await pushes[2].ask(destination)
        names = {report.name for report in (await controller.ask(destination, Status())).cores}
        assert names == {str(push.entry()) for push in pushes[1:]}

    drive(scenario())
