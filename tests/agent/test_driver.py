"""A driver that does not answer: who asks about devices is answered, and the agent ends when it is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flare.agent import sampler as sampling
from flare.agent.driver import ask_driver
from flare.agent.gpus import Reading
from flare.agent.group_requests import check_answering
from flare.agent.ranks import Ranks
from flare.agent.sampler import Sampler
from flare.cli.orbit_status import _print
from flare.errors import PlacementError
from flare.wire import messages
from flare.wire.messages import Metrics, Status
from tests.agent.test_device_memory import GPU_0, GPU_1, Node, gpu, new_node, stub  # noqa: F401
from tests.agent.transfer_world import until
from tests.agent.world import drive
from tests.orbit.builders import answer, node_entry

GIB = 1 << 30


@pytest.fixture
def quick_node(new_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:  # noqa: F811
    """Agents that wait for the driver for half a second."""

    def make(**settings: object) -> Node:
        return new_node(extra="import flare.agent.sampler as s; s.ANSWER_WITHIN = 0.5", **settings)

    return make


def test_status_and_run_are_answered_and_the_agent_ends(quick_node: Callable[..., Node]) -> None:
    node = quick_node()
    silence = r"GPU 0 does not answer: the NVIDIA driver has not answered for \d+ s; check `nvidia-smi`; "

    async def scenario() -> None:
        assert (await node.ask(Status())).gpus[0].memory_free == 95 * GIB
        node.silent.touch()
        await until(lambda: told(1))
        began = time.monotonic()
        status = await node.ask(Status())
        assert [(each.uuid, each.memory_free) for each in status.gpus] == [(GPU_0, 0), (GPU_1, 0)]
        assert all(each.problem is not None and "has not answered" in each.problem for each in status.gpus)
        for gpus in ((GPU_0,), ()):
            with pytest.raises(PlacementError, match=silence):
                await node.ask(node.request(gpus=gpus))
        assert (await node.ask(Metrics())).gpus[0].utilization is None
        assert time.monotonic() - began < 5
        node.silent.unlink()
        while (await node.ask(Status())).gpus[0].memory_free != 95 * GIB:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert (await node.run_to_exit()).status == 0
        node.silent.touch()
        await until(lambda: told(2))

    def told(times: int) -> bool:
        return node.agent.log().count("WARNING the NVIDIA driver has not answered") == times

    try:
        drive(scenario())
        began = time.monotonic()
        assert node.agent.stop() == 0
        assert time.monotonic() - began < 10
    finally:
        node.silent.unlink(missing_ok=True)
    assert node.agent.log().count("the NVIDIA driver answers again") == 1


def test_an_agent_starts_beside_a_driver_that_hangs(quick_node: Callable[..., Node]) -> None:
    async def scenario() -> None:
        assert (await node.ask(Status())).gpus == ()
        with pytest.raises(
            PlacementError, match=r"The devices of this node are not known: the NVIDIA driver"
        ):
            await node.ask(node.request())
        node.silent.unlink()
        while not (await node.ask(Status())).gpus:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert (await node.run_to_exit()).status == 0

    node = quick_node(silent_from_the_start=True)
    try:
        drive(scenario())
    finally:
        node.silent.unlink(missing_ok=True)


def test_only_devices_that_are_wanted_must_answer() -> None:
    lost = "GPU 1 does not answer: GPU is lost; nothing is placed on it until it does"
    readings = [gpu(95 * GIB), gpu(0, index=1, uuid=GPU_1, problem=lost)]
    check_answering(readings, (GPU_0,), None)
    check_answering(readings, (), None)  # the whole node, of which another device answers
    with pytest.raises(PlacementError, match=f"^{lost}\\.$"):
        check_answering(readings, (GPU_0, GPU_1), None)
    with pytest.raises(PlacementError, match=f"^{lost}\\.$"):
        check_answering(readings[1:], (), None)
    check_answering([], (), None)


class Stuck:
    """Devices whose driver answers when it is told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def read(self) -> list[Reading]:
        assert self.answer.wait(30)
        return [gpu(1), Reading(0, "CPU-0", "cpu", "cpu", 100, 50, host_memory=True)]


def test_nobody_waits_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ANSWER_WITHIN", 0.3)

    async def scenario() -> None:
        devices = Stuck()
        devices.answer.set()
        sampler = Sampler(devices, Ranks())
        assert (await sampler.answered_readings())[0].memory_free == 1
        devices.answer.clear()
        began = time.monotonic()
        reading, cpu = await sampler.answered_readings() if await _aged(sampler) else ()
        first = time.monotonic() - began
        assert reading.problem is not None
        assert (reading.memory_free, cpu.memory_free, cpu.problem) == (0, 50, None)  # the CPU is no driver's
        began = time.monotonic()
        await sampler.answered_readings()
        assert time.monotonic() - began < 0.2 <= first
        devices.answer.set()
        await until(lambda: not sampler.asking)
        assert sampler.readings[0].problem is None

    async def _aged(sampler: Sampler) -> bool:
        await asyncio.sleep(sampling.FRESH + 0.05)
        return True

    drive(scenario())


def test_a_call_that_never_returns_does_not_hold_the_loops_end() -> None:
    never = threading.Event()

    def fail() -> Any:
        raise ValueError("no device")

    async def scenario() -> None:
        assert await ask_driver(lambda: 5) == 5
        with pytest.raises(ValueError, match="no device"):
            await ask_driver(fail)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask_driver(never.wait), 0.1)

    began = time.monotonic()
    drive(scenario())
    assert time.monotonic() - began < 5
    never.set()


def test_a_person_reads_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    lost = "GPU 0 does not answer: GPU is lost; nothing is placed on it until it does"
    told = answer(node_entry(1, "maxwell"))
    assert told.reply is not None
    broken = messages.GpuReport(0, GPU_0, "GPU", "gb202", 10, 0, problem=lost)
    _print([replace(told, reply=replace(told.reply, gpus=(broken,)))])
    assert f"maxwell: {lost}." in capsys.readouterr().err


def test_reports_carry_the_problem() -> None:
    report = messages.GpuReport(0, GPU_0, "GPU", "gb202", 10, 0, problem="it is lost")
    assert messages.GpuReport.parse(report.to_json(), "gpu") == report
