"""Stopping one group: who is asked when, what is told of it, and as which kind of error."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.errors import FlareError, ForbiddenError, IdentityError, UnreachableError, UnsupportedError
from flare.identity import Identity
from flare.orbit.stopping import stop_group
from flare.session import Session
from flare.wire.messages import Error, Exit, Message, Status, Stop, StopReply
from tests.orbit.builders import group_report
from tests.orbit.fake_node import Answer, client_of, fake_node, run, say, status_of
from tests.session.parties import answering


async def vanish(session: Session, _request: Message) -> None:
    """Answer STOP, and go away before the rank has ended."""
    await session.send(StopReply())
    session.abort("gone")


FORBIDDEN = say(Error("forbidden", "This session may not ask for that."))


@pytest.mark.parametrize(
    ("zero_says", "peer_says", "kind"),
    [
        (FORBIDDEN, FORBIDDEN, ForbiddenError),
        (say(Error("unsupported", "no")), say(Error("unsupported", "no")), UnsupportedError),
        (vanish, vanish, UnreachableError),
        (FORBIDDEN, vanish, UnreachableError),
    ],
)
def test_the_kind_of_error_is_what_the_nodes_answers_share(
    tmp_path: Path, zero_says: Answer, peer_says: Answer, kind: type[FlareError]
) -> None:
    async def scenario() -> None:
        zero_node = fake_node({Stop: zero_says})
        peer_node = fake_node({Stop: peer_says}, name="hertz")
        async with zero_node as zero, peer_node as peer:
            client, _ = client_of(tmp_path, [zero, peer])
            with pytest.raises(FlareError) as caught:
                await stop_group(client, "glm", "glm-1", [(0, zero), (1, peer)])
        assert caught.value.exit_code == kind.exit_code
        assert isinstance(caught.value, kind)
        assert "  rank 0 on maxwell: " in caught.value.message
        assert "  rank 1 on hertz: " in caught.value.message
        # Nothing that answered no will say yes to the same question.
        assert ("again when they answer" in caught.value.message) is (kind is UnreachableError)

    run(scenario())


def test_a_node_with_another_key_gives_the_code_of_that(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({Stop: say(StopReply(), Exit(status=0))}) as node:
            other = replace(node, public_key=Identity.generate().public_key)
            client, _ = client_of(tmp_path, [other])
            with pytest.raises(IdentityError, match="Not all of glm could be stopped"):
                await stop_group(client, "glm", "glm-1", [(0, other)])

    run(scenario())


def test_a_rank_that_cannot_be_stopped_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({Stop: vanish}) as node:
            client, _ = client_of(tmp_path, [node])
            with pytest.raises(
                UnreachableError, match=r"Not all of glm could be stopped:\n  rank 0 on maxwell: "
            ):
                await stop_group(client, "glm", "glm-1", [(0, node)])

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
