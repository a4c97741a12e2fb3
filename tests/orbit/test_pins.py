"""What a launch or a push brought is there when it is needed, however full the cache, on real agents."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from flare.cores.reference import LocalReference
from flare.errors import StorageError
from flare.orbit import distribution, launch, staging
from flare.orbit.client import Client
from flare.orbit.controller import Controller
from flare.orbit.pins import Pins
from flare.orbit.push import plan_push
from flare.orbit.push import plan_request as push_request
from flare.orbit.request import RunOptions, plan_request
from flare.orbit.resolve import resolve_local
from flare.orbit.upload import core_uploads, upload_files
from flare.paths import Paths
from flare.wire.messages import Have
from flare_workers.spawner import SpawnerHandle
from tests.cores.making import MIB, PUBLISHER
from tests.orbit.builders import node_entry
from tests.orbit.fake_node import client_of, fake_node, hang_up
from tests.orbit.lab import Lab
from tests.orbit.reporting import RecordingReporter
from tests.orbit.test_launch import make_core

SIZE = 3 * MIB
TRUST = ("--accept-publisher", PUBLISHER.fingerprint)


def limit(orbit: Lab, name: str, size: str) -> None:
    """Give a node's cache a limit, before its agent starts."""
    settings = orbit.folder / name / ".config/flare/config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'[agent]\ncache_limit = "{size}"\n')


def client_in(orbit: Lab) -> Client:
    paths = Paths.from_environment({"HOME": str(orbit.folder / "controller")})
    return Client(Controller.open(paths, RecordingReporter(True)))


class Another:
    """Somebody who sends another core to a node at the worst moment.

    Args:
        core: its primary.
    """

    def __init__(self, orbit: Lab, spawner: SpawnerHandle, core: Path) -> None:
        self.client = client_in(orbit)
        self.spawner = spawner
        self.files = core_uploads(resolve_local(LocalReference(str(core))))
        self.refusals: list[str] = []

    async def comes(self, name: str) -> None:
        try:
            await self.client_upload(name)
        except StorageError as refusal:
            self.refusals.append(refusal.message)

    async def client_upload(self, name: str) -> None:
        node = self.client.controller.orbit.node(name)
        await upload_files(self.client, node, self.files, self.spawner, streams=1)

    async def comes_at_last(self, name: str) -> None:
        """Send it when nobody needs the room any more; the node may not have noticed that yet."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self.client_upload(name)
                except StorageError:
                    await asyncio.sleep(0.05)


def cores(orbit: Lab, name: str) -> int:
    return len(list((orbit.folder / name / ".cache/flare/cores").iterdir()))


@pytest.mark.parametrize("source", ["", "hertz:"], ids=["uploaded", "fetched"])
def test_another_core_does_not_take_the_place_of_the_one_that_is_launched(
    orbit: Lab, tmp_path: Path, spawner: SpawnerHandle, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    limit(orbit, "maxwell", "5MiB")
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core", ranks=1, size=SIZE)
    another = Another(orbit, spawner, make_core(tmp_path / "another", ranks=1, size=SIZE + 1))
    start_rank_zero = launch._Starter.start_rank_zero

    async def late(starter: launch._Starter) -> Any:
        await another.comes("maxwell")
        return await start_rank_zero(starter)

    monkeypatch.setattr(launch._Starter, "start_rank_zero", late)
    client = client_in(orbit)

    async def scenario() -> None:
        words = RunOptions(core=f"{source}{core}", nodes=("maxwell",), accept_publisher=PUBLISHER.fingerprint)
        for _ in ("the core comes", "it is there"):
            plan = await launch.plan_launch(client, plan_request(client.controller.orbit, words))
            group = await launch.launch(client, plan, spawner)
            for stream in group.streams:
                await stream.session.close()
            stopped = await asyncio.to_thread(orbit.flare, "orbit", "stop")
            assert stopped.code == 0
        await another.comes_at_last("maxwell")

    asyncio.run(scenario())
    assert len(another.refusals) == 2
    assert "has room for" in another.refusals[0]
    assert cores(orbit, "maxwell") == 1


def test_a_core_does_not_take_the_place_of_the_executable_that_is_to_run_it(
    orbit: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawner: SpawnerHandle
) -> None:
    limit(orbit, "maxwell", "5MiB")
    orbit.paired("maxwell")
    first = make_core(tmp_path / "first", ranks=1, size=SIZE + 1)
    assert orbit.flare("orbit", "push", str(first), "--to", "maxwell", *TRUST).code == 0
    core = make_core(tmp_path / "core", ranks=1, size=SIZE)
    build = tmp_path / "build"
    program = (orbit.folder / "bin/flare").read_text()
    build.write_text(program.replace("Path(__file__).parent", f"Path({str(tmp_path)!r})"))
    build.chmod(0o755)
    stage_core = staging.stage_core

    async def stage(*arguments: Any) -> None:
        (entry,) = (orbit.folder / "maxwell/.cache/flare/cores").iterdir()
        os.utime(entry)  # the executable is what was used longest ago
        await stage_core(*arguments)

    monkeypatch.setattr(launch, "stage_core", stage)
    client = client_in(orbit)

    async def scenario() -> None:
        words = RunOptions(
            core=str(core),
            nodes=("maxwell",),
            accept_publisher=PUBLISHER.fingerprint,
            executable=str(build),
        )
        plan = await launch.plan_launch(client, plan_request(client.controller.orbit, words))
        group = await launch.launch(client, plan, spawner)
        for stream in group.streams:
            await stream.session.close()

    asyncio.run(scenario())
    assert orbit.flare("orbit", "stop").code == 0
    assert cores(orbit, "maxwell") == 1


@pytest.mark.parametrize("source", ["", "volta:"], ids=["uploaded", "fetched"])
def test_the_first_nodes_copy_stays_until_the_others_have_theirs(
    orbit: Lab, tmp_path: Path, spawner: SpawnerHandle, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    limit(orbit, "maxwell", "5MiB")
    orbit.paired("maxwell", "hertz", "volta")
    core = make_core(tmp_path / "core", ranks=1, size=SIZE)
    another = Another(orbit, spawner, make_core(tmp_path / "another", ranks=1, size=SIZE + 1))
    transfer = distribution.transfer

    async def late(client: Client, node: Any, *arguments: Any) -> Any:
        if node.name == "hertz":
            await another.comes("maxwell")
        return await transfer(client, node, *arguments)

    monkeypatch.setattr(distribution, "transfer", late)
    client = client_in(orbit)

    async def scenario() -> None:
        request = push_request(
            client.controller.orbit,
            f"{source}{core}",
            ["maxwell", "hertz"],
            accept_publisher=PUBLISHER.fingerprint,
        )
        outcomes = await distribution.distribute(client, await plan_push(client, request), spawner)
        distribution.raise_failures(outcomes)
        await another.comes_at_last("maxwell")

    asyncio.run(scenario())
    assert len(another.refusals) == 1
    assert (cores(orbit, "maxwell"), cores(orbit, "hertz")) == (1, 1)


def test_a_node_that_cannot_pin_is_left_to_what_needs_it(tmp_path: Path) -> None:
    core = resolve_local(LocalReference(str(make_core(tmp_path / "core", ranks=1))))

    async def scenario() -> None:
        async with fake_node({Have: hang_up}) as node:
            client, _ = client_of(tmp_path, [node])
            async with Pins(client) as pins:
                await pins.keep(core, node)
                await pins.keep(core, node)  # on a session of its own: the first one ended
                await pins.keep(core, node_entry(9, "nobody"))

    asyncio.run(scenario())
