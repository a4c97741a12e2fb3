"""Whole cores and ranks' parts between real agents, over real sockets and real workers."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flare.errors import BusyError
from flare.wire.messages import (
    Have,
    HaveReply,
    Put,
    PutDone,
    PutReply,
    Status,
    TransferProgress,
    TransferReply,
)
from tests.agent.transfer_world import (
    MIB,
    Gate,
    Push,
    asking,
    fabric_of,
    on_disk,
    random_bytes,
    start,
)
from tests.agent.world import Agent, Peer, drive
from tests.cores.making import write_core, write_packed_core


@pytest.fixture
def pair(new_agent: Callable[..., Agent], controller: Peer) -> tuple[Agent, Agent]:
    """Return two paired agents."""
    agents = new_agent("source"), new_agent("destination")
    start(agents, controller)
    return agents


def test_a_whole_core(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    source, destination = pair
    files = {
        "model/weights.gguf": random_bytes(9 * MIB + 4321),
        "model/config.json": b'{"a": 1}',
        "model/empty.txt": b"",
    }
    push = Push(controller, write_core(tmp_path / "core", files), source, [source, destination])

    async def scenario() -> None:
        async with asking(push, destination) as session:
            progress = []
            while True:
                frame = await session.receive(TransferProgress, TransferReply, timeout=60)
                if isinstance(frame, TransferReply):
                    break
                progress.append(frame)
        total = sum(map(len, files.values()))
        assert frame.verified
        assert frame.bytes == total + push.primary.metadata_length
        status = await controller.ask(destination, Status())
        (report,) = status.cores
        assert (report.name, report.verified) == (str(push.entry()), True)
        assert report.index_sha256 == push.package.index_sha256
        assert [file.path for file in report.files] == sorted(push.package.files)

    drive(scenario())
    push.same(destination)


@pytest.mark.parametrize("streams", [1, 3, 64])
def test_a_packed_core(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path, streams: int) -> None:
    source, destination = pair
    path = write_packed_core(tmp_path, random_bytes(12 * MIB + 99))
    push = Push(controller, path, source, [source, destination])
    reply = drive(push.ask(destination, streams=streams))
    assert reply.bytes == path.stat().st_size
    push.same(destination)


def test_a_rank_gets_its_ranges_and_holes_stay_holes(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = pair
    size = 40 * MIB + 5
    ranges = [[0, 2 * MIB, 3 * MIB], [0, 16 * MIB, MIB], [0, 40 * MIB, 5]]
    path = write_core(
        tmp_path / "core",
        {"model/weights.safetensors": random_bytes(size), "model/config.json": b"{}"},
        ranks=2,
        rank_ranges=[None, [*ranges, [1, 0, 2]]],
    )
    push = Push(controller, path, source, [source, destination])
    reply = drive(push.ask(destination, 1, streams=8))
    assert reply.bytes == push.primary.metadata_length + 4 * MIB + 5 + 2
    push.same(destination, 1)
    weights = push.folder(destination, 1) / "model/weights.safetensors"
    assert weights.stat().st_size == size
    assert on_disk(weights) < 5 * MIB
    assert weights.read_bytes()[: 2 * MIB] == bytes(2 * MIB)


def test_a_rank_that_reads_nothing_gets_the_primary(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = pair
    files = {"model/weights.gguf": random_bytes(2 * MIB)}
    path = write_core(tmp_path / "core", files, engine="llama.cpp", ranks=2, rank_ranges=[None, []])
    push = Push(controller, path, source, [source, destination])
    reply = drive(push.ask(destination, 1))
    assert reply.bytes == push.primary.metadata_length
    push.same(destination, 1)
    assert not (push.folder(destination, 1) / "model").exists()


def test_what_is_verified_opens_no_connection(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = pair
    files = {"model/weights.gguf": random_bytes(5 * MIB)}
    push = Push(controller, write_core(tmp_path / "core", files), source, [source, destination])

    async def scenario() -> None:
        async with Gate(source) as gate:
            push.through = gate.address
            await push.ask(destination)
            assert gate.connections == 4
            marker = (push.folder(destination) / ".verified").stat()
            again = await push.ask(destination)
            assert (again.bytes, again.verified) == (0, True)
            assert gate.connections == 4
            assert (push.folder(destination) / ".verified").stat().st_ino == marker.st_ino
            # Without a marker the bytes are digested where they lie.
            (push.folder(destination) / ".verified").unlink()
            third = await push.ask(destination)
            assert (third.bytes, gate.connections) == (0, 4)
            push.same(destination)

    drive(scenario())


def test_a_transfer_and_an_upload_of_one_core_become_one(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    """Whichever begins first brings the file; the other one waits and finds it there."""
    source, destination = pair
    data = random_bytes(24 * MIB)
    push = Push(controller, write_core(tmp_path / "core", {"model/a": data}), source, [source, destination])
    name = f"{push.entry()}/model/a"
    asked = Put("core", name, len(data), upload="ours")

    async def upload_first() -> None:
        async with controller.session(destination) as uploading:
            await uploading.request(replace(asked, ranges=((0, 12 * MIB),)))
            async with asking(push, destination) as session:
                progress = await session.receive(TransferProgress, timeout=60)
                assert progress.waiting
                there = await controller.ask(destination, Have("core", name, len(data)))
                assert there == HaveReply(False, False, arriving=True)
                async with controller.session(destination) as rest:  # the upload goes on meanwhile
                    await rest.request(replace(asked, ranges=((12 * MIB, 12 * MIB),)))
                    await rest.send_data(data[12 * MIB :])
                    await rest.receive(PutDone, timeout=60)
                await uploading.send_data(data[: 12 * MIB])
                await uploading.receive(PutDone, timeout=60)
                while isinstance(
                    frame := await session.receive(TransferProgress, TransferReply, timeout=60),
                    TransferProgress,
                ):
                    pass
                assert frame.verified
                assert frame.bytes == push.primary.metadata_length  # the file was not fetched again

    async def transfer_first() -> None:
        async with Gate(source, limit=8 * MIB) as gate:
            push.through = gate.address
            first = asyncio.create_task(push.ask(destination))
            await gate.at_limit.wait()
            with pytest.raises(BusyError, match=r"fetches the core .* from another one now"):
                await controller.ask(destination, replace(asked, upload=None))
            async with controller.session(destination) as uploading:
                assert await uploading.request(asked) == PutReply(arriving=True)
                gate.open()
                await first
                assert await uploading.request(asked) == PutReply(already=True)

    drive(upload_first())
    push.same(destination)
    shutil.rmtree(push.folder(destination))
    drive(transfer_first())
    push.same(destination)


def test_two_transfers_of_one_core_become_one(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = pair
    files = {"model/weights.gguf": random_bytes(24 * MIB)}
    push = Push(controller, write_core(tmp_path / "core", files), source, [source, destination])

    async def scenario() -> None:
        async with Gate(source, limit=8 * MIB) as gate:
            push.through = gate.address
            first = asyncio.create_task(push.ask(destination))
            await gate.at_limit.wait()
            async with asking(push, destination) as second:
                await second.receive(TransferProgress, timeout=60)  # it has joined: it sees the first one's
                gate.open()
                while isinstance(
                    frame := await second.receive(TransferProgress, TransferReply, timeout=60),
                    TransferProgress,
                ):
                    pass
            assert await first == frame
            assert gate.connections == 4

    drive(scenario())
    push.same(destination)


def test_digest_named_companions_share_their_bytes(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = pair
    payload = random_bytes(3 * MIB + 1)
    name = f"{hashlib.sha256(payload).hexdigest()}.safetensors"
    cores = [
        write_core(tmp_path / label, {name: payload, "model/config.json": label.encode()}, model=label)
        for label in ("one", "two")
    ]
    first, second = (Push(controller, path, source, [source, destination]) for path in cores)
    drive(first.ask(destination))
    reply = drive(second.ask(destination))
    assert reply.bytes == second.primary.metadata_length + 3
    first.same(destination)
    second.same(destination)
    blob = (destination.paths.blobs / name).stat()
    assert blob.st_nlink == 3
    for push in (first, second):
        assert (push.folder(destination) / name).stat().st_ino == blob.st_ino


def test_over_the_fabrics_rails(new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path) -> None:
    agents = [new_agent(f"rank{rank}") for rank in range(2)]
    start(agents, controller, listen="0.0.0.0:0")
    path = write_packed_core(tmp_path, random_bytes(8 * MIB + 1))
    push = Push(controller, path, agents[0], agents, fabric_of(agents, rails=2))
    drive(push.ask(agents[1], streams=4))
    push.same(agents[1])


def test_through_relays_that_store_nothing(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    agents = [new_agent(f"rank{rank}") for rank in range(5)]
    start(agents, controller, listen="0.0.0.0:0")
    path = write_packed_core(tmp_path, random_bytes(16 * MIB + 1))
    push = Push(controller, path, agents[0], agents, fabric_of(agents, ring=True))
    drive(push.ask(agents[2], streams=3))
    push.same(agents[2])
    assert list(agents[1].paths.cores.iterdir()) == []
    assert not list((agents[1].paths.cache / "arriving").iterdir())


def test_a_source_outside_the_group_sends_one_stream(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    source, zero, one = (new_agent(name) for name in ("source", "zero", "one"))
    start((source, zero, one), controller)
    files = {"model/weights.gguf": random_bytes(5 * MIB)}
    push = Push(controller, write_core(tmp_path / "core", files), source, [zero, one])

    async def scenario() -> None:
        async with Gate(source) as gate:
            push.through = gate.address
            await push.ask(zero, streams=8)
            assert gate.connections == 1
        # Rank zero's verified copy is a source, too.
        push.source, push.through = zero, None
        await push.ask(one)

    drive(scenario())
    push.same(zero)
    push.same(one)


def test_what_a_controller_sent_is_a_source(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = pair
    path = write_packed_core(tmp_path, random_bytes(2 * MIB))
    push = Push(controller, path, source, [source, destination], in_place=False)
    folder = push.folder(source)
    folder.mkdir(mode=0o700)
    (folder / path.name).write_bytes(path.read_bytes())
    drive(push.ask(destination))
    push.same(destination)


def test_another_ranks_directory_lends_its_files(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = pair
    files = {"model/weights.safetensors": random_bytes(4 * MIB)}
    path = write_core(tmp_path / "core", files, ranks=2, rank_ranges=[None, [[0, MIB, MIB]]])
    push = Push(controller, path, source, [source, destination])
    drive(push.ask(destination))
    reply = drive(push.ask(destination, 1))
    assert reply.bytes == 0
    push.same(destination, 1)
