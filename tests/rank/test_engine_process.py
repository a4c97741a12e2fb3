from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flare.errors import EngineError
from flare.rank import engine_process
from flare.rank.engine_process import EngineProcess, engine_environment
from tests.rank.lab import never_loses_a_cancellation, run, until

ENVIRONMENT = {"PATH": os.environ["PATH"]}


def script(folder: Path, text: str) -> list[str]:
    """Return the command line of a small program."""
    path = folder / "engine.py"
    path.write_text("import os, signal, subprocess, sys, time\n" + text)
    return [sys.executable, "-S", str(path)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_its_lines_are_heard_and_its_end_is_told(tmp_path: Path) -> None:
    lines: list[str] = []

    async def work() -> None:
        engine = EngineProcess("engine", lambda line: lines.append(line) is None)
        await engine.start(
            script(tmp_path, "print('one\\x1b[2J', flush=True); print('x' * 9000); sys.exit(3)"), ENVIRONMENT
        )
        assert await engine.exited == 3
        await engine.kill()
        assert engine.obituary() == "engine ended with status 3."

    run(work())
    assert lines[0] == "one\\x1b[2J"
    assert len(lines[1]) <= engine_process.MAX_LINE


def test_a_stop_that_comes_with_a_start_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[asyncio.Future[int]] = []
    engines: list[EngineProcess] = []

    async def watch(engine: EngineProcess, _: object, started: asyncio.Future[int]) -> None:
        engines.append(engine)
        waiting.append(started)

    async def keeper(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace()

    async def work() -> None:
        monkeypatch.setattr(EngineProcess, "_watch", watch)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", keeper)
        await never_loses_a_cancellation(
            lambda: EngineProcess("engine", lambda _line: True).start(["/engine"], {}),
            lambda: waiting[-1].set_result(1),
        )
        for engine in engines:
            assert engine._control is not None
            engine._control.close()
            assert engine._output is not None
            engine._output.close()

    run(work())


def test_a_stop_in_any_instant_of_a_start_is_quick_and_leaves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = script(tmp_path, "time.sleep(60)")
    forked: list[int] = []
    create = asyncio.create_subprocess_exec

    async def noted(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await create(*arguments, **options)
        forked.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)

    async def work() -> None:
        for steps in range(12):
            engine = EngineProcess("engine", lambda _: True)
            starting = asyncio.create_task(engine.start(argv, ENVIRONMENT))
            for _ in range(steps):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait({starting})
            assert starting.cancelled()
            async with asyncio.timeout(5.0):
                await engine.stop()
            assert engine._control is None
        assert forked
        assert not any(alive(pid) for pid in forked)

    run(work())


def test_a_stop_that_comes_with_a_start_that_fails_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process.keeper, "command", lambda *_: ["/no/such/python"])

    async def work() -> None:
        engine = EngineProcess("engine", lambda _: True)
        starting = asyncio.create_task(engine.start(["x"], ENVIRONMENT))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        async with asyncio.timeout(2.0):
            await engine.stop()
        assert engine._control is None

    run(work())


def test_a_stop_that_comes_with_an_engines_end_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        engine = EngineProcess("engine", lambda _line: True)

        async def ended() -> int:
            return 0

        monkeypatch.setattr(engine, "_keeper", SimpleNamespace(wait=ended))

        def begin() -> Coroutine[Any, Any, None]:
            engine._gone.clear()
            return engine.stop()

        await never_loses_a_cancellation(begin, engine._gone.set)

    run(work())


def test_an_obituary_has_the_last_words_that_nobody_saw(tmp_path: Path) -> None:
    async def work() -> None:
        engine = EngineProcess("engine", lambda line: line == "seen")
        text = "[print(f'line {n}') for n in range(40)]; print('seen', flush=True)\n"
        await engine.start(script(tmp_path, text + "os.kill(os.getpid(), signal.SIGABRT)"), ENVIRONMENT)
        assert await engine.exited == -signal.SIGABRT
        await engine.kill()
        obituary = engine.obituary()
        assert obituary.startswith("engine was killed by SIGABRT. Its last words:\n")
        assert obituary.endswith("\n  line 39")
        assert len(obituary.splitlines()) == 1 + engine_process.LAST_LINES

    run(work())


def test_output_without_a_newline_at_its_end_is_kept(tmp_path: Path) -> None:
    async def work() -> None:
        engine = EngineProcess("engine", lambda _: False)
        await engine.start(
            script(tmp_path, "sys.stdout.write('half a line'); sys.stdout.flush(); os._exit(1)"), ENVIRONMENT
        )
        await engine.exited
        await engine.kill()
        assert "half a line" in engine.obituary()

    run(work())


def test_stopping_sends_sigterm_first(tmp_path: Path) -> None:
    lines: list[str] = []

    async def work() -> None:
        engine = EngineProcess("engine", lambda line: lines.append(line) is None)
        text = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'bye\\n'), os._exit(0)))\n"
        await engine.start(
            script(tmp_path, text + "print('up', flush=True)\nwhile True: time.sleep(1)"), ENVIRONMENT
        )
        await until(lambda: lines == ["up"])
        await engine.stop()
        assert not alive(engine.pid)

    run(work())
    assert lines == ["up", "bye"]


