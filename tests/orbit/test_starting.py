"""Starting the ranks of a launch: who is stopped when one refuses, and who gets which rendezvous port."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.errors import BusyError
from flare.orbit.acceptance import accept_publisher
from flare.orbit.candidates import place_core
from flare.orbit.client import Client
from flare.orbit.launch import Plan, launch
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.request import RunOptions, plan_request
from flare.orbit.resolve import resolve_local
from flare.session import Session
from flare.wire.messages import Error, Exit, Message, Run, RunReply, Status, StatusReply, Stop, StopReply
from tests.cores.making import PUBLISHER, write_core
from tests.native.build import build_nvml_stub
from tests.orbit.builders import answer
from tests.orbit.fake_node import client_of, fake_node
from tests.orbit.lab import Lab, wait_for

BUSY = Error("busy", "a group holds that device")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


class Node:
    """Answers RUN with what it is given, one after the other: OK, an error, or None for a lost connection."""

    def __init__(self, *answers: Error | bool | None, ports: tuple[int, ...] = (29800,)) -> None:
        self.answers = list(answers)
        self.ports = list(ports)
        self.runs: list[dict[str, Any]] = []
        self.stops: list[str | None] = []

    def functions(self) -> dict[type[Message], Any]:
        return {Run: self.run, Stop: self.stop, Status: self.status}

    async def run(self, session: Session, request: Message) -> None:
        assert isinstance(request, Run)
        grant = json.loads(request.grant.body)
        self.runs.append(grant)
        answered = self.answers.pop(0)
        if answered is None:
            session.abort("the test says so")
        else:
            await session.send(RunReply(17, grant["group"]) if answered is True else answered)

    async def stop(self, session: Session, request: Message) -> None:
        assert isinstance(request, Stop)
        self.stops.append(request.group)
        await session.send(StopReply())
        await session.send(Exit(status=0))

    async def status(self, session: Session, request: Message) -> None:
        assert isinstance(request, Status)
        port = self.ports.pop(0) if len(self.ports) > 1 else self.ports[0]
        here = NodeEntry("maxwell", session.peer_key, "maxwell:29900")
        reply = answer(here).reply
        assert isinstance(reply, StatusReply)
        await session.send(replace(reply, address="10.0.0.1", rendezvous_port=port))


def plan_of(client: Client, folder: Path, nodes: list[NodeEntry]) -> Plan:
    """A launch of a core that rank zero's node reads in place."""
    count = len(nodes)
    core = write_core(
        folder,
        {"model/Tiny.gguf": b"x" * 3000},
        engine="llama.cpp",
        ranks=count,
        parallel={"tensor": 1, "pipeline": count},
        rank_ranges=[None] + [[]] * (count - 1),
    )
    names = tuple(node.name for node in nodes)
    words = RunOptions(core=str(core), nodes=names, accept_publisher=PUBLISHER.fingerprint)
    request = plan_request(client.controller.orbit, words)
    found = replace(resolve_local(request.reference), source=nodes[0])  # type: ignore[arg-type]
    publisher = accept_publisher(client.controller, found, trust_store=None, accepted=PUBLISHER.fingerprint)
    return Plan(
        request=request,
        core=found,
        publisher=publisher,
        name="glm",
        placement=place_core(found, [answer(node) for node in nodes], listed=True, gpu_indices=None),
        nodes=tuple(nodes),
        executables=dict.fromkeys(names, "/usr/bin/flare"),
        override=None,
        rendezvous="10.0.0.1:29800",
        cache_free=1 << 40,
        fabric=None,
        way=None,
        held=False,
        accepted=True,
    )


def test_every_member_that_did_not_refuse_is_stopped(tmp_path: Path) -> None:
    zero, refusing, lost = Node(True), Node(BUSY), Node(None)

    async def scenario() -> None:
        async with (
            fake_node(zero.functions(), name="maxwell") as first,
            fake_node(refusing.functions(), name="hertz") as second,
            fake_node(lost.functions(), name="volta") as third,
        ):
            client, _ = client_of(tmp_path, [first, second, third])
            with pytest.raises(BusyError, match="a group holds that device"):
                await launch(client, plan_of(client, tmp_path / "core", [first, second, third]), None)

    run(scenario())
    launch_id = zero.runs[0]["group"]
    assert (zero.stops, refusing.stops, lost.stops) == ([launch_id], [], [launch_id])


