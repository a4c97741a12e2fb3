"""Transfers and the cache's room: what is kept for them, and what a failed one leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flare.cores.marker import read_marker
from flare.errors import FlareError, StorageError, TransferError, UnreachableError
from flare.session import connect
from flare.wire.handshake import PROTOCOL_VERSION
from flare.wire.messages import Hello, Put, Status
from tests.agent.test_transfer_failures import a_push, flip, outcome
from tests.agent.test_transfer_refusals import Asker, a_core, receive
from tests.agent.test_transfer_resume import recorded
from tests.agent.transfer_world import MIB, Gate, Push, asking, nothing_left, random_bytes, start, until
from tests.agent.world import Agent, Peer, drive
from tests.cores.making import write_core, write_packed_core
from tests.workers.test_sink import cached_pages, can_write_directly


@pytest.fixture
def pair(new_agent: Callable[..., Agent], controller: Peer) -> tuple[Agent, Agent]:
    """Return two paired agents."""
    agents = new_agent("source"), new_agent("destination")
    start(agents, controller)
    return agents


async def cut_off(
    push: Push,
    agent: Agent,
    after: int,
    look: Callable[[], None] = lambda: None,
    kept: int = 0,
    **changes: object,
) -> None:
    """Look when so many bytes of a transfer have passed, and let it fail when so many can be resumed."""
    async with Gate(push.source, limit=after) as gate:
        push.through = gate.address
        asked = asyncio.create_task(push.ask(agent, **changes))
        await gate.at_limit.wait()
        look()
        await until(lambda: recorded(push, agent) >= kept)
        gate.cut()
        with pytest.raises((TransferError, UnreachableError)):
            await asked
    push.through = None


def files_of(folder: Path) -> set[str]:
    """Return the paths of a folder's files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


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


@pytest.mark.parametrize("packed", [False, True])
def test_a_complete_directory_never_gets_a_part_of_a_file(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path, packed: bool
) -> None:
    data = random_bytes(12 * MIB)
    if packed:
        path = write_packed_core(tmp_path / "core", data)
    else:
        files = {"model/weights.safetensors": data}
        path = write_core(tmp_path / "core", files, ranks=2, rank_ranges=[None, [[0, MIB, 6 * MIB]]])
    # A packed core's only rank is zero: its directory takes parts as every rank's does.
    push = Push(controller, path, pair[0], list(pair)[:: -1 if packed else 1])
    rank = 0 if packed else 1
    (file,) = push.files(rank)
    part = ((push.primary.data_start(0) + MIB, 6 * MIB),)
    folder = push.folder(pair[1])

    async def scenario() -> None:
        # Verified, although the index gives that rank more: as after a push to it.
        await push.ask(pair[1], rank, files=(replace(file, ranges=part),))
        marked = push.folder(pair[1], rank)
        if packed:
            (marked / ".verified-part").rename(marked / ".verified")

        def look() -> None:
            assert not (folder / file.path).exists()

        await cut_off(push, pair[1], 2 * MIB, look)
        assert not folder.exists()
        assert (await push.ask(pair[1])).bytes < 7 * MIB  # the rest is copied, and checked again

    drive(scenario())
    push.same(pair[1])
    original = tmp_path / "core" / file.path
    assert (folder / file.path).read_bytes() == original.read_bytes()
    assert (push.folder(pair[1], rank) / file.path).stat().st_ino != (folder / file.path).stat().st_ino


