"""One rank under its keeper, as a real process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from flare.agent.run import RankSpec, Run
from flare.errors import RankError
from tests.rank.lab import never_loses_a_cancellation

FAKE = str(Path(__file__).with_name("fake_flare.py"))
KEY = bytes(range(32))


def spec(*behaviours: str, **changes: Any) -> RankSpec:
    values: dict[str, Any] = {
        "launch": "glm-20261130T120000Z-0001",
        "name": "glm",
        "core": "glm.safetensors",
        "rank": 0,
        "ranks": 1,
        "gpus": (),
        "command": (
            sys.executable, FAKE, "run", *(f"--engine-arg={behaviour}" for behaviour in behaviours)
        ),
        "environment": {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"},
        "launch_key": KEY,
    }  # fmt: skip
    return RankSpec(**{**values, **changes})


def drive(scenario: Callable[[Run], Awaitable[None]], *behaviours: str, **changes: Any) -> Run:
    async def main() -> Run:
        run = Run(spec(*behaviours, **changes), time.monotonic)
        try:
            await asyncio.wait_for(scenario(run), 20)
        finally:
            run.kill()
            await asyncio.wait_for(run.gone.wait(), 10)
        return run

    return asyncio.run(main())


async def terminated_at_once(run: Run) -> None:
    await run.start()
    run.terminate()
    await run.gone.wait()


def test_a_rank_that_has_not_begun_is_asked_to_end_once_it_has() -> None:
    run = drive(terminated_at_once, "late:0.5")
    assert (run.status, run.signal, run.state) == (0, None, "exited")


def test_a_rank_that_never_begins_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.agent.run.FIRST_PHASE_WITHIN", 0.2)
    assert drive(terminated_at_once, "late:15").signal == signal.SIGTERM


def test_a_keeper_that_hangs_does_not_keep_its_rank_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    from flare.system import become_subreaper

    become_subreaper()
    monkeypatch.setattr("flare.agent.run.KEEPER_LIMIT", 0.2)

    async def scenario(run: Run) -> None:
        await run.start()
        await said(run, "ready")
        assert run._keeper is not None
        os.kill(run._keeper.pid, signal.SIGSTOP)
        run.kill()
        await asyncio.wait_for(run.gone.wait(), 10)

    run = drive(scenario)
    assert (run.state, run.reason) == ("failed", "its keeper was killed")
    assert run.pid is not None
    assert not alive(run.pid)


async def said(run: Run, text: str) -> None:
    async for line in run.output.follow():
        if text in line.text:
            return
    raise AssertionError(f"the rank ended without saying {text!r}: {run.output.retained}")


async def phase(run: Run, wanted: str) -> None:
    while run.phase != wanted:  # noqa: ASYNC110 - the subject is the pipe, which has no event to wait for
        await asyncio.sleep(0.01)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_successful_run_keeps_output_status_and_phase() -> None:
    async def scenario(run: Run) -> None:
        assert await run.start() == run.pid
        assert run.state == "running"
        await run.gone.wait()

    run = drive(scenario, "exit:0")
    assert (run.state, run.status, run.signal) == ("exited", 0, None)
    assert run.phase == "serving"
    assert run.url == "http://127.0.0.1:1"
    assert run.output.retained[-1].text == "ready"


def test_key_arrives_on_a_descriptor_and_nowhere_else() -> None:
    async def scenario(run: Run) -> None:
        await run.start()
        await run.gone.wait()

    run = drive(scenario, "exit:0")
    report = json.loads(run.output.retained[0].text)
    assert report["key"] == KEY.hex()
    assert KEY.hex() not in " ".join(report["argv"])
    assert KEY.hex() not in " ".join(report["environment"].values())
    assert set(report["environment"]) - {"LC_CTYPE"} == {"PATH", "PYTHONUNBUFFERED", "FLARE_LAUNCH"}
    # 0, 1, 2, the status pipe, and what listing the folder itself opens: nothing of the agent's.
    assert len(report["descriptors"]) == 5
    assert "launch_key" not in repr(run.spec)


def test_failed_run_keeps_its_status() -> None:
    async def scenario(run: Run) -> None:
        await run.start()
        await run.gone.wait()

    run = drive(scenario, "exit:7")
    assert (run.state, run.status) == ("failed", 7)


@pytest.mark.parametrize("phase", ["", '{"phase": "loading", "reason": "weights"}'])
def test_a_rank_that_ends_before_it_said_why_gives_its_last_words(phase: str) -> None:
    script = f"""
