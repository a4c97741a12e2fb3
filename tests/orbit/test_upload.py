"""Uploads from a controller that meet others, on real agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from flare.cores.reference import LocalReference
from flare.errors import StorageError, TransferError, UnreachableError
from flare.orbit import upload
from flare.orbit.client import Client
from flare.orbit.controller import Controller
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.resolve import Core, resolve_local
from flare.orbit.staging import check_room
from flare.orbit.upload import Upload, core_uploads, missing_files, upload_files
from flare.paths import Paths
from flare.session import Session
from flare.wire.messages import Have, HaveReply, Put, PutDone, PutReply
from flare_workers.spawner import SpawnerHandle
from tests.cores.making import MIB, pattern, write_core
from tests.orbit.builders import node_entry
from tests.orbit.fake_node import client_of, fake_node, say
from tests.orbit.lab import Lab
from tests.orbit.reporting import RecordingReporter

WAITS = "Another command is sending this core to maxwell; waiting for it."


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "WAIT", 0.05)


def controller_of(orbit: Lab) -> tuple[Client, NodeEntry, RecordingReporter]:
    reporter = RecordingReporter()
    paths = Paths.from_environment({"HOME": str(orbit.folder / "controller")})
    client = Client(Controller.open(paths, reporter))
    return client, client.controller.orbit.node("maxwell"), reporter


def core_of(folder: Path) -> Core:
    primary = write_core(folder, {"model/weights": pattern(40 * MIB), "model/config.json": b"{}"})
    return resolve_local(LocalReference(str(primary)))


def small_core(folder: Path, sizes: Iterable[int]) -> Core:
    """A core of small files of these sizes."""
    files = {f"model/{size}.txt": b"x" * size for size in sizes}
    return resolve_local(LocalReference(str(write_core(folder, files))))


async def take(session: Session, request: object) -> None:
    """Answer PUT of a small file as a node does, and take its bytes."""
    assert isinstance(request, Put)
    await session.send(PutReply())
    await session.receive_data(MIB)
    await session.send(PutDone(request.size))


@asynccontextmanager
async def uploading(
    client: Client, node: NodeEntry, file: Upload, ranges: tuple[tuple[int, int], ...]
) -> AsyncIterator[Session]:
    """Another command that was told to send these bytes of a file, and did not yet."""
    async with client.session(node) as session:
        request = Put(file.kind, file.name, file.size, ranges, file.publisher, "another")
        assert await session.request(request) == PutReply()
        yield session


async def finish(session: Session, file: Upload, ranges: tuple[tuple[int, int], ...]) -> None:
    data = file.path.read_bytes()
    await session.send_data(b"".join(data[start : start + length] for start, length in ranges))
    await session.receive(PutDone, timeout=30)


async def until_waiting(reporter: RecordingReporter) -> None:
    async with asyncio.timeout(30):
        while WAITS not in reporter.notes:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_two_uploads_of_one_core_become_one(orbit: Lab, tmp_path: Path, spawner: SpawnerHandle) -> None:
    orbit.paired("maxwell")
    client, node, reporter = controller_of(orbit)
    core = core_of(tmp_path / "made")

    async def scenario() -> None:
        files = await missing_files(client, core_uploads(core), node)
        weights = next(file for file in files if file.name.endswith("weights"))
        # The first command has one share on its way and another one still to begin.
        one, two = ((0, 20 * MIB),), ((20 * MIB, 20 * MIB),)
        async with uploading(client, node, weights, one) as first:
            second = asyncio.create_task(upload_files(client, node, files, spawner, streams=4))
            await until_waiting(reporter)
            async with uploading(client, node, weights, two) as rest:
                await finish(rest, weights, two)
            assert not second.done()
            await finish(first, weights, one)
        moved = await second
        assert moved == sum(file.size for file in files) - weights.size
        assert reporter.notes.count(WAITS) == 1
        assert await missing_files(client, files, node) == []

    asyncio.run(scenario())
    [entry] = (orbit.folder / "maxwell/.cache/flare/cores").iterdir()
    assert (entry / "model/weights").read_bytes() == pattern(40 * MIB)


def test_what_another_command_brings_needs_no_room(tmp_path: Path) -> None:
    [file, *_] = core_uploads(core_of(tmp_path / "made"))
    node = node_entry(1, "maxwell")
    check_room(node, [file], file.size)
    with pytest.raises(StorageError, match="but the cache of maxwell has room for"):
        check_room(node, [file], file.size - 1)
    check_room(node, [file, replace(file, arriving=True)], 0)


def test_an_upload_goes_on_when_the_one_before_it_failed(
    orbit: Lab, tmp_path: Path, spawner: SpawnerHandle
) -> None:
    orbit.paired("maxwell")
    client, node, reporter = controller_of(orbit)
    core = core_of(tmp_path / "made")

    async def scenario() -> None:
        files = await missing_files(client, core_uploads(core), node)
        weights = next(file for file in files if file.name.endswith("weights"))
        async with uploading(client, node, weights, ((0, MIB),)):
            second = asyncio.create_task(upload_files(client, node, files, spawner, streams=4))
            await until_waiting(reporter)
        assert await second == sum(file.size for file in files)
        assert await missing_files(client, files, node) == []

    asyncio.run(scenario())


def test_what_another_upload_left_out_is_sent_after_all(tmp_path: Path, spawner: SpawnerHandle) -> None:
    core = core_of(tmp_path / "made")
    answers = [
        PutReply(arriving=True),
        PutReply(already=True),
        PutReply(already=True),
        PutReply(already=True),
    ]
    held = [False]

    async def put(session: Session, _request: object) -> None:
        await session.send(answers.pop(0) if answers else PutReply(already=True))

    async def have(session: Session, _request: object) -> None:
        await session.send(HaveReply(held[0]))
        held[0] = not answers

    async def scenario() -> None:
        async with fake_node({Have: have, Put: put}) as node:
            client, reporter = client_of(tmp_path, [node])
            files = core_uploads(core)
            assert await upload_files(client, node, files, spawner, streams=1) == 0
            assert reporter.notes == [WAITS]
            assert reporter.bars[0].done >= sum(file.size for file in files)

    asyncio.run(scenario())


def test_a_failed_upload_says_what_the_next_one_sends(tmp_path: Path, spawner: SpawnerHandle) -> None:
    core = core_of(tmp_path / "made")

    async def lose(session: Session, _request: object) -> None:
        await session.send(PutReply())
        session.abort("the node died")

    async def lose_at_the_end(session: Session, _request: object) -> None:
        await session.send(PutReply())
        await session.receive_data(1 << 30)
        session.abort("the node died")

    async def scenario() -> None:
        for put in (lose, lose_at_the_end):
            async with fake_node({Put: put}) as node:
                client, _ = client_of(tmp_path, [node])
                weights = next(file for file in core_uploads(core) if file.name.endswith("weights"))
                with pytest.raises((TransferError, UnreachableError)) as failed:
                    await upload_files(client, node, [weights], spawner, streams=1)
                assert re.fullmatch(
                    r"Sending weights to maxwell failed: .*[a-z)]\. Run the command again: files that "
                    r"arrived whole are not sent again, one that was cut off starts over\.",
                    failed.value.message,
                ), failed.value.message

    asyncio.run(scenario())


@pytest.mark.root
@pytest.mark.parametrize("streams", [1, 2])
def test_a_nodes_disk_that_fills_up_is_the_reason(
    orbit: Lab, tmp_path: Path, spawner: SpawnerHandle, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    """The node cannot say so on the connection that it ended: the controller asks once more."""
    cache = orbit.folder / "maxwell/.cache"
    cache.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=330m,mode=0700", "tmpfs", cache], check=True)
    filler = cache / "somebody-elses"
    hand_over = upload._Sender.hand_over

    async def take_the_room(sender: upload._Sender, session: Session) -> None:
        if not filler.exists():  # the node wants 256 MiB to stay free, and had 40 more when it said yes
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 325 * MIB)
        await hand_over(sender, session)

    monkeypatch.setattr(upload._Sender, "hand_over", take_the_room)
    try:
        orbit.paired("maxwell")
        client, node, _ = controller_of(orbit)
        files = core_uploads(core_of(tmp_path / "made"))
        weights = next(file for file in files if file.name.endswith("weights"))
        with pytest.raises(StorageError) as failed:
            asyncio.run(upload_files(client, node, [weights], spawner, streams=streams))
        assert re.fullmatch(
            r"(Sending weights to maxwell failed: |maxwell \(\S+\): Another stream of model/weights failed: )"
            r"cannot write model/weights: the filesystem is full; \d+ bytes of this stream are missing and "
            r"the filesystem has \d+ bytes free\. Make room for \d+ more and try again\."
            r"( Files that arrived whole are not sent again\.)?",
            failed.value.message,
        ), failed.value.message
        filler.unlink()
        monkeypatch.setattr(upload._Sender, "hand_over", hand_over)
        assert asyncio.run(upload_files(client, node, files, spawner, streams=streams)) > weights.size
    finally:
        orbit.end("maxwell")
        subprocess.run(["umount", "-l", cache], check=True)


def test_the_controllers_own_stall_timeout_holds(tmp_path: Path, spawner: SpawnerHandle) -> None:
    core = core_of(tmp_path / "made")

    async def take_nothing(session: Session, _request: object) -> None:
        await session.send(PutReply())
        await asyncio.sleep(60)

    async def scenario() -> None:
        async with fake_node({Put: take_nothing}) as node:
            client, _ = client_of(tmp_path, [node])
            settings = client.controller.paths.settings_file
            settings.parent.mkdir(parents=True)
            settings.write_text("[agent]\nstall_timeout = 0.5\n")
            weights = next(file for file in core_uploads(core) if file.name.endswith("weights"))
            with pytest.raises(TransferError, match=r"nothing moved for 0\.5 seconds"):
                await upload_files(client, node, [weights], spawner, streams=1)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_the_process_list_says_which_share_and_whose(
    orbit: Lab, tmp_path: Path, spawner: SpawnerHandle
) -> None:
    """A node that takes nothing holds every worker in place, so that their titles can be looked at."""
    orbit.paired("maxwell")
    client, node, _ = controller_of(orbit)
    files = core_uploads(core_of(tmp_path / "made"))
    weights = next(file for file in files if file.name.endswith("weights"))

    async def hold(session: Session, _request: object) -> None:
        await session.send(PutReply())
        await asyncio.sleep(60)

    async def until(*wanted: str) -> None:
        async with asyncio.timeout(30):
            while not set(wanted) <= titles():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def scenario() -> None:
        async with fake_node({Put: hold}) as deaf:
            local, _ = client_of(tmp_path, [deaf])
            upload = asyncio.create_task(upload_files(local, deaf, [weights], spawner, streams=2))
            await until("flare: send weights 1/2 to maxwell", "flare: send weights 2/2 to maxwell")
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)
        assert client.controller.controllers is not None
        name = client.controller.controllers.controllers[0].name
        async with uploading(client, node, weights, ((0, MIB),)):
            await until(f"flare: receive weights from {name}")

    asyncio.run(scenario())


def titles() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add((process / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace"))
    return found


def test_many_small_files_share_few_connections(tmp_path: Path, spawner: SpawnerHandle) -> None:
    core = small_core(tmp_path / "made", range(20))
    sessions: set[Session] = set()

    async def take_all(session: Session, request: object) -> None:
        sessions.add(session)
        await take(session, request)

    async def scenario() -> None:
        async with fake_node({Put: take_all}) as node:
            client, _ = client_of(tmp_path, [node])
            uploads = core_uploads(core)
            assert await upload_files(client, node, uploads, spawner, streams=3) == core.stored_bytes
            assert len(sessions) <= 3

    asyncio.run(scenario())


def test_a_kept_connection_that_died_is_opened_anew(tmp_path: Path, spawner: SpawnerHandle) -> None:
    core = small_core(tmp_path / "made", range(1, 4))
    sessions: list[Session] = []

    async def take_one(session: Session, request: object) -> None:
        if session in sessions:
            session.abort("the agent was started anew")
            return
        sessions.append(session)
        await take(session, request)

    async def scenario() -> None:
        async with fake_node({Put: take_one}) as node:
            client, _ = client_of(tmp_path, [node])
            uploads = core_uploads(core)
            assert await upload_files(client, node, uploads, spawner, streams=1) == core.stored_bytes
            assert len(sessions) == len(uploads)

    asyncio.run(scenario())


def test_a_connection_that_dies_before_the_answer_names_the_file(
    tmp_path: Path, spawner: SpawnerHandle
) -> None:
    core = core_of(tmp_path / "made")
    asked: list[object] = []

    async def die(session: Session, request: object) -> None:
        asked.append(request)
        session.abort("the node died")

    async def scenario() -> None:
        async with fake_node({Put: die}) as node:
            client, _ = client_of(tmp_path, [node])
            weights = next(file for file in core_uploads(core) if file.name.endswith("weights"))
            with pytest.raises(UnreachableError, match=r"^Sending weights to maxwell failed: .*Run the"):
                await upload_files(client, node, [weights], spawner, streams=1)
            assert len(asked) == 2  # the bytes, and why the connection ended

    asyncio.run(scenario())


def test_an_upload_does_not_go_on_for_ever(tmp_path: Path, spawner: SpawnerHandle) -> None:
    core = core_of(tmp_path / "made")
    answers = [PutReply(arriving=True), PutReply(already=True)] * 20

    async def put(session: Session, _request: object) -> None:
        await session.send(answers.pop(0))

    async def scenario() -> None:
        async with fake_node({Have: say(HaveReply(False)), Put: put}) as node:
            client, _ = client_of(tmp_path, [node])
            with pytest.raises(TransferError, match=r"did not get to maxwell: .* Run this command again\."):
                await upload_files(client, node, core_uploads(core), spawner, streams=1)

    asyncio.run(scenario())


def test_two_pushes_of_one_core_at_once(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    core = core_of(tmp_path / "made")
    words = ("orbit", "push", core.path, "--to", "maxwell", "--accept-publisher", core.primary.fingerprint)
    with orbit.running(*words) as first, orbit.running(*words) as second:
        outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    [entry] = (orbit.folder / "maxwell/.cache/flare/cores").iterdir()
    assert (entry / "model/weights").read_bytes() == pattern(40 * MIB)
