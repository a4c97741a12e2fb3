"""The end of a run and its devices' memory: agents with real NVML bindings over a stub, and single rules."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.agent.device_memory import TOLERANCE, DeviceMemory
from flare.agent.gpus import Reading
from flare.errors import BusyError
from flare.session import Session
from flare.wire import messages
from flare.wire.messages import GroupReport, Metrics, Status, Stop
from tests.agent.world import Agent, Peer, drive, lines_to_exit, lines_until
from tests.native.build import build_nvml_stub

GIB = 1 << 30
HELD = 41 << 10  # MiB; a free GPU 0 of the stub uses 1024
GPU_0, GPU_1 = (f"GPU-00000000-0000-0000-0000-{number:012d}" for number in (0, 1))


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml_stub(tmp_path_factory.mktemp("nvml"))


class Node:
    """A paired agent with two GPUs, whose memory the test moves."""

    def __init__(self, agent: Agent, controller: Peer, folder: Path) -> None:
        self.agent = agent
        self.controller = controller
        self.memory = folder / "memory"
        self.faults = folder / "faults"
        self.silent = folder / "silent"
        self.number = 0

    def use(self, **mebibytes: int) -> None:
        """Say what GPUs use: gpu_0=1024."""
        lines = "".join(f"{name.removeprefix('gpu_')} {number}\n" for name, number in mebibytes.items())
        fresh = self.memory.with_suffix(".new")
        fresh.write_text(lines)
        fresh.rename(self.memory)

    def request(self, *behaviours: str, gpus: Sequence[str] = (GPU_0,)) -> messages.Run:
        """Return a RUN of a new launch."""
        self.number += 1
        zero, own = self.controller.grant(self.agent).members
        return self.controller.run_request(
            self.agent,
            *behaviours,
            launch=f"glm-20261130T120000Z-{self.number:04d}",
            members=(zero, replace(own, gpus=tuple(gpus))),
        )

    @contextlib.asynccontextmanager
    async def running(self, gpus: Sequence[str] = (GPU_0,)) -> AsyncIterator[tuple[Session, int]]:
        """Start a rank that is ready; yield its session and process."""
        async with self.controller.session(self.agent) as session:
            reply = await session.request(self.request(gpus=gpus))
            await lines_until(session, "ready")
            yield session, reply.pid

    async def run_to_exit(self, *, gpus: Sequence[str] = (GPU_0,)) -> messages.Exit:
        """Run a rank that ends by itself."""
        async with self.controller.session(self.agent) as session:
            await session.request(self.request("exit:0", gpus=gpus))
            return (await lines_to_exit(session))[1]

    async def ask(self, request: messages.Message) -> Any:
        return await self.controller.ask(self.agent, request)

    async def group(self) -> GroupReport:
        """Return what METRICS says of the last launch; unlike STATUS it reads no device."""
        report: GroupReport = (await self.ask(Metrics())).groups[-1].report
        return report

    async def without_process(self) -> GroupReport:
        """Wait until the last launch has no process; return what is said of it then."""
        while (group := await self.group()).pid is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return group


@pytest.fixture
def new_node(
    new_agent: Callable[..., Agent], controller: Peer, stub: Path, tmp_path: Path
) -> Callable[..., Node]:
    def make(
        *, within: float = 60.0, extra: str = "", silent_from_the_start: bool = False, **settings: object
    ) -> Node:
        environment = {
            "LD_LIBRARY_PATH": str(stub),
            "NVML_STUB_DEVICES": "2",
            **{f"NVML_STUB_{name.upper()}": str(tmp_path / name) for name in ("memory", "faults", "silent")},
            **{f"NVML_STUB_{name.upper()}": str(value) for name, value in settings.items()},
        }
        agent = new_agent(environment=environment)
        bound = f"    import flare.agent.device_memory as memory\n    memory.BACK_WITHIN = {within}\n"
        bound += f"    {extra}\n"
        if silent_from_the_start:
            (tmp_path / "silent").touch()
        launcher = agent.launcher.read_text()
        agent.launcher.write_text(launcher.replace("else:\n", f"else:\n{bound}"))
        agent.start("--accept-first")
        drive(controller.pair(agent, None))
        return Node(agent, controller, tmp_path)

    return make


@pytest.mark.parametrize("gpus", [(GPU_0,), ()])
def test_a_stop_ends_when_the_memory_is_back(new_node: Callable[..., Node], gpus: tuple[str, ...]) -> None:
    node = new_node()
    held, free = ("gpu_0", 1024) if gpus else ("gpu_1", 2048)  # without GPUs it has the whole node

    async def scenario() -> None:
        async with node.running(gpus) as (session, _), node.controller.session(node.agent) as stopper:
            node.use(**{held: HELD})
            await stopper.request(Stop())
            ended = asyncio.create_task(stopper.receive(messages.Exit, timeout=60))
            group = await node.without_process()
            assert (group.state, group.phase, group.url) == ("running", "serving", None)
            status = await node.ask(Status())
            assert status.gpus[0].group == group.launch
            with pytest.raises(BusyError, match=r"holds the GPU GPU-|holds the whole node"):
                await node.ask(node.request())
            node.use(**{held: free + 2 * (TOLERANCE >> 20)})
            await asyncio.sleep(0.7)  # two looks
            assert not ended.done()
            node.use(**{held: free + (TOLERANCE >> 20)})
            assert await ended == messages.Exit(status=0)
            lines, ending = await lines_to_exit(session)
            assert (lines[-1], ending) == ("draining", messages.Exit(status=0))
        assert (await node.run_to_exit()).status == 0

    drive(scenario())
    assert "nvidia-smi" not in node.agent.log()


def test_other_devices_are_free_meanwhile(new_node: Callable[..., Node]) -> None:
    node = new_node()

    async def scenario() -> None:
        async with node.running() as (session, process):
            node.use(gpu_0=HELD)
            os.kill(process, signal.SIGKILL)
            await node.without_process()
            assert (await node.run_to_exit(gpus=(GPU_1,))).status == 0
            node.use()
            assert (await lines_to_exit(session))[1].reason == "ended by SIGKILL"

    drive(scenario())


def test_memory_that_stays_away_ends_the_wait_with_a_remark(new_node: Callable[..., Node]) -> None:
    node = new_node(within=1.0)
    remark = (
        "GPU 0 still holds 40.0 GiB more than before the group started, 1 s after its last process ended; "
        "see with `nvidia-smi` what uses it"
    )

    async def scenario() -> None:
        async with node.running() as (session, process):
            node.use(gpu_0=HELD)
            began = time.monotonic()
            os.kill(process, signal.SIGKILL)
            lines, ended = await lines_to_exit(session)
            assert time.monotonic() - began > 0.5
            assert (ended.signal, ended.reason) == (signal.SIGKILL, f"ended by SIGKILL; {remark}")
            assert ended.remark == remark
            assert lines[-1] == f"flare: {remark}"
        status = await node.ask(Status())
        assert (status.groups[0].state, status.gpus[0].group) == ("failed", None)
        assert status.groups[0].remark == remark
        # What is missing before a run starts is not missed after it.
        ended = await node.run_to_exit()
        assert ended == messages.Exit(status=0)

    drive(scenario())
    assert f"the group glm (glm-20261130T120000Z-0001) has ended: {remark}\n" in node.agent.log()


def test_a_driver_that_hangs_holds_neither_the_run_nor_the_agent(new_node: Callable[..., Node]) -> None:
    node = new_node(within=1.0)

    async def scenario() -> None:
        async with node.running() as (session, process):
            node.silent.touch()
            os.kill(process, signal.SIGKILL)
            await node.without_process()  # other requests are answered
            _, ended = await lines_to_exit(session)
            assert ended.reason == (
                "ended by SIGKILL; the NVIDIA driver did not answer for 1 s, so whether the memory of GPU 0 "
                "is free again is not known; check `nvidia-smi`"
            )
            assert (await node.group()).state == "failed"
        node.silent.unlink()
        assert (await node.ask(Status())).gpus[0].memory_free == 95 * GIB

    try:
        drive(scenario())
    finally:
        node.silent.unlink(missing_ok=True)


def test_a_gpu_that_is_lost_does_not_hold_the_run_longer(new_node: Callable[..., Node]) -> None:
    node = new_node(within=1.0)

    async def scenario() -> None:
        async with node.running() as (session, process):
            node.faults.write_text("0 15")
            os.kill(process, signal.SIGKILL)
            _, ended = await lines_to_exit(session)
            assert ended.reason == (
                "ended by SIGKILL; GPU 0 does not answer: GPU is lost; nothing is placed on it until it "
                "does, and whether its memory is free again is not known"
            )

    drive(scenario())


def test_a_gpu_that_shares_the_hosts_memory_is_not_even_read(new_node: Callable[..., Node]) -> None:
    node = new_node(model="gb10")

    async def scenario() -> None:
        async with node.running(()), node.controller.session(node.agent) as stopper:
            node.silent.touch()
            await stopper.request(Stop())
            assert await stopper.receive(messages.Exit, timeout=30) == messages.Exit(status=0)

    try:
        drive(scenario())
    finally:
        node.silent.unlink(missing_ok=True)


def test_an_agent_that_ends_does_not_wait_for_memory(new_node: Callable[..., Node]) -> None:
    node = new_node()
    assert node.agent.process is not None
    process = node.agent.process

    async def scenario() -> None:
        async with node.running() as (waiting, rank), node.running((GPU_1,)) as (stopped, _):
            node.use(gpu_0=HELD, gpu_1=HELD)
            os.kill(rank, signal.SIGKILL)
            while (await node.ask(Metrics())).groups[0].report.pid is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert (await lines_to_exit(waiting))[1].reason == "ended by SIGKILL"
            assert (await lines_to_exit(stopped))[1] == messages.Exit(status=0)

    drive(scenario())
    assert node.agent.ended(30) == 0


# -- single rules --------------------------------------------------------------------------------


def gpu(free: int, **changes: Any) -> Reading:
    return Reading(**{"index": 0, "uuid": GPU_0, "name": "GPU", "revision": "gb202", "memory_total": 96 * GIB,
                      "memory_free": free, **changes})  # fmt: skip


class Source:
    """Gives one list of readings after another, and the last one again."""

    def __init__(self, *answers: list[Reading]) -> None:
        self.answers = list(answers)
        self.reads = 0

    async def fresh_readings(self, max_age: float = 0.5) -> tuple[Reading, ...]:
        assert max_age == 0
        self.reads += 1
        return tuple(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


def wait(source: Source, before: list[Reading], gpus: tuple[str, ...] = ()) -> str | None:
    return asyncio.run(DeviceMemory(source, gpus, before).wait_until_back())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.agent.device_memory.BACK_WITHIN", 0.2)
    monkeypatch.setattr("flare.agent.device_memory.LOOK_INTERVAL", 0.01)


@pytest.mark.parametrize(
    "before",
    [
        gpu(95 * GIB, host_memory=True),
        gpu(95 * GIB, uuid="CPU-0123456789abcdef", revision="cpu", host_memory=True),
        gpu(0, problem="GPU 0 does not answer: GPU is lost; nothing is placed on it until it does"),
    ],
)
def test_a_device_with_nothing_to_compare_is_not_read(before: Reading) -> None:
    source = Source([gpu(0)])
    assert wait(source, [before]) is None
    assert source.reads == 0


def test_the_devices_of_others_are_not_compared() -> None:
    before = [gpu(95 * GIB), gpu(94 * GIB, index=1, uuid=GPU_1)]
    source = Source([gpu(95 * GIB), gpu(0, index=1, uuid=GPU_1)])
    assert wait(source, before, (GPU_0,)) is None
    assert source.reads == 1


def test_a_device_that_is_gone_has_nothing_to_give_back() -> None:
    assert wait(Source([gpu(0, uuid=GPU_1)]), [gpu(95 * GIB)]) is None


@pytest.mark.usefixtures("soon")
def test_it_looks_until_all_is_back() -> None:
    lost = gpu(0, problem="GPU 0 does not answer: Unknown Error; nothing is placed on it until it does")
    source = Source([gpu(5 * GIB)], [lost], [gpu(95 * GIB - TOLERANCE - 1)], [gpu(95 * GIB - TOLERANCE)])
    assert wait(source, [gpu(95 * GIB)]) is None
    assert source.reads == 4


@pytest.mark.usefixtures("soon")
def test_every_device_that_lacks_memory_is_named() -> None:
    before = [gpu(95 * GIB), gpu(94 * GIB, index=1, uuid=GPU_1)]
    remark = wait(Source([gpu(5 * GIB), gpu(4 * GIB, index=1, uuid=GPU_1)]), before)
    assert remark is not None
    assert [part.split(" more")[0] for part in remark.split("; ") if part.startswith("GPU")] == [
        "GPU 0 still holds 90.0 GiB",
        "GPU 1 still holds 90.0 GiB",
    ]
