"""The exit code of a launch that has no place, and of commands of which several nodes fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flare.errors import (
    EngineError,
    FlareError,
    IdentityError,
    PlacementError,
    UnreachableError,
    VersionError,
)
from flare.orbit.client import Answer, common_kind, required
from flare.orbit.groups import warn_unreachable
from flare.orbit.no_place import kind_of_failure
from flare.orbit.status import state_of
from flare.placement import Gpu, Needs, Node
from tests.orbit.builders import GIB, node_entry
from tests.orbit.fake_node import client_of, fake_node
from tests.orbit.lab import Lab
from tests.orbit.test_launch import make_core

NEEDS = Needs("gb10", "multi_host", 2, (GIB, GIB), 0, "llama.cpp")
AWAY = UnreachableError("hertz is off.")
OLD = VersionError("hertz speaks protocol 6.")


def node(name: str, *, free: int = 8 * GIB, engines: tuple[str, ...] = ("llama.cpp",)) -> Node:
    return Node(name, (Gpu(0, f"{name}-0", "gb10", 8 * GIB, free),), engines=frozenset(engines))


@pytest.mark.parametrize(
    ("candidates", "kind"),
    [
        ([node("a"), ("b", AWAY)], UnreachableError),
        ([node("a"), ("b", OLD)], VersionError),
        ([("a", OLD), ("b", OLD)], VersionError),
        ([("a", AWAY), ("b", OLD)], PlacementError),
        ([node("a"), node("b", engines=())], EngineError),
        ([node("a", engines=("vllm",)), node("b", engines=())], EngineError),
        ([node("a"), node("b", free=0)], PlacementError),
        ([node("a", free=0), ("b", AWAY)], PlacementError),
        ([node("a", engines=()), ("b", AWAY)], PlacementError),
        ([node("a"), node("b", engines=(), free=0)], PlacementError),
        ([node("a")], PlacementError),
    ],
)
def test_what_would_have_to_be_otherwise(
    candidates: list[Node | tuple[str, FlareError]], kind: type[FlareError]
) -> None:
    for listed in (True, False):
        for indices in (None, (0,), ()):
            assert kind_of_failure(NEEDS, candidates, listed=listed, gpu_indices=indices) is kind


def test_a_reason_that_all_share_is_the_commands() -> None:
    assert common_kind([OLD, OLD], UnreachableError) is VersionError
    assert common_kind([OLD, AWAY], UnreachableError) is UnreachableError
    answers: list[Answer[None]] = [Answer(node_entry(1, "hertz"), None, None, OLD)] * 2
    with pytest.raises(VersionError, match="Pushing needs every node"):
        required(answers, "Pushing")


def test_a_state_says_why_a_node_is_of_no_use() -> None:
    hertz = node_entry(1, "hertz")
    states = {
        state_of(Answer(hertz, None, None, problem))
        for problem in (AWAY, OLD, IdentityError("changed"), None)
    }
    assert states == {"unreachable", "other version", "key changed"}


def test_nodes_of_another_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_node({}, protocol=6) as old:
            client, _ = client_of(tmp_path, [old])
            answers = await client.statuses([old])
            assert [state_of(answer) for answer in answers] == ["other version"]
            with pytest.raises(VersionError, match="No node answered"):
                warn_unreachable(client, answers)

    asyncio.run(scenario())


def test_a_changed_key_in_status(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    address = orbit.agents["hertz"].address
    orbit.end("hertz")
    (orbit.folder / "hertz/.config/flare/agent/node.key").unlink()
    orbit.start("hertz", listen=address)
    status = orbit.flare("orbit", "status")
    assert status.code == 0
    assert f"hertz    {address}  key changed" in status.out
    core = make_core(tmp_path / "core")
    run = orbit.flare("orbit", "run", str(core), "--dry-run")
    assert run.code == 5, run
    orbit.end("maxwell")
    both = orbit.flare("orbit", "status")
    assert (both.code, "unreachable" in both.out) == (4, True)