import os, sys
os.write(int(sys.argv[sys.argv.index("--status-fd") + 1]), {phase!r}.encode() + b"\\n")
print("working")
print("flare: error: config.toml has no such key.", file=sys.stderr)
sys.exit(3)
"""

    async def scenario(run: Run) -> None:
        await run.start()
        await run.gone.wait()

    run = drive(scenario, command=(sys.executable, "-c", script))
    assert (run.state, run.status, run.reason) == ("failed", 3, "config.toml has no such key.")


def test_terminate_lets_it_drain() -> None:
    async def scenario(run: Run) -> None:
        await run.start()
        await said(run, "ready")
        run.terminate()
        run.terminate()
        await run.gone.wait()

    run = drive(scenario)
    assert [line.text for line in run.output.retained].count("draining") == 1
    assert run.state == "exited"


def test_hurry_sends_two_and_then_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.agent.run.SECOND_TERMINATE_AFTER", 0.3)
    monkeypatch.setattr("flare.agent.run.KILL_AFTER", 0.3)

    async def scenario(run: Run) -> None:
        await run.start()
        await said(run, "ready")
        await run.hurry()
        await run.gone.wait()

    run = drive(scenario, "stubborn")
    assert [line.text for line in run.output.retained].count("draining") == 2
    assert (run.state, run.signal) == ("failed", signal.SIGKILL)


def test_engine_in_its_own_session_is_gone_before_the_run_is(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.start()
        await said(run, "ready")
        run.terminate()
        await run.gone.wait()
        assert not alive(int((tmp_path / "engine").read_text()))

    assert drive(scenario, f"engine:{tmp_path / 'engine'}").state == "exited"


def test_killed_keeper_leaves_nothing(tmp_path: Path) -> None:
    from flare.system import become_subreaper

    become_subreaper()

    async def scenario(run: Run) -> None:
        await run.start()
        await said(run, "ready")
        assert run._keeper is not None
        run._keeper.kill()
        await run.gone.wait()
        assert not alive(int((tmp_path / "engine").read_text()))
        assert run.pid is not None
        assert not alive(run.pid)

    run = drive(scenario, f"engine:{tmp_path / 'engine'}")
    assert (run.state, run.reason) == ("failed", "its keeper was killed")


def test_program_that_is_not_there(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        with pytest.raises(RankError, match=r"could not be started: .*No such file"):
            await run.start()

    drive(scenario, command=(str(tmp_path / "nothing"),))


def test_keeper_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    async def scenario(run: Run) -> None:
        with pytest.raises(RankError, match="could not be started: No such file"):
            await run.start()

    drive(scenario, command=("true",))


def test_keeper_that_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.keeper.command", lambda *_: ["true"])

    async def scenario(run: Run) -> None:
        with pytest.raises(RankError, match="its keeper ended"):
            await run.start()

    drive(scenario)


def test_keeper_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.keeper.command", lambda *_: ["sleep", "1"])
    monkeypatch.setattr("flare.agent.run.START_TIMEOUT", 0.2)

    async def scenario(run: Run) -> None:
        with pytest.raises(RankError, match="its keeper did not answer"):
            await run.start()

    drive(scenario)


def test_flood_of_output_is_bounded_and_ends() -> None:
    async def scenario(run: Run) -> None:
        await run.start()
        await run.gone.wait()

    run = drive(scenario, "flood:20000", "exit:0")
    assert run.output.retained[-1].text == "ready"
    assert sum(line.size for line in run.output.retained) <= 64 * 1024


def test_phase_is_known_while_it_runs() -> None:
    async def scenario(run: Run) -> None:
        await run.start()
        await phase(run, "serving")
        assert run.state == "running"
        assert run.uptime > 0

    drive(scenario)


def test_a_callback_that_fails_keeps_neither_the_others_nor_the_devices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called = []

    def fail() -> None:
        raise ValueError("broken")

    async def scenario(run: Run) -> None:
        run.on_gone += [fail, lambda: called.append("second")]
        await run.start()
        await run.gone.wait()

    run = drive(scenario, "exit:0")
    assert (run.state, called) == ("exited", ["second"])
    assert "what is due after a rank's end failed" in caplog.text


def test_a_wait_that_fails_does_not_hold_the_run(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> str | None:
        raise ValueError("broken")

    async def scenario(run: Run) -> None:
        run.before_end = fail
        await run.start()
        await run.gone.wait()

    run = drive(scenario, "exit:0")
    assert (run.state, run.reason) == ("exited", None)
    assert "a rank's devices could not be waited for" in caplog.text


def test_a_run_without_processes_that_waits_runs_until_it_is_told_not_to_wait() -> None:
    async def scenario(run: Run) -> None:
        waiting = asyncio.Event()

        async def wait() -> str | None:
            waiting.set()
            await asyncio.sleep(60)
            return "never"

        run.before_end = wait
        await run.start()
        await waiting.wait()
        assert (run.running, run.alive, run.state) == (True, False, "running")
        run.end_without_waiting()
        await run.gone.wait()
        assert (run.running, run.alive) == (False, False)

    assert drive(scenario, "exit:0").reason is None


def test_a_rank_ends_without_a_descriptor_that_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.pidfd_open", exhausted)

    async def scenario(run: Run) -> None:
        await run.start()
        await run.gone.wait()

    run = drive(scenario, "exit:7")
    assert (run.state, run.status) == ("failed", 7)


def test_orphans_that_cannot_be_looked_for_do_not_keep_a_run_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flare.system import become_subreaper

    become_subreaper()
    looks = []

    def exhausted(_: int) -> list[int]:
        looks.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("flare.keeper.descendants", exhausted)
    monkeypatch.setattr("flare.agent.orphans.SWEEP_LIMIT", 0.4)

    async def scenario(run: Run) -> None:
        await run.start()
        await said(run, "ready")
        assert run._keeper is not None
        run._keeper.kill()
        await run.gone.wait()

    run = drive(scenario)
    assert (run.state, run.reason) == ("failed", "its keeper was killed")
    assert len(looks) > 1
    assert "could not be looked at" in caplog.text


def test_an_end_that_comes_with_what_was_waited_for_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(_run: Run) -> None:
        return None

    monkeypatch.setattr(Run, "_spawn", lambda _run: None)
    monkeypatch.setattr(Run, "_reap", nothing)
    begun: list[Run] = []

    async def scenario() -> None:
        def start() -> Coroutine[Any, Any, int]:
            begun.append(Run(spec(), time.monotonic))
            return begun[-1].start()

        def started() -> None:
            assert begun[-1]._begun is not None
            begun[-1]._begun.set_result(17)

        def end() -> Coroutine[Any, Any, bool]:
            begun.append(Run(spec(), time.monotonic))
            return begun[-1].wait_gone(60)

        def ended() -> None:
            begun[-1].gone.set()

        await never_loses_a_cancellation(start, started)
        await never_loses_a_cancellation(end, ended)

    asyncio.run(scenario())
