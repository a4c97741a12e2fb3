"""What the agent's log says of bytes that come."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from flare.agent import service
from flare.agent.uploads import MAX_UPLOADS, QUIET_ENDS, Uploads
from flare.errors import IntegrityError, StorageError, TransferError, UnreachableError
from flare.paths import Paths
from flare.settings import Settings
from flare.wire.messages import Put, PutDone, PutReply
from flare_workers import spawner
from flare_workers.spawner import SpawnerHandle
from tests.agent.transfer_world import MIB, Push, random_bytes, start
from tests.agent.world import Agent, Peer, drive, wait_for
from tests.cores.making import write_core

CORE = f"{'ab' * 16}-100"


def put(path: str, size: int, publisher: str | None = None) -> Put:
    return Put("core", f"{CORE}/{path}", size, None, publisher, "upload")


def test_a_transfer_is_told(new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path) -> None:
    source, destination = new_agent("source"), new_agent("destination")
    start((source, destination), controller)
    path = write_core(tmp_path / "core", {"model/weights.gguf": random_bytes(2 * MIB)})
    push = Push(controller, path, source, [source, destination])
    reply = drive(push.ask(destination))
    core = f"the core {path.name} ({push.entry()}) from "
    wait_for(lambda: "is there" in destination.log())
    log = destination.log()
    assert log.count(core) == 2
    assert ": begins to come, asked by workstation\n" in log
    assert f": is there, {reply.bytes} bytes came in " in log
    path.with_name("model").joinpath("weights.gguf").write_bytes(random_bytes(2 * MIB))
    for file in push.folder(destination).rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises((IntegrityError, TransferError)):
        drive(push.ask(destination))
    wait_for(lambda: ": failed after " in destination.log())
    assert destination.log().count(core) == 4


def test_an_upload_is_told(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            assert await session.request(put("model/config.json", 8)) == PutReply()
            await session.send_data(b"x" * 8)
            await session.receive(PutDone, timeout=60)
        async with controller.session(paired) as session:
            assert await session.request(put("model/weights", MIB)) == PutReply()

    drive(scenario())
    wait_for(lambda: "failed after" in paired.log())
    what = f"the core {CORE} from workstation: "
    assert paired.log().count(what) == 2
    assert f"INFO {what}begins to come\n" in paired.log()
    assert f"WARNING {what}failed after " in paired.log()
    assert ": its connection ended\n" in paired.log()


def test_an_upload_has_three_lines_however_many_streams_it_has(caplog: pytest.LogCaptureFixture) -> None:
    uploads = Uploads(lambda: 5.0)
    with caplog.at_level(logging.INFO, "flare.agent"):
        for number in range(20):
            with uploads.share(put(f"model/{number}", 3), "key", "lap\ntop") as moved:
                moved.bytes = 3
        for _ in range(2):  # the primary comes in two shares
            with uploads.share(put("core.safetensors", 100, "cd" * 32), "key", "lap\ntop") as moved:
                moved.bytes = 50
        for _ in range(2):
            with (
                uploads.share(put("model/1", 3), "key", "lap\ntop"),
                pytest.raises(StorageError),
                uploads.share(put("model/2", 3), "key", "lap\ntop"),
            ):
                raise StorageError("The disk is full.\x1b")
    what = f"the core {CORE} from lap\\x0atop: "
    assert [record.getMessage().removeprefix(what) for record in caplog.records] == [
        "begins to come",
        "is there, 160 bytes came in 0.0 s",
        "begins to come",
        "failed after 0.0 s: The disk is full.\\x1b",
        "begins to come",
        "failed after 0.0 s: The disk is full.\\x1b",
    ]


def test_what_is_remembered_of_uploads_is_bounded() -> None:
    uploads = Uploads()
    for number in range(MAX_UPLOADS + 5):
        with pytest.raises(UnreachableError), uploads.share(put("model/1", 3), number, "laptop"):
            raise UnreachableError("It is gone.")
    assert len(uploads._known) == MAX_UPLOADS


def test_an_upload_without_a_primary_ends_when_it_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The node had the primary already, so that only companions come."""
    now = [100.0]
    uploads = Uploads(lambda: now[0])

    def send(number: int) -> None:
        with uploads.share(put(f"model/{number}", 3), "key", "laptop") as moved:
            now[0] += 1
            uploads.tell_quiet()  # not while one comes
            moved.bytes = 3

    with caplog.at_level(logging.INFO, "flare.agent"):
        send(1)
        now[0] += QUIET_ENDS - 1
        uploads.tell_quiet()
        send(2)
        now[0] += QUIET_ENDS
        uploads.tell_quiet()
        uploads.tell_quiet()
        with pytest.raises(StorageError), uploads.share(put("model/3", 3), "key", "laptop"):
            raise StorageError("The disk is full.")
        now[0] += QUIET_ENDS
        uploads.tell_quiet()  # that was told
    what = f"the core {CORE} from laptop: "
    assert [record.getMessage().removeprefix(what) for record in caplog.records] == [
        "begins to come",
        "6 bytes came in 11.0 s, its primary not among them",
        "begins to come",
        "failed after 0.0 s: The disk is full.",
    ]
    assert not uploads._known


def test_an_agent_looks_for_quiet_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flare.agent.uploads.QUIET_ENDS", 0.0)
    paths = Paths.from_environment({"HOME": str(tmp_path)})

    async def scenario(handle: SpawnerHandle) -> None:
        async with service._node(paths, Settings.load(paths), "node", handle) as (node, _, sampler):
            with node.uploads.share(put("model/1", 3), "key", "laptop") as moved:
                moved.bytes = 3
            await sampler.sample()

    with contextlib.closing(spawner.start()) as handle, caplog.at_level(logging.INFO, "flare.agent"):
        drive(scenario(handle))
    assert "3 bytes came in 0.0 s, its primary not among them" in caplog.text
