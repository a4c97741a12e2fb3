"""Who is told to stop once one rank has ended, and who is left to notice it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from flare.errors import RankError, UnreachableError
from flare.orbit.first_end import check_started, end_with_the_first
from flare.orbit.follow import RankStream
from flare.orbit.launch import Group
from flare.orbit.orbit_records import NodeEntry
from flare.session import Session
from flare.wire.messages import Exit, GroupReport, Message, Status, Stop, StopReply
from tests.orbit.builders import answer, group_report
from tests.orbit.fake_node import client_of, fake_node, hang_up

LAUNCH = "glm-1"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


class Node:
    """Reports one rank, in what phase the test says, until it is told to stop."""

    def __init__(self, rank: int, phase: str | None, state: str = "running", **changes: Any) -> None:
        self.report: GroupReport = group_report(
            LAUNCH, rank=rank, ranks=3, phase=phase, state=state, **changes
        )
        self.stopped: list[Message] = []
        self.streams: list[RankStream] = []

    def functions(self) -> dict[type[Message], Any]:
        return {Status: self.status, Stop: self.stop}

    async def status(self, session: Session, _request: Message) -> None:
        reply = answer(NodeEntry("x", session.peer_key, "x:1"), groups=(self.report,)).reply
        assert reply is not None
        await session.send(reply)

    async def stop(self, session: Session, request: Message) -> None:
        self.stopped.append(request)
        await session.send(StopReply())
        await session.send(Exit(status=0))
        for stream in self.streams:
            stream.exit = Exit(status=0)
            stream.ended.set()


def stream_of(rank: int, node: NodeEntry) -> RankStream:
    return RankStream(rank, node, None, f"[rank {rank}]")  # type: ignore[arg-type]


def test_only_those_that_never_met_it_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare.orbit.first_end.NOTICE_SECONDS", 0.0)
    monkeypatch.setattr("flare.orbit.first_end.LEFT_POLL", 0.1)
    monkeypatch.setattr("flare.orbit.first_end.PEER_GRACE", 2.0)
    waits, serves = Node(0, "rendezvous"), Node(2, "serving")

    async def scenario() -> None:
        async with (
            fake_node(waits.functions(), name="maxwell") as zero,
            fake_node({Status: hang_up}, name="hertz") as dead,
            fake_node(serves.functions(), name="volta") as other,
        ):
            client, reporter = client_of(tmp_path, [zero, dead, other])
            streams = [stream_of(0, zero), stream_of(1, dead), stream_of(2, other)]
            waits.streams, serves.streams = [streams[0]], [streams[2]]
            streams[1].exit = Exit(status=3, reason="no such key")
            streams[1].ended.set()
            ending = asyncio.create_task(
                end_with_the_first(client, Group("glm", LAUNCH, "http://x", streams))
            )
            await streams[0].ended.wait()
            assert waits.stopped == [Stop(group=LAUNCH, now=True)]
            assert serves.stopped == []
            assert "glm: rank 0 on maxwell will not meet rank 1 on hertz: stopping." in reporter.notes
            await ending  # the other one does not notice at all
            assert serves.stopped == [Stop(group=LAUNCH, now=True)]
            assert "Rank 1 on hertz of glm ended 2 s ago: stopping the ranks that are left." in reporter.notes

    run(scenario())


def test_lost_connections_end_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({}) as node:
            client, reporter = client_of(tmp_path, [node])
            stream = stream_of(0, node)
            stream.lost = UnreachableError("gone")
            stream.ended.set()
            await end_with_the_first(client, Group("glm", LAUNCH, "http://x", [stream]))
            assert reporter.notes == []

    run(scenario())


def test_all_that_failed_are_named_and_one_that_cannot_be_stopped_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare.orbit.first_end.CAUSE_SECONDS", 0.0)
    failed = [Node(rank, "failed", "failed", status=3, reason=f"reason {rank}") for rank in (0, 1)]
    begins = Node(2, None)

    async def scenario() -> None:
        async with (
            fake_node(failed[0].functions(), name="maxwell") as zero,
            fake_node(failed[1].functions(), name="hertz") as one,
            fake_node({Status: begins.status, Stop: hang_up}, name="volta") as two,
        ):
            client, reporter = client_of(tmp_path, [zero, one, two])
            streams = [stream_of(rank, node) for rank, node in enumerate((zero, one, two))]
            words = r"rank 0 on maxwell failed with status 3: reason 0\n  rank 1 on hertz .*: reason 1"
            with pytest.raises(RankError, match=words):
                await check_started(client, Group("glm", LAUNCH, "http://x", streams))
            assert any("rank 2 on volta" in warning for warning in reporter.warnings)

    run(scenario())


def test_a_rank_that_does_not_begin_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare.orbit.first_end.BEGIN_SECONDS", 0.3)
    begins = Node(0, None)

    async def scenario() -> None:
        async with fake_node(begins.functions()) as node, fake_node({Status: hang_up}) as away:
            client, _ = client_of(tmp_path, [node, away])
            await check_started(
                client, Group("glm", LAUNCH, "http://x", [stream_of(0, node), stream_of(1, away)])
            )
            assert begins.stopped == []

    run(scenario())
