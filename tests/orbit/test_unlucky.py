"""What a hostile or unlucky node does to a controller: every sentence once."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from flare.orbit.groups import attach, stop
from flare.orbit.launch import plan_launch
from flare.orbit.pairing import pair
from flare.orbit.request import RunOptions, plan_request
from flare.orbit.resolve import resolve_core, resolve_local
from flare.orbit.stopping import stop_group
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
    StatusReply,
    Stop,
    StopReply,
)
from flare_workers.spawner import start
from tests.cores.making import PUBLISHER, write_core
from tests.orbit.builders import answer, group_report, node_entry
from tests.orbit.fake_node import client_of, fake_node, hang_up, say
from tests.session.parties import answering


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def status_of(node: Any, **changes: Any) -> StatusReply:
    reply = answer(node).reply
    assert reply is not None
    return replace(reply, time=int(time.time()), **changes)


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


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("nemo", r"^No run called nemo was found on the nodes that answered; hertz did not\.$"),
        (None, r"^No run was found on the nodes that answered; hertz did not\.$"),
    ],
)
def test_attaching_to_what_may_run_on_a_node_that_is_away(
    tmp_path: Path, selector: str | None, message: str
) -> None:
    async def scenario() -> None:
        async with fake_node({}, name="hertz") as away:
            pass
        async with fake_node({}) as node:
            pass
        groups = () if selector is None else (group_report("glm-1"),)
        async with fake_node({Status: say(status_of(node, groups=groups))}) as node:
            client, _ = client_of(tmp_path, [node, away])
            with pytest.raises(UnreachableError, match=message) as failed:
                await attach(client, [node, away], selector)
            assert failed.value.exit_code == 4

    run(scenario())


def test_attaching_where_nobody_lets_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({}) as node:
            pass
        reply = status_of(node, groups=(group_report("glm-1"),))
        refuse = say(Error("not_found", "gone"))
        async with fake_node({Status: say(reply), Attach: refuse}) as node:
            client, reporter = client_of(tmp_path, [node])
            with pytest.raises(UnreachableError, match="No rank could be attached to"):
                await attach(client, [node], None)
            assert "cannot attach to rank 0 of glm on maxwell" in reporter.warnings[0]

    run(scenario())


def test_a_rank_that_cannot_be_stopped_is_named(tmp_path: Path) -> None:
    async def vanish(session: Session, request: Message) -> None:
        await session.send(StopReply())
        session.abort("gone")

    async def scenario() -> None:
        async with fake_node({Stop: vanish}) as node:
            client, _ = client_of(tmp_path, [node])
            with pytest.raises(
                UnreachableError, match=r"Not all of glm could be stopped:\n  rank 0 on maxwell: "
            ):
                await stop_group(client, "glm", "glm-1", [(0, node)])

    run(scenario())


def test_every_group_that_cannot_be_stopped_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({}) as node:
            pass
        groups = (group_report("a-1", name="a"), group_report("b-1", name="b"))
        async with fake_node({Status: say(status_of(node, groups=groups)), Stop: hang_up}) as node:
            client, _ = client_of(tmp_path, [node])
            with pytest.raises(UnreachableError) as caught:
                await stop(client, [node], None, now=False)
            assert "Not all of a could be stopped" in caught.value.message
            assert "Not all of b could be stopped" in caught.value.message

    run(scenario())


@pytest.mark.parametrize(("now", "said"), [(False, "to finish running requests"), (True, "to end at once")])
def test_who_leaves_a_stop_hears_what_goes_on(tmp_path: Path, now: bool, said: str) -> None:
    async def scenario() -> None:
        asked, connected = asyncio.Event(), asyncio.Event()

        async def drain(session: Session, request: Message) -> None:
            await session.send(StopReply())
            asked.set()
            await asyncio.Event().wait()

        async def silent(sock: socket.socket) -> None:
            connected.set()
            await asyncio.Event().wait()

        async with fake_node({Stop: drain}) as node:
            client, reporter = client_of(tmp_path, [node])
            for announce in (True, False):
                stopping = asyncio.create_task(
                    stop_group(client, "glm", "glm-1", [(0, node)], now=now, announce=announce)
                )
                await asked.wait()
                asked.clear()
                stopping.cancel()
                await asyncio.gather(stopping, return_exceptions=True)
                assert stopping.cancelled()
        [warning] = reporter.warnings
        assert f"rank 0 on maxwell was asked {said}" in warning
        assert "`flare orbit ls`" in warning
        assert "`flare orbit stop glm --now`" in warning

        async with answering(silent) as port:
            slow = replace(node, address=f"127.0.0.1:{port}")
            client, reporter = client_of(tmp_path / "other", [slow])
            stopping = asyncio.create_task(stop_group(client, "glm", "glm-1", [(0, slow)], now=now))
            await connected.wait()
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
        assert reporter.warnings == ["Left before glm was asked to stop: it runs on."]

    run(scenario())


def test_peers_are_asked_only_when_they_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({}) as node:
            pass
        stays = status_of(node, groups=(group_report("glm-1", rank=1, ranks=2, phase="serving"),))
        gone = status_of(node)
        asked: list[str] = []

        def stopper(name: str) -> Any:
            async def stop_it(session: Session, request: Message) -> None:
                asked.append(name)
                await session.send(StopReply())
                await session.send(Exit(status=0))

            return stop_it

        for reply, expected in ((gone, ["zero"]), (stays, ["zero", "peer"])):
            asked.clear()
            zero_node = fake_node({Stop: stopper("zero")})
            peer_node = fake_node({Stop: stopper("peer"), Status: say(reply)}, name="hertz")
            async with zero_node as zero, peer_node as peer:
                client, reporter = client_of(tmp_path, [zero, peer])
                await stop_group(client, "glm", "glm-1", [(0, zero), (1, peer)], peer_grace=0.2)
                assert asked == expected
                assert any("waiting up to" in note for note in reporter.notes) == (len(expected) == 2)

    run(scenario())


def test_what_is_to_be_known_of_a_rank_that_ended_well_is_said(tmp_path: Path) -> None:
    remark = "GPU 0 still holds 3.0 GiB more than before the group started"

    async def stopped(session: Session, request: Message) -> None:
        await session.send(StopReply())
        await session.send(Exit(status=0, reason=f"serving; {remark}", remark=remark))

    async def scenario() -> None:
        async with fake_node({}) as node:
            pass
        left = group_report("glm-1", rank=1, ranks=2, phase="stopped", state="exited", status=0)
        left = replace(left, remark="x")
        zero_node = fake_node({Stop: stopped})
        peer_node = fake_node({Status: say(status_of(node, groups=(left,)))}, name="hertz")
        async with zero_node as zero, peer_node as peer:
            client, reporter = client_of(tmp_path, [zero, peer])
            ranks = await stop_group(client, "glm", "glm-1", [(0, zero), (1, peer)])
            assert reporter.notes[-2:] == [
                f"glm: rank 0 on maxwell stopped; {remark}",
                "glm: rank 1 on hertz stopped; x",
            ]
            assert [rank.to_json()["remark"] for rank in ranks] == [remark, "x"]
            assert ranks[0].to_json() == {
                "group": "glm",
                "launch": "glm-1",
                "rank": 0,
                "node": "maxwell",
                "status": 0,
                "signal": None,
                "reason": f"serving; {remark}",
                "remark": remark,
            }

    run(scenario())


def test_a_peer_that_never_met_rank_zero_is_told_at_once_and_has_nothing_to_finish(tmp_path: Path) -> None:
    asked: list[Message] = []

    async def stopped(session: Session, request: Message) -> None:
        asked.append(request)
        await session.send(StopReply())
        await session.send(Exit(status=0))

    async def scenario() -> None:
        async with fake_node({}) as node:
            pass
        waits = group_report("glm-1", rank=1, ranks=2, phase="rendezvous")
        reply = status_of(node, groups=(waits,))
        zero_node = fake_node({Stop: stopped})
        peer_node = fake_node({Stop: stopped, Status: say(reply)}, name="hertz")
        async with zero_node as zero, peer_node as peer:
            client, reporter = client_of(tmp_path, [zero, peer])
            await stop_group(client, "glm", "glm-1", [(0, zero), (1, peer)], peer_grace=1000)
            assert asked == [Stop(group="glm-1"), Stop(group="glm-1", now=True)]
            assert not any("waiting up to" in note for note in reporter.notes)

    run(scenario())


def test_nothing_to_stop_on_what_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({}) as gone:
            pass
        reply = status_of(gone)
        async with fake_node({Status: say(reply)}, name="hertz") as node:
            client, _ = client_of(tmp_path, [gone, node])
            with pytest.raises(UnreachableError, match=r"nodes that answered; maxwell did not\."):
                await stop(client, [gone, node], "glm", now=False)

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