def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    lines: list[str] = []

    async def work() -> None:
        engine = EngineProcess("engine", lambda line: lines.append(line) is None)
        text = (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
            "print(child.pid, flush=True)\nwhile True: time.sleep(1)"
        )
        await engine.start(script(tmp_path, text), ENVIRONMENT)
        await until(lambda: lines)
        assert alive(int(lines[0]))
        await engine.stop(0.2)
        assert not alive(engine.pid)
        assert not alive(int(lines[0]))

    run(work())


def test_a_killed_rank_takes_its_engine_along(tmp_path: Path) -> None:
    text = f"""
import asyncio, sys
sys.path[:0] = {[path for path in sys.path if path]!r}
from flare.rank.engine_process import EngineProcess
async def main():
    engine = EngineProcess("engine", lambda line: print(line, flush=True) is None)
    await engine.start(["/bin/sh", "-c", "echo $$; sleep 60 & echo $!; wait"], {ENVIRONMENT!r})
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def work() -> None:
        rank = await asyncio.create_subprocess_exec(
            sys.executable, "-c", text, stdout=asyncio.subprocess.PIPE
        )
        assert rank.stdout is not None
        pids = [int(await rank.stdout.readline()) for _ in range(2)]
        assert all(alive(pid) for pid in pids)
        rank.kill()
        await rank.wait()
        await until(lambda: not any(alive(pid) for pid in pids))

    run(work())


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(EngineError, match="llama-server could not be started: No such file"):
            await EngineProcess("llama-server", lambda _: True).start([str(tmp_path / "gone")], ENVIRONMENT)

    run(work())


def test_a_keeper_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process.keeper, "command", lambda *_: ["/no/such/python"])

    async def work() -> None:
        engine = EngineProcess("llama-server", lambda _: True)
        with pytest.raises(EngineError, match="llama-server cannot be started: No such file"):
            await engine.start(["x"], ENVIRONMENT)
        await engine.kill()

    run(work())


@pytest.mark.parametrize(
    ("keeper", "message"),
    [(["/bin/sleep", "60"], "could not be started within"), (["/bin/false"], "its keeper ended")],
)
def test_a_keeper_that_fails_is_not_waited_for(
    keeper: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "START_LIMIT", 0.2)
    monkeypatch.setattr(engine_process, "KEEPER_LIMIT", 0.1)
    monkeypatch.setattr(engine_process.keeper, "command", lambda *_: keeper)

    async def work() -> None:
        with pytest.raises(EngineError, match=message):
            await EngineProcess("llama-server", lambda _: True).start(["x"], ENVIRONMENT)

    run(work())


def test_an_engine_sees_an_allow_list_of_the_environment() -> None:
    seen = engine_environment(
        {
            "PATH": "/bin",
            "HF_TOKEN": "secret",
            "LD_PRELOAD": "x.so",
            "PYTHONPATH": "/x",
            "FLARE_LAUNCH": "launch",
            "NVIDIA_VISIBLE_DEVICES": "all",
            "LC_ALL": "C",
            "CUDA_VISIBLE_DEVICES": "GPU-1",
        }
    )
    assert seen == {
        "PATH": "/bin",
        "FLARE_LAUNCH": "launch",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "LC_ALL": "C",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
    }
    assert engine_environment({})["PATH"]
