"""What a push says of its outcomes, and what it refuses to begin."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flare.cores.reference import LocalReference
from flare.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    StorageError,
    TransferError,
    UnsupportedError,
)
from flare.orbit.distribution import Delivered, distribute, raise_failures, report_delivered
from flare.orbit.fabric import Way
from flare.orbit.pins import Pins
from flare.orbit.push import Delivery, PushPlan, PushRequest
from flare.orbit.resolve import resolve_local
from flare.orbit.staging import Staging, stage_core
from flare.session import Session
from flare.trust import signed
from flare.trust.publishers import PublisherProfile
from flare.trust.signed import SignedRecord
from flare.wire.messages import (
    FileRanges,
    Have,
    HaveReply,
    Message,
    Put,
    PutDone,
    PutReply,
    StopReply,
    Transfer,
    TransferProgress,
    TransferReply,
)
from flare_workers.spawner import start
from tests.cores.making import PUBLISHER, write_core
from tests.orbit.builders import node_entry
from tests.orbit.fake_node import client_of, fake_node, hang_up, say

FILES = (FileRanges("tiny.safetensors", 300, ()), FileRanges("model/a", 2000, ((0, 1000), (1500, 500))))


def delivery(name: str = "hertz", **changes: object) -> Delivery:
    values = {
        "rank": 1,
        "node": node_entry(1, name),
        "complete": False,
        "directory": "d-rank1",
        "files": FILES,
        "source": node_entry(2, "maxwell"),
        "source_rank": 0,
        "way": Way(2, ("volta",), 8),
    }
    return Delivery(**{**values, **changes})  # type: ignore[arg-type]


def test_the_last_line_has_bytes_seconds_and_rate_and_whether_they_are_verified(tmp_path: Path) -> None:
    client, reporter = client_of(tmp_path, [])
    report_delivered(
        client,
        [
            Delivered(delivery(), 3_000_000_000, 2.0, True),
            Delivered(delivery(), 1500, 0.5, False),
            Delivered(delivery(), 0, 0.1, True),
            Delivered(delivery(complete=True, source=None, way=None), 1500, 0.5),
            Delivered(delivery(complete=True, source=None, way=None)),
            Delivered(delivery(skipped="holds it")),
            Delivered(delivery(), error=TransferError("lost")),
        ],
    )
    assert reporter.said == [
        "hertz: rank 1's data, 1,500 bytes verified in 2.0 s (1.500 GB/s).",
        "hertz: rank 1's data, 1,500 bytes stored, not verified, in 0.5 s (0.000 GB/s).",
        "hertz: rank 1's data, 1,500 bytes verified in its cache already.",
        (
            "hertz got 1,500 bytes in 0.5 s (0.000 GB/s) from this controller; its ranks verify them before "
            "they load them."
        ),
        "hertz has the complete core in its cache already.",
    ]


def test_several_failures_are_one_error_with_a_line_each() -> None:
    raise_failures([Delivered(delivery())])
    failed = [Delivered(delivery(), error=problem) for problem in (StorageError("one"), TransferError("two"))]
    with pytest.raises(StorageError, match=r"^one\ntwo$"):
        raise_failures(failed)


def plan_for(folder: Path, deliveries: tuple[Delivery, ...]) -> PushPlan:
    primary = write_core(folder, {"model/a": b"a"}, ranks=2)
    reference = LocalReference(str(primary))
    nodes = tuple(each.node for each in deliveries)
    profile = PublisherProfile("tests", PUBLISHER.public_key)
    return PushPlan(
        PushRequest(reference, nodes), resolve_local(reference), profile, "tiny", None, deliveries, 1 << 40
    )


def test_an_upload_needs_workers(tmp_path: Path) -> None:
    client, _ = client_of(tmp_path, [])
    plan = plan_for(tmp_path, (delivery(source=None, source_rank=None, way=None),))
    with pytest.raises(LocalProtocolError, match="needs upload workers"):
        asyncio.run(distribute(client, plan, None))


def test_only_what_moved_counts_as_moved(tmp_path: Path) -> None:
    """Another command may have brought some or all of it since the node was asked what it lacks."""
    spawner = start()
    there: set[str] = set()

    async def put(session: Session, request: Message) -> None:
        assert isinstance(request, Put)
        already = request.name.partition("/")[2] in there
        await session.send(PutReply(already=already))
        if not already:
            await session.receive_data(1 << 20)
            await session.send(PutDone(request.size))

    async def scenario() -> None:
        async with fake_node({Have: say(HaveReply(False)), Put: put}) as node:
            plan = plan_for(tmp_path, (delivery(node=node, source=None, source_rank=None, way=None),))
            size = plan.core.primary.size
            for names, moved in ((("model/a",), size), (("model/a", "tiny.safetensors"), 0)):
                there.update(names)
                (outcome,) = await distribute(client, plan, spawner)
                assert (outcome.error, outcome.moved, outcome.to_json()["moved"]) == (None, moved, moved)
                report_delivered(client, [outcome])
            staging = Staging(
                plan.core, [node], SignedRecord("{}", b"", b""), plan.publisher, streams=2, cache_free=1 << 40
            )
            async with Pins(client) as pins:
                await stage_core(client, staging, spawner, pins)
                there.discard("tiny.safetensors")
                await stage_core(client, staging, spawner, pins)
        assert reporter.said[0].startswith(f"maxwell got {size:,} bytes in ")
        assert reporter.said[1] == "maxwell has the complete core in its cache already."
        assert reporter.notes[1] == "maxwell got the core from another command meanwhile."
        assert reporter.notes[3].startswith(f"Uploaded {size:,} bytes in ")

    client, reporter = client_of(tmp_path, [])
    try:
        asyncio.run(scenario())
    finally:
        spawner.close()


def test_progress_fills_the_row_and_a_node_that_goes_away_is_named(tmp_path: Path) -> None:
    async def scenario() -> list[Delivered]:
        progress = say(TransferProgress(700, 600, 900), TransferReply(900, 1.5, True))
        async with (
            fake_node({Transfer: progress}, name="hertz") as good,
            fake_node({Transfer: hang_up}, name="volta") as bad,
            fake_node(
                {Transfer: say(TransferProgress(1, 1), TransferProgress(0, 0))}, name="curie"
            ) as silent,
        ):
            deliveries = tuple(
                delivery(node=node, rank=rank) for rank, node in enumerate((good, bad, silent))
            )
            waiting = asyncio.create_task(distribute(client, plan_for(tmp_path, deliveries), None))
            done, _ = await asyncio.wait({waiting}, timeout=1.0)
            assert not done  # one node never answers
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert "Interrupted: the nodes were told to end the transfers of tiny." in reporter.warnings[0]
            return await distribute(client, plan_for(tmp_path, deliveries[:2]), None)

    client, reporter = client_of(tmp_path, [])
    one, two = asyncio.run(scenario())
    assert (one.moved, one.verified, one.error) == (900, True, None)
    assert two.error is not None
    assert "Rank 1's data did not get from maxwell to volta: " in two.error.message
    row = reporter.bars[0]
    assert (row.label, row.wanted, row.done) == ("hertz (2 rails)", 900, 700)


def test_a_node_that_answers_nonsense_is_named(tmp_path: Path) -> None:
    async def scenario() -> list[Delivered]:
        async with fake_node({Transfer: say(StopReply())}) as node:
            return await distribute(client, plan_for(tmp_path, (delivery(node=node, rank=0),)), None)

    client, _ = client_of(tmp_path, [])
    (outcome,) = asyncio.run(scenario())
    assert isinstance(outcome.error, RemoteProtocolError)
    assert "Rank 0's data did not get from maxwell to maxwell: " in outcome.error.message


def test_a_grant_that_is_too_large_is_refused_before_a_byte_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = client_of(tmp_path, [])
    monkeypatch.setattr(signed, "MAX_BODY", 500)
    deliveries = (delivery("maxwell", rank=0, source=None, source_rank=None, way=None), delivery())
    with pytest.raises(UnsupportedError, match=r"The grant for tiny would have .* Name fewer nodes at once"):
        asyncio.run(distribute(client, plan_for(tmp_path, deliveries), None))