def test_a_rendezvous_port_that_was_taken_meanwhile_is_asked_for_again(tmp_path: Path) -> None:
    zero, peer = Node(BUSY, True, ports=(29801, 29802)), Node(True)

    async def scenario() -> None:
        async with (
            fake_node(zero.functions(), name="maxwell") as first,
            fake_node(peer.functions(), name="hertz") as second,
        ):
            client, _ = client_of(tmp_path, [first, second])
            group = await launch(client, plan_of(client, tmp_path / "core", [first, second]), None)
            for stream in group.streams:
                await stream.session.close()

    run(scenario())
    # 29800 is what the plan was told, before the core was staged.
    assert [grant["rendezvous"] for grant in zero.runs] == ["10.0.0.1:29801", "10.0.0.1:29802"]
    assert [grant["rendezvous"] for grant in peer.runs] == ["10.0.0.1:29802"]
    assert (zero.stops, peer.stops) == ([], [])


def test_a_rank_zero_that_is_busy_with_something_else_is_asked_once(tmp_path: Path) -> None:
    zero, peer = Node(BUSY, ports=(29800,)), Node()

    async def scenario() -> None:
        async with (
            fake_node(zero.functions(), name="maxwell") as first,
            fake_node(peer.functions(), name="hertz") as second,
        ):
            client, _ = client_of(tmp_path, [first, second])
            with pytest.raises(BusyError, match="a group holds that device"):
                await launch(client, plan_of(client, tmp_path / "core", [first, second]), None)

    run(scenario())
    assert (len(zero.runs), peer.runs, zero.stops, peer.stops) == (1, [], [], [])


class GpuLab(Lab):
    """Agents on hosts with two GPUs each, through the real binding of NVML."""

    def environment(self, home: Path) -> dict[str, str]:
        stub = {"LD_LIBRARY_PATH": str(self.folder / "nvml"), "NVML_STUB_DEVICES": "2"}
        return Lab.environment(self, home) | stub


def test_two_launches_at_once_on_one_rank_zero_host(tmp_path: Path) -> None:
    (tmp_path / "nvml").mkdir()
    build_nvml_stub(tmp_path / "nvml")
    orbit = GpuLab(tmp_path)
    core = write_core(
        tmp_path / "core",
        {"model/Tiny.gguf": b"x" * 3000},
        engine="llama.cpp",
        revision="gb202",
        ranks=2,
        parallel={"tensor": 1, "pipeline": 2},
        rank_ranges=[None, []],
    )
    try:
        orbit.paired("maxwell", "hertz")
        where = f"maxwell:{core}"  # read in place: two uploads of one core at once exclude each other
        launches = []
        for gpu in (0, 1):
            argv, environment = orbit.command(
                *("orbit", "run", where, "--nodes", "maxwell,hertz", "--gpus", str(gpu), "--detach"),
                *("--name", f"glm-{gpu}", "--port", str(8123 + gpu)),
                *("--accept-publisher", PUBLISHER.fingerprint),
            )
            launches.append(
                subprocess.Popen(
                    argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        for process in launches:
            shown, _ = process.communicate(timeout=60)
            assert process.returncode == 0, shown
        wait_for(lambda: [each["state"] for each in orbit.runs()] == ["running", "running"])
        stopped = orbit.flare("orbit", "stop", "--now")
        assert stopped.code == 0, stopped
        said = orbit.flare("orbit", "attach").out
    finally:
        for name in tuple(orbit.agents):
            orbit.end(name)
    ports = re.findall(r"rank 0 maxwell\] rank 0 says hello .* --rendezvous \S+:(\d+)", said)
    assert len(ports) == len(set(ports)) == 2, said