def test_what_a_damaged_directory_lends_is_fetched(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    files = {"model/weights.safetensors": random_bytes(8 * MIB)}
    path = write_core(tmp_path / "core", files, ranks=2, rank_ranges=[None, [[0, MIB, 4 * MIB]]])
    push = Push(controller, path, pair[0], list(pair))
    lender = push.folder(pair[1], 1) / "model/weights.safetensors"

    async def scenario() -> None:
        await push.ask(pair[1], 1)
        stamp = lender.stat()
        lender.chmod(0o644)
        flip(lender, 3 * MIB)
        lender.chmod(0o444)
        os.utime(lender, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # its marker still holds
        reply = await push.ask(pair[1])
        assert reply.bytes >= 8 * MIB

    drive(scenario())
    push.same(pair[1])
    assert "another directory's copy is of no use" in pair[1].log()


def test_whole_files_stay_where_others_lie(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    names = [f"model/{letter}.gguf" for letter in "abc"]
    files = {name: random_bytes(4 * MIB) for name in names}
    push = Push(controller, write_core(tmp_path / "core", files), pair[0], list(pair))
    folder = push.folder(pair[1])
    (folder / "model").mkdir(mode=0o700, parents=True)
    (folder / names[0]).write_bytes(files[names[0]])  # as an upload leaves it
    (folder / names[0]).chmod(0o444)

    async def scenario() -> None:
        await cut_off(push, pair[1], 6 * MIB)
        assert files_of(folder) == {*names[:2], ".verified-part"}
        marker = read_marker(folder / ".verified-part")
        assert marker is not None
        assert marker.holds(folder)
        assert set(marker.files) == set(names[:2])
        assert (await push.ask(pair[1])).bytes < 5 * MIB

    drive(scenario())
    push.same(pair[1])


def test_what_another_one_completed_stays(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    push = a_push(pair, controller, tmp_path, 8 * MIB)
    names = {"model/weights.gguf", "model/config.json", push.package.files[0]}
    folder = push.folder(pair[1])

    async def scenario() -> None:
        async with Gate(pair[0], limit=2 * MIB) as gate:
            push.through = gate.address
            asked = asyncio.create_task(push.ask(pair[1]))
            await gate.at_limit.wait()
            for name in names:
                (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                (folder / name).write_bytes((tmp_path / "core" / name).read_bytes())
            gate.cut()
            with pytest.raises(FlareError):
                await asked
        assert names <= files_of(folder)

    drive(scenario())


def test_a_failed_transfer_takes_its_blobs_away(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    contents = [random_bytes(4 * MIB) for _ in range(3)]
    files = {f"{hashlib.sha256(content).hexdigest()}.safetensors": content for content in contents}
    push = Push(controller, write_core(tmp_path / "core", files), pair[0], list(pair))
    blobs = pair[1].paths.blobs
    kept = next(reversed(files))
    (blobs / kept).write_bytes(files[kept])  # another core's, once
    (blobs / kept).chmod(0o444)

    async def scenario() -> None:
        await cut_off(push, pair[1], 6 * MIB)
        await asyncio.to_thread(nothing_left, pair[1], soon=True)
        assert files_of(blobs) == {kept}
        assert (await push.ask(pair[1])).bytes < 9 * MIB

    drive(scenario())
    push.same(pair[1])
    assert files_of(blobs) == set(files)


def test_what_a_session_fetched_from_stays_until_it_ends(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    source = new_agent("source")
    limit(source, "10MiB")
    start((source,), controller)
    asker = Asker(source, controller, a_core(tmp_path), in_place=False)
    folder = asker.push.folder(source)
    shutil.copytree(tmp_path / "core", folder)
    other = Put(kind="core", name=f"{'ef' * 16}-5/core.safetensors", size=8 * MIB)

    async def scenario() -> None:
        hello = Hello(PROTOCOL_VERSION, asker.node.key)
        session = await connect(source.host, source.port, asker.node.identity, hello=hello)
        for _ in range(2):
            assert len(await receive(session, asker.fetch())) == MIB
            with pytest.raises(StorageError, match="has room for"):
                await controller.ask(source, other)
        await session.close()
        deadline = time.monotonic() + 60
        while folder.exists():
            assert time.monotonic() < deadline
            with contextlib.suppress(StorageError):
                await controller.ask(source, other)

    drive(scenario())


def test_status_says_what_takes_room_beside_cores(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    push = a_push(pair, controller, tmp_path, 8 * MIB)
    (pair[1].paths.blobs / f"{'5' * 64}.safetensors").write_bytes(random_bytes(MIB))

    async def scenario() -> None:
        await cut_off(push, pair[1], 4 * MIB, resume=True)
        status = await controller.ask(pair[1], Status())
        assert status.cache_resumable > MIB
        assert status.cache_blobs == MIB
        await push.ask(pair[1])
        assert (await controller.ask(pair[1], Status())).cache_resumable == 0

    drive(scenario())


@pytest.mark.parametrize("how", ["lent", "more", "resumed", "digested"])
def test_no_page_is_left_behind(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path, how: str
) -> None:
    if not can_write_directly(tmp_path):
        pytest.skip("this file system keeps its files in the page cache")
    weights = "model/weights.safetensors"
    files = {weights: random_bytes(16 * MIB)}
    path = write_core(tmp_path / "core", files, ranks=2, rank_ranges=[None, [[0, MIB, 12 * MIB]]])
    push = Push(controller, path, pair[0], list(pair))
    rank = 1 if how == "more" else None
    stored = push.folder(pair[1], rank) / weights

    async def scenario() -> None:
        if how == "lent":
            await push.ask(pair[1], 1)
        elif how == "more":
            (file,) = push.files(1)
            await push.ask(pair[1], 1, files=(replace(file, ranges=((2 * MIB, 8 * MIB),)),))
        elif how == "resumed":
            await cut_off(push, pair[1], 12 * MIB, kept=4 * MIB, resume=True)
        else:
            await push.ask(pair[1])
            (stored.parent.parent / ".verified").unlink()
        assert (await push.ask(pair[1], rank, resume=how == "resumed")).bytes < 13 * MIB

    drive(scenario())
    with stored.open("r+b") as file:
        assert cached_pages(file.fileno(), 16 * MIB) == 0
    push.same(pair[1], rank)


def test_small_files_come_over_all_streams(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    blob = random_bytes(MIB)
    small = {f"model/{number % 3}/{number}.json": random_bytes(number * 1000) for number in range(40)}
    files = {
        **small,
        f"{hashlib.sha256(blob).hexdigest()}.safetensors": blob,
        "model/large": random_bytes(2 * MIB),
    }
    push = Push(controller, write_core(tmp_path / "core", files), pair[0], list(pair))

    async def scenario() -> None:
        await cut_off(push, pair[1], MIB // 2)
        await asyncio.to_thread(nothing_left, pair[1], soon=True)
        assert files_of(pair[1].paths.blobs) == set()
        async with Gate(pair[0]) as gate:
            push.through = gate.address
            reply = await push.ask(pair[1], streams=3)
            assert gate.connections == 3
        stored = sum(map(len, files.values()))
        assert stored < reply.bytes < stored + 100_000

    drive(scenario())
    push.same(pair[1])
