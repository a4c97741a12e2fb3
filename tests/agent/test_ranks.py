"""Who holds which device, what is retained, what was seen before."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.agent.output import Line
from flare.agent.ranks import RETAIN_FULL_FAILURES, RETAIN_SECONDS, RETAIN_SUCCESSES, Ranks
from flare.agent.run import MAX_REASON, RankSpec, Run
from flare.errors import BusyError, ConflictError, NotFoundError, RankError
from flare.strict_json import canonical
from tests.rank.lab import never_loses_a_cancellation

FAKE = str(Path(__file__).with_name("fake_flare.py"))
GPUS = ("GPU-a", "GPU-b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def spec(launch: str, *behaviours: str, gpus: tuple[str, ...] = ("GPU-a",), **changes: Any) -> RankSpec:
    values: dict[str, Any] = {
        "launch": launch,
        "name": launch.rpartition("-")[0] or launch,
        "core": "core.safetensors",
        "rank": 0,
        "ranks": 1,
        "gpus": gpus,
        "command": (
            sys.executable, FAKE, *(f"--engine-arg={behaviour}" for behaviour in behaviours)
        ),
        "environment": {"PATH": os.environ["PATH"]},
        "expires": 0.0,
    }  # fmt: skip
    return RankSpec(**{**values, **changes})


def drive(scenario: Callable[[Ranks, Clock], Awaitable[None]]) -> None:
    async def main() -> None:
        clock = Clock()
        ranks = Ranks(clock=clock, wall_clock=clock)
        try:
            await asyncio.wait_for(scenario(ranks, clock), 30)
        finally:
            for run in ranks.running():
                run.kill()
            await ranks.close()

    asyncio.run(main())


async def finished(ranks: Ranks, launch: str, status: int) -> None:
    run = ranks.reserve(spec(launch, f"exit:{status}"), GPUS)
    await ranks.start(run)
    await run.gone.wait()


def test_one_of_two_that_want_a_device_wins() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        async def ask(launch: str) -> str:
            try:
                await ranks.start(ranks.reserve(spec(launch), GPUS))
            except BusyError as problem:
                return str(problem)
            return "started"

        answers = await asyncio.gather(*(ask(f"glm-{number}") for number in range(5)))
        assert answers.count("started") == 1
        refused = next(answer for answer in answers if answer != "started")
        assert "holds the GPU GPU-a. Stop it first" in refused

    drive(scenario)


def test_other_devices_run_beside_and_the_whole_node_does_not() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        await ranks.start(ranks.reserve(spec("a-1", gpus=("GPU-a",)), GPUS))
        await ranks.start(ranks.reserve(spec("b-1", gpus=("GPU-b",)), GPUS))
        assert ranks.holder_of("GPU-a") == "a-1"
        assert ranks.holder_of("GPU-b") == "b-1"
        with pytest.raises(BusyError, match="holds a GPU of this node"):
            ranks.reserve(spec("c-1", gpus=()), GPUS)
        await ranks.stop(ranks.find("a-1", running_only=True), now=False)
        await ranks.stop(ranks.find("b", running_only=True), now=False)
        assert ranks.holder_of("GPU-a") is None
        await ranks.start(ranks.reserve(spec("c-2", gpus=()), GPUS))
        assert ranks.holder_of("GPU-b") == "c-2"
        with pytest.raises(BusyError, match="holds the whole node"):
            ranks.reserve(spec("d-1"), GPUS)

    drive(scenario)


def test_one_of_two_that_want_a_rendezvous_port_wins() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        await ranks.start(ranks.reserve(spec("a-1", rendezvous_port=29800), GPUS))
        second = spec("b-1", gpus=("GPU-b",), rendezvous_port=29800)
        with pytest.raises(BusyError, match=r"group a \(a-1\) has the rendezvous port 29800"):
            ranks.reserve(second, GPUS)
        assert ranks.holder_of("GPU-b") is None
        ranks.check_unseen("b-1")  # it was refused, not started: it may come again
        await ranks.start(ranks.reserve(replace(second, rendezvous_port=29801), GPUS))
        await ranks.stop(ranks.find("a-1", running_only=True), now=False)
        await ranks.start(ranks.reserve(spec("c-1", rendezvous_port=29800), GPUS))

    drive(scenario)


def test_a_device_that_is_not_there() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        with pytest.raises(NotFoundError, match="no GPU GPU-z"):
            ranks.reserve(spec("a-1", gpus=("GPU-z",)), GPUS)

    drive(scenario)


def test_a_launch_starts_once() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        await finished(ranks, "glm-1", 0)
        with pytest.raises(ConflictError, match="was started on this node before"):
            ranks.reserve(spec("glm-1"), GPUS)
        ranks.remove("glm-1")
        with pytest.raises(ConflictError, match="was started on this node before"):
            ranks.check_unseen("glm-1")
        clock.now += 700  # its grant cannot be valid any more
        ranks.check_unseen("glm-1")

    drive(scenario)


def test_a_launch_stopped_before_it_came_does_not_start() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        ranks.stopped_before("glm-1")
        with pytest.raises(ConflictError, match="was stopped before it started here"):
            ranks.reserve(spec("glm-1"), GPUS)
        assert ranks.holder_of("GPU-a") is None
        clock.now += 700
        await finished(ranks, "glm-1", 0)

    drive(scenario)


def test_a_rank_that_cannot_start_frees_its_device(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        run = ranks.reserve(spec("a-1", command=(str(tmp_path / "nothing"),)), GPUS)
        with pytest.raises(RankError, match="No such file"):
            await ranks.start(run)
        assert ranks.all() == ()
        await ranks.start(ranks.reserve(spec("a-2"), GPUS))

    drive(scenario)


def test_find() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        with pytest.raises(NotFoundError, match="There is no group on this node"):
            ranks.find(None, running_only=False)
        with pytest.raises(NotFoundError, match="There is no running group x on this node"):
            ranks.find("x", running_only=True)
        await finished(ranks, "glm-1", 0)
        assert ranks.find(None, running_only=False).spec.launch == "glm-1"
        await ranks.start(ranks.reserve(spec("glm-2"), GPUS))
        assert ranks.find("glm", running_only=False).spec.launch == "glm-2"  # what runs now
        assert ranks.find("glm-1", running_only=False).spec.launch == "glm-1"
        with pytest.raises(
            ConflictError, match=r"Several groups are on this node: glm \(glm-1\), glm \(glm-2\)"
        ):
            ranks.find(None, running_only=False)
        assert ranks.find(None, running_only=True).spec.launch == "glm-2"
        await ranks.start(ranks.reserve(spec("glm-3", gpus=("GPU-b",)), GPUS))
        with pytest.raises(ConflictError, match="Name one by its launch"):
            ranks.find("glm", running_only=True)

    drive(scenario)


def test_last_launch_of_a_name_is_found_when_none_runs() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        await finished(ranks, "glm-1", 0)
        await finished(ranks, "glm-2", 3)
        assert ranks.find("glm", running_only=False).spec.launch == "glm-2"

    drive(scenario)


def test_successes_go_after_five_minutes_failures_stay() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        await finished(ranks, "good-1", 0)
        await finished(ranks, "bad-1", 1)
        clock.now += RETAIN_SECONDS - 1
        assert [report.launch for report in ranks.reports()] == ["good-1", "bad-1"]
        clock.now += 1
        assert [report.launch for report in ranks.reports()] == ["bad-1"]
        clock.now += 100_000
        [report] = ranks.reports()
        assert (report.state, report.status, report.gpus) == ("failed", 1, ("GPU-a",))
        ranks.remove("bad-1")
        assert ranks.reports() == ()

    drive(scenario)


def ended(launch: str, reason: str, output: int = 0) -> Run:
    run = Run(spec(launch), lambda: 0.0)
    run.ended, run.status, run.reason = 1.0, 1, reason
    for _ in range(output):
        run.output.append(Line("x" * 1023, "stdout"))
    return run


def test_reports_always_fit_into_status() -> None:
    ranks = Ranks()
    ranks._runs = {
        f"bad-{number}": ended(f"bad-{number}", "\U0001f525" * MAX_REASON) for number in range(2000)
    }
    reports = ranks.reports()
    assert [report.launch for report in reports] == [f"bad-{number}" for number in range(976, 2000)]
    with_reason = [report for report in reports if report.reason is not None]
    assert len(with_reason) == 1024 * 1024 // (12 * MAX_REASON + len(',"reason":""'))
    assert with_reason == list(reports[-len(with_reason) :])
    assert sum(len(canonical(report.to_json())) for report in reports) < 2 * 1024 * 1024


def test_what_runs_is_told_first() -> None:
    ranks = Ranks()
    running = Run(spec("alive-1"), lambda: 0.0)
    ranks._runs = {"alive-1": running} | {
        f"b-{number}": ended(f"b-{number}", "gone") for number in range(1024)
    }
    reports = ranks.reports()
    assert (len(reports), reports[0].launch, reports[1].launch) == (1024, "alive-1", "b-1")


def test_old_failures_keep_the_end_of_their_output() -> None:
    ranks = Ranks()
    count = RETAIN_FULL_FAILURES + 1
    ranks._runs = {f"b-{number}": ended(f"b-{number}", "gone", output=64) for number in range(count)}
    kept = [sum(line.size for line in run.output.retained) for run in ranks.all()]
    assert kept == [4096] + [64 * 1024] * RETAIN_FULL_FAILURES


def test_sixteen_successes_are_kept() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        await finished(ranks, "bad-0", 1)
        for number in range(RETAIN_SUCCESSES + 2):
            run = ranks.reserve(spec(f"n-{number}", command=("true",)), GPUS)
            await ranks.start(run)
            await run.gone.wait()
        launches = [report.launch for report in ranks.reports()]
        assert launches == ["bad-0", *(f"n-{number}" for number in range(2, RETAIN_SUCCESSES + 2))]

    drive(scenario)


def test_pruning_does_not_end_an_attached_stream() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        await finished(ranks, "glm-1", 0)
        stream = ranks.find("glm-1", running_only=False).output.follow()
        await anext(stream)
        clock.now += 1000
        assert ranks.all() == ()
        assert [line.text async for line in stream][-1] == "ready"

    drive(scenario)


def test_remove_refuses_what_runs_and_what_is_not_there() -> None:
    async def scenario(ranks: Ranks, clock: Clock) -> None:
        with pytest.raises(NotFoundError, match="There is no launch glm-1"):
            ranks.remove("glm-1")
        await ranks.start(ranks.reserve(spec("glm-1"), GPUS))
        with pytest.raises(BusyError, match="still runs"):
            ranks.remove("glm-1")

    drive(scenario)


def test_closing_ends_everything_and_takes_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.agent.ranks.SHUTDOWN_GRACE", 0.5)

    async def scenario(ranks: Ranks, clock: Clock) -> None:
        run = ranks.reserve(spec("glm-1", "stubborn"), GPUS)
        await ranks.start(run)
        async for line in run.output.follow():
            if line.text == "ready":
                break
        await ranks.close()
        assert run.state == "failed"
        with pytest.raises(BusyError, match="agent is stopping"):
            ranks.reserve(spec("glm-2"), GPUS)

    drive(scenario)


def test_an_end_of_the_agent_that_comes_with_the_last_ranks_is_not_lost() -> None:
    begun: list[Run] = []

    async def scenario(ranks: Ranks, clock: Clock) -> None:
        async def close() -> None:
            begun[:] = [Run(spec("glm-1"), clock)]
            ranks._runs = {"glm-1": begun[0]}
            await ranks.close()

        def ended() -> None:
            begun[0].gone.set()

        await never_loses_a_cancellation(close, ended)
        ranks._runs = {}

    drive(scenario)
