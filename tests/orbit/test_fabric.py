"""Which way core bytes take: asked from nodes, good and bad ones, and told before anything moves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from flare.errors import FlareError, UnreachableError, VersionError
from flare.orbit.fabric import Way, endpoint_of, find_way, plan_fabric
from flare.trust.grants import TransferFabric
from flare.wire.messages import Fabric, FabricReply
from flare.wire.messages.transfers import EndpointReport, LinkReport
from tests.cores.making import PUBLISHER, pattern, write_core
from tests.orbit.fake_node import client_of, fake_node, hang_up, say
from tests.orbit.lab import Lab, lab

TRUST = ("--accept-publisher", PUBLISHER.fingerprint)


@pytest.fixture
def orbit(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def endpoint(address: str, interface: str = "enp1s0") -> EndpointReport:
    return EndpointReport("mlx5_0", 1, interface, address, 24, "aa:00:00:00:00:01", "0000:01:00.0")


def planned(
    folder: Path, reports: Sequence[Sequence[EndpointReport] | None], **options: Any
) -> tuple[TransferFabric | None, tuple[Any, ...]]:
    """Plan over fake nodes with these endpoints; None hangs up."""

    async def scenario() -> tuple[TransferFabric | None, tuple[Any, ...]]:
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(
                    fake_node(
                        {Fabric: hang_up if report is None else say(FabricReply(tuple(report)))},
                        name=f"node{number}",
                        protocol=options.get("protocols", {}).get(number, 7),
                    )
                )
                for number, report in enumerate(reports)
            ]
            client, _ = client_of(folder, nodes)
            ring, chain = options.get("ring", False), options.get("chain", False)
            return await plan_fabric(client, nodes, ring=ring, chain=chain), tuple(nodes)

    return asyncio.run(scenario())


def test_a_chain_passes_through_its_middle(tmp_path: Path) -> None:
    reports = [
        [endpoint("10.0.0.1")],
        [endpoint("10.0.0.2"), endpoint("10.0.1.1", "enp2s0")],
        [endpoint("10.0.1.2")],
    ]
    fabric, nodes = planned(tmp_path, reports, chain=True)
    assert find_way(fabric, nodes, 0, 2, 8) == Way(1, ("node1",), 8)
    assert str(find_way(fabric, nodes, 0, 2, 1)) == "over 1 rail through node1, 1 stream"
    assert str(find_way(fabric, nodes, None, 2, 8)) == "over its paired address, 1 stream"
    assert find_way(fabric, nodes, None, 0, 8).short == "paired address"
    port = int(nodes[0].address.rpartition(":")[2])
    assert fabric is not None
    assert fabric.links[0][1][0].from_address == f"10.0.0.1:{port}"


def test_no_endpoint_anywhere_leaves_the_paired_addresses(tmp_path: Path) -> None:
    fabric, nodes = planned(tmp_path, [[], []])
    assert fabric is None
    assert find_way(fabric, nodes, 0, 1, 5) == Way(0, (), 5)


def test_a_ring_that_was_asked_for_and_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        UnreachableError, match="--roce-ring sends the core's bytes over fabric interfaces, but"
    ):
        planned(tmp_path, [[], []], ring=True)
    with pytest.raises(UnreachableError, match="--roce-chain"):
        planned(tmp_path, [[], []], chain=True)
    reports = [[endpoint("10.0.0.1")], [endpoint("10.0.0.2")], [endpoint("10.0.9.3")]]
    with pytest.raises(UnreachableError, match="no link between rank 1 on node1"):
        planned(tmp_path, reports, ring=True)


def test_a_node_without_fabric_among_others_that_have_it_is_refused(tmp_path: Path) -> None:
    fabric, nodes = planned(tmp_path, [[endpoint("10.0.0.1")], [endpoint("10.0.0.2")], []])
    assert find_way(fabric, nodes, 0, 1, 8).rails == 1
    with pytest.raises(
        UnreachableError, match=r"node2 cannot receive the core from node0 .* nothing was sent"
    ):
        find_way(fabric, nodes, 0, 2, 8)


def test_every_agent_on_the_way_must_answer_and_speak_the_same_protocol(tmp_path: Path) -> None:
    with pytest.raises(VersionError, match=r"node1.*speaks agent protocol 6, this side 7"):
        planned(tmp_path, [[], [], []], protocols={1: 6})
    with pytest.raises(FlareError, match="node1"):
        planned(tmp_path, [[], None, []])
    with pytest.raises(
        UnreachableError, match=r"Planning the way .* needs every node(.|\n)*node1(.|\n)*node2"
    ):
        planned(tmp_path, [[], None, None])


def test_an_endpoint_comes_to_the_planner_as_it_was_reported() -> None:
    report = EndpointReport(
        "mlx5_1", 2, "enp", "10.0.0.1", 24, "aa", "0000:01:00.1", LinkReport(32.0, 4), ({"port": "p1"},)
    )
    made = endpoint_of(report)
    assert made.link is not None
    assert (made.link.capacity, made.lldp[0].port, made.half) == (128.0, "p1", "0000:01:00")


def test_rank_zero_of_a_launch_fetches_over_the_fabric(orbit: Lab, tmp_path: Path) -> None:
    for name in ("maxwell", "hertz"):
        settings = orbit.folder / name / ".config/flare/config.toml"
        settings.parent.mkdir(parents=True)
        settings.write_text('[fabric]\ninterfaces = ["lo"]\n')
    orbit.paired("maxwell", "hertz")
    core = write_core(
        tmp_path / "core",
        {"model/Tiny.gguf": pattern(3000)},
        engine="llama.cpp",
        ranks=2,
        parallel={"tensor": 1, "pipeline": 2},
        rank_ranges=[None, []],
    )
    words = ("orbit", "run", f"hertz:{core}", "--nodes", "maxwell,hertz", "--name", "glm", *TRUST)
    first = orbit.flare(*words, "--persistent", "--detach", "--roce-ring", "--transfer-streams", "3")
    assert first.code == 0, first
    assert "maxwell fetches the core from hertz over 1 rail, 3 streams" in first.out
    assert orbit.flare("orbit", "stop", "glm", "--now").code == 0
    saved = orbit.orbit_file.read_text()
    assert "roce_ring = true" in saved
    assert "transfer_streams = 3" in saved
    held = orbit.flare("orbit", "run", "--name", "glm", "--dry-run")
    assert "rank 0  maxwell  the CPU (cpu)  holds its data already" in held.out
    assert "fetches" not in held.out
    for directory in (orbit.folder / "maxwell/.cache/flare/cores").iterdir():
        shutil.rmtree(directory)
    again = orbit.flare("orbit", "run", "--name", "glm", "--dry-run", "--transfer-streams", "2")
    assert "over 1 rail, 2 streams" in again.out
    chained = orbit.flare("orbit", "run", "--name", "glm", "--dry-run", "--roce-chain")
    assert chained.code == 0
    both = orbit.flare("orbit", "run", "--name", "glm", "--dry-run", "--roce-chain", "--roce-ring")
    assert both.code == 2
    assert "both say how the nodes are cabled" in both.err
    orbit.orbit_file.write_text(saved.replace("roce_chain = false", "roce_chain = true"))
    damaged = orbit.flare("orbit", "ls")
    assert damaged.code == 3
    assert "roce_ring and roce_chain of" in damaged.err
