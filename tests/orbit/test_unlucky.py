"""What a hostile or unlucky node does to a controller: every sentence once."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from flare.cores.reference import LocalReference, NodeReference
from flare.errors import (
    ClockSkewError,
    CoreError,
    ForbiddenError,
    PairingError,
    RankError,
    RemoteProtocolError,
    StorageError,
    TransferError,
    UnreachableError,
)
from flare.orbit.follow import RankStream, follow, raise_for_failures
from flare.orbit.launch import plan_launch
from flare.orbit.pairing import pair
from flare.orbit.request import RunOptions, plan_request
from flare.orbit.resolve import resolve_core, resolve_local
from flare.orbit.upload import core_uploads, missing_files, upload_files
from flare.session import Session
from flare.trust.join_code import generate
from flare.wire.messages import (
    Attach,
    AttachReply,
    Error,
    Exit,
    Get,
    GetReply,
    Have,
    HaveReply,
    Log,
    Message,
    NodeFacts,
    Pair,
    PairReply,
    Put,
    PutReply,
    Stat,
    StatReply,
    Status,
)
from flare_workers.spawner import start
from tests.cores.making import PUBLISHER, write_core
from tests.orbit.builders import node_entry
from tests.orbit.fake_node import client_of, fake_node, run, say, status_of


def test_a_node_that_cannot_prove_the_code_is_not_recorded(tmp_path: Path) -> None:
    facts = NodeFacts("maxwell", "0.1.0", "x86_64", "linux")

    async def scenario() -> None:
        for proof in (None, b"\0" * 32):
            async with fake_node({Pair: say(PairReply(facts, "127.0.0.1:1", proof))}, stranger=True) as node:
                client, _ = client_of(tmp_path, [])
                (outcome,) = await pair(client.controller, [node.address], codes=[generate()])
                assert isinstance(outcome.error, PairingError)
                assert "did not prove that it knows the code" in outcome.error.message

    run(scenario())
    assert not (tmp_path / ".config/flare/orbit.toml").exists()


def test_a_clock_that_differs_is_told_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        reply = status_of(node_entry(1, "maxwell"))
        for shift, word in ((100, "ahead of"), (-100, "behind")):
            async with fake_node({Status: say(replace(reply, time=reply.time + shift))}) as node:
                client, reporter = client_of(tmp_path, [node])
                await client.statuses([node])
                await client.statuses([node])
                (warning,) = reporter.warnings
                assert f"s {word} this host's" in warning
                with pytest.raises(ClockSkewError, match=f"maxwell is (99|100|101) s {word} this host's"):
                    client.check_clocks([node])

    run(scenario())


def test_a_clock_within_what_grants_tolerate_is_not_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        reply = status_of(node_entry(1, "maxwell"))
        async with fake_node({Status: say(replace(reply, time=reply.time + 45))}) as node:
            client, reporter = client_of(tmp_path, [node])
            await client.statuses([node])
            assert len(reporter.warnings) == 1
            client.check_clocks([node])

    run(scenario())


def test_a_person_is_told_whom_the_command_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.orbit.client.WAITING_AFTER", 0.05)
    monkeypatch.setattr("flare.orbit.pairing.WATCHED_TIMEOUT", 0.3)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            node = replace(node_entry(1, "hertz"), address=f"127.0.0.1:{silent.getsockname()[1]}")
            client, reporter = client_of(tmp_path, [node])
            (one,) = await client.statuses([node], connect_timeout=0.3)
            assert one.error is not None
            assert "did not answer the handshake" in one.error.message
            (two,) = await pair(client.controller, [node.address], codes=[None])
            assert isinstance(two.error, UnreachableError)
            assert reporter.waits == ["waiting for hertz …", f"waiting for {node.address} …"]

    run(scenario())


def test_a_node_that_forgot_this_controller_says_how_to_pair_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({}, stranger=True) as node:
            client, _ = client_of(tmp_path, [node])
            with pytest.raises(ForbiddenError, match="Node maxwell does not accept this controller"):
                await client.open(node)

    run(scenario())


def core_of(tmp_path: Path, ranks: int = 1) -> Path:
    return write_core(
        tmp_path / "core",
        {"model/Tiny.gguf": b"x" * 3000},
        engine="llama.cpp",
        ranks=ranks,
        parallel={"tensor": 1, "pipeline": ranks},
        rank_ranges=[None] + [[]] * (ranks - 1),
    )


def test_a_rank_zero_that_knows_no_way_to_its_peer(tmp_path: Path) -> None:
    core = core_of(tmp_path, 2)

    async def scenario() -> None:
        async with fake_node({}) as first, fake_node({}, name="hertz") as second:
            pass
        reply = status_of(first)

        async def status(session: Session, request: Message) -> None:
            assert isinstance(request, Status)
            await session.send(reply)

        async with fake_node({Status: status}) as first, fake_node({Status: status}, name="hertz") as second:
            client, _ = client_of(tmp_path, [first, second])
            request = plan_request(
                client.controller.orbit,
                RunOptions(
                    core=str(core), nodes=("maxwell", "hertz"), accept_publisher=PUBLISHER.fingerprint
                ),
            )
            with pytest.raises(
                RemoteProtocolError, match="maxwell cannot say by which address hertz reaches it"
            ):
                await plan_launch(client, request)

    run(scenario())


def test_a_core_that_changes_while_it_is_mirrored(tmp_path: Path) -> None:
    data = core_of(tmp_path).read_bytes()

    async def scenario() -> None:
        async def get(session: Session, request: Message) -> None:
            assert isinstance(request, Get)
            piece = data[request.offset : request.offset + request.length]
            await session.send(GetReply(len(piece)))
            await session.send_data(piece)

        async def short(session: Session, request: Message) -> None:
            await session.send(GetReply(1))

        for size, getter, message in (
            (len(data), short, "is shorter than its node said"),
            (100, get, "is cut off: its header ends at byte"),
        ):
            async with fake_node({Stat: say(StatReply(size)), Get: getter}) as node:
                client, _ = client_of(tmp_path, [node])
                with pytest.raises(CoreError, match=message):
                    await resolve_core(client, NodeReference("maxwell", "/data/tiny.safetensors"))

    run(scenario())


def test_a_lost_connection_does_not_pass_for_a_stopped_rank(tmp_path: Path) -> None:
    async def lose(session: Session, request: Message) -> None:
        await session.send(AttachReply())
        await session.send(Log("a line\nwith [rank 1 hertz] in it"))
        session.abort("the cable was cut")

    async def scenario() -> None:
        async with fake_node({Attach: lose}) as node:
            client, reporter = client_of(tmp_path, [node])
            session = await client.open(node)
            await session.request(Attach("glm-1"))
            stream = RankStream.of(0, node, session)
            await follow([stream], reporter)
            assert reporter.said == [r"[rank 0 maxwell] a line\x0awith [rank 1 hertz] in it"]
            assert reporter.warnings[0].startswith(
                "[rank 0 maxwell] maxwell does not answer any more, and whether the rank goes on there is "
                "not known. `flare orbit ls` tells when it answers again. "
            )
            with pytest.raises(UnreachableError, match="the group glm may still run there"):
                raise_for_failures([stream], "glm")
            stream.exit = Exit(status=2)
            with pytest.raises(RankError, match="The group glm failed"):
                raise_for_failures([stream], "glm")

    run(scenario())


def test_an_upload_that_fails_says_which_file_and_where(tmp_path: Path) -> None:
    core = resolve_local(LocalReference(str(core_of(tmp_path))))
    spawner = start()

    async def lose(session: Session, request: Message) -> None:
        await session.send(PutReply())
        session.abort("the node died")

    async def scenario() -> None:
        refuse = say(Error("storage", "the disk is full"))
        for put, error, message in (
            (lose, (TransferError, UnreachableError), "maxwell"),
            (refuse, StorageError, "the disk is full"),
        ):
            async with fake_node({Have: say(HaveReply(False)), Put: put}) as node:
                client, _ = client_of(tmp_path, [node])
                missing = await missing_files(client, core_uploads(core), node)
                assert len(missing) == 2
                with pytest.raises(error, match=message):
                    await upload_files(client, node, missing, spawner, streams=2)
        async with fake_node({Have: say(HaveReply(False)), Put: say(PutReply())}) as node:
            client, _ = client_of(tmp_path, [node])
            missing = await missing_files(client, core_uploads(core), node)
            os.truncate(missing[1].path, 100)
            with pytest.raises(StorageError, match=r"Sending Tiny\.gguf to maxwell failed"):
                await upload_files(client, node, missing[1:], spawner, streams=1)
            missing[1].path.unlink()
            with pytest.raises(StorageError, match=r"Tiny\.gguf cannot be read: No such file"):
                await upload_files(client, node, missing[1:], spawner, streams=1)
        already = fake_node({Have: say(HaveReply(False)), Put: say(PutReply(already=True))})
        async with already as node:
            client, reporter = client_of(tmp_path, [node])
            await upload_files(client, node, missing, spawner, streams=1)
            assert reporter.bars[0].done == reporter.bars[0].wanted

    try:
        run(scenario())
    finally:
        spawner.close()


def test_a_primary_is_sent_when_its_companions_are_there(tmp_path: Path) -> None:
    core = resolve_local(LocalReference(str(core_of(tmp_path))))
    spawner = start()
    events: list[str] = []

    async def take(session: Session, request: Message) -> None:
        assert isinstance(request, Put)
        name = request.name.partition("/")[2]
        events.append(f"asked for {name}")
        await asyncio.sleep(0.2)
        events.append(f"has {name}")
        await session.send(PutReply(already=True))

    async def scenario() -> None:
        async with fake_node({Have: say(HaveReply(False)), Put: take}) as node:
            client, _ = client_of(tmp_path, [node])
            missing = await missing_files(client, core_uploads(core), node)
            await upload_files(client, node, missing, spawner, streams=8)

    try:
        run(scenario())
    finally:
        spawner.close()
    companion = core.files[1][0]
    assert events == [
        f"asked for {companion}",
        f"has {companion}",
        f"asked for {core.primary_name}",
        f"has {core.primary_name}",
    ]
