from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.cores.marker import AGENT_MARKER, FileStamp, MarkedFile, Marker, write_marker
from flare.cores.primary import Primary, load_primary
from flare.engines.discovery import EngineInstall
from flare.errors import CoreError, EngineError, IntegrityError, RankError
from flare.paths import Paths
from flare.rank import launch
from flare.rank.engine_process import EngineProcess
from flare.rank.launch import (
    Accepted,
    Failure,
    RunRequest,
    StopSignals,
    adapter_for,
    check_index,
    check_unchanged,
    default_threads,
    engine_help,
    first_of,
    verify_stored,
)
from flare.rank.proof import INSECURE_KEY
from flare.serving_options import ServingOptions
from flare.settings import Settings
from flare.system import free_port
from tests.cores.making import MIB, pattern, write_core
from tests.rank.lab import never_loses_a_cancellation, run, until
from tests.session.parties import Clock

FILES = {"model/a.gguf": pattern(2 * MIB + 5, 1), "model/b.json": b"{}"}


@pytest.fixture
def core(tmp_path: Path) -> Primary:
    return load_primary(write_core(tmp_path / "core", FILES, ranks=2, rank_ranges=[None, []]))


def request(**changes: Any) -> RunRequest:
    values: dict[str, Any] = {
        "core": None,
        "rank": 0,
        "ranks": None,
        "rendezvous": None,
        "options": ServingOptions(),
        "cache": Path("/cache"),
        "key": None,
        "insecure": False,
        "expect_index": None,
        "accepted": Accepted(frozenset()),
        "allow_code": False,
        "streams": 8,
        "settings": Settings(),
        "paths": Paths.from_environment({"HOME": "/home"}),
        "environment": {},
        **changes,
    }
    return RunRequest(**values)


def verify(core: Primary, rank: int = 0, *, always: bool = False) -> tuple[str, dict[Path, object]]:
    said: list[str] = []
    return run(verify_stored(core, rank, always=always, cache=core.root.parent.parent, remark=said.append))


def mark(core: Primary) -> None:
    names = ["tiny.safetensors", *FILES]
    files = {name: MarkedFile(FileStamp.of((core.root / name).stat())) for name in names}
    write_marker(core.root / AGENT_MARKER, Marker(core.index_sha256.hex(), files))


def test_unmarked_data_is_digested(core: Primary) -> None:
    verdict, before = verify(core)
    assert verdict == "4 blocks (2.1 MB) are what the publisher signed"
    check_unchanged(core, 0, before)
    with core.file_path(0).open("r+b") as file:
        file.write(b"\x00")
    with pytest.raises(IntegrityError, match="block 0"):
        verify(core)
    with pytest.raises(IntegrityError, match=r"a\.gguf changed while the engine loaded it"):
        check_unchanged(core, 0, before)


def test_marked_data_is_not_read_again_unless_asked(core: Primary) -> None:
    mark(core)
    stamp = core.file_path(0).stat()
    with core.file_path(0).open("r+b") as file:  # damage that the marker cannot see
        file.write(b"\x00")
    os.utime(core.file_path(0), ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert verify(core)[0] == "the stored data was verified before"
    with pytest.raises(IntegrityError, match="block 0"):
        verify(core, always=True)


@pytest.mark.parametrize("place", ["cores/entry", "models/key/entry"])
def test_what_was_digested_in_the_cache_is_marked_there(tmp_path: Path, place: str) -> None:
    core = load_primary(write_core(tmp_path / place, FILES, ranks=2))

    def again() -> str:
        said: list[str] = []
        return run(verify_stored(core, 0, always=False, cache=tmp_path, remark=said.append))[0]

    assert "4 blocks" in again()
    assert again() == "the stored data was verified before"
    with core.file_path(0).open("r+b") as file:
        file.write(b"\x00")
    with pytest.raises(IntegrityError):
        again()


def test_a_core_outside_the_cache_is_left_alone(core: Primary) -> None:
    verify(core)
    verify(core)
    assert {path.name for path in core.root.iterdir()} == {"tiny.safetensors", "model"}


def test_a_rank_that_reads_nothing_digests_nothing(core: Primary) -> None:
    core.file_path(0).unlink()
    assert verify(core, 1)[0] == "this rank reads no stored bytes"


def test_data_that_changes_while_it_is_verified_is_refused(
    core: Primary, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launch.verify_core

    def meddle(*arguments: Any, **options: Any) -> Any:
        report = real(*arguments, **options)
        os.utime(core.file_path(0), ns=(1, 1))
        return report

    monkeypatch.setattr(launch, "verify_core", meddle)
    with pytest.raises(IntegrityError, match="changed while it was being verified"):
        verify(core)


def test_a_long_verification_tells_how_far_it_is_and_can_be_abandoned(
    core: Primary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "VERIFY_LINE_EVERY", -1.0)
    ended = []

    def endless(_primary: Primary, *, ranges: object, progress: Any) -> None:
        advance = progress("verifying", 4 * 10**9)
        try:
            while True:
                advance(10**7)
        finally:
            ended.append(True)

    monkeypatch.setattr(launch, "verify_core", endless)
    said: list[str] = []

    async def work() -> None:
        task = asyncio.create_task(verify_stored(core, 0, always=True, cache=core.root, remark=said.append))
        await until(lambda: said)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work())
    assert ended
    assert said[0].endswith("of 4.00 GB")


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Give the signals back to the test run."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_comes_when_the_rank_has_ended_is_not_its_exit_status() -> None:
    script = (
        "import asyncio, os, signal, sys\n"
        "from flare.rank.launch import StopSignals\n"
        "async def main():\n"
        "    signals = StopSignals()\n"
        "    signals.install()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await signals.requested.wait()\n"
        "asyncio.run(main())\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("own_signals")
def test_the_first_signal_drains_and_one_two_seconds_later_hurries() -> None:
    async def work() -> None:
        time = 0.0
        signals = StopSignals(lambda: time)
        signals.install()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(signals.requested.is_set)
        assert signals.name == "SIGTERM"
        time = 1.9
        later = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, later.set)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        await later.wait()  # signals are taken in their order
        assert not signals.hurry.is_set()
        time = 2.0
        os.kill(os.getpid(), signal.SIGINT)
        await until(signals.hurry.is_set)

    run(work())


def test_engines_without_an_adapter_are_named() -> None:
    assert adapter_for("llama.cpp").name == "llama.cpp"
    with pytest.raises(EngineError, match=r"The engine vllm is not supported on this node.*llama\.cpp"):
        adapter_for("vllm")


def test_an_engines_help_is_read_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "server"
    install = EngineInstall("llama.cpp", "1", "config", tmp_path, (program, program))
    with pytest.raises(EngineError, match=r"could not be started: .*No such file"):
        run(engine_help(install, {}))
    program.write_text("#!/bin/sh\necho help $1\n")
    program.chmod(0o755)
    assert run(engine_help(install, {"PATH": os.environ["PATH"]})) == "help --help"
    # It hangs, holds the pipe in a child, and hears no SIGTERM: nothing of it is left all the same.
    program.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    monkeypatch.setattr(launch, "HELP_LIMIT", 1.0)
    assert run(engine_help(install, {"PATH": os.environ["PATH"]})) == ""
    assert not Path(f"/proc/{(tmp_path / 'child').read_text().strip()}").exists()


def test_the_core_must_be_the_launched_one_and_bring_no_code(tmp_path: Path, core: Primary) -> None:
    check_index(core.index, request(expect_index=core.index_sha256))
    with pytest.raises(IntegrityError, match="not the one that was launched"):
        check_index(core.index, request(expect_index=b"\x01" * 32))
    code = load_primary(write_core(tmp_path / "code", {"model/x.py": b"print()"}))
    with pytest.raises(CoreError, match="--allow-code"):
        check_index(code.index, request())
    check_index(code.index, replace(request(), allow_code=True))


def test_without_a_key_both_sides_use_the_same_well_known_one() -> None:
    assert request().proof_key == INSECURE_KEY
    assert request(key=b"k" * 32).proof_key == b"k" * 32
    assert "kkkk" not in repr(request(key=b"k" * 32))
    assert "secret" not in repr(request(environment={"TOKEN": "secret"}))


def test_ranks_that_agents_started_do_not_wait_long_for_each_other() -> None:
    assert request().meeting_seconds == 600
    assert request(ranks=2).meeting_seconds == 60


def test_only_accepted_publishers_are_trusted() -> None:
    accepted = Accepted(frozenset({"aa"}))
    assert accepted.accepts("aa")
    assert not accepted.accepts("bb")


def test_a_stop_that_comes_with_the_end_of_an_engines_help_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[EngineProcess] = []

    async def start(engine: EngineProcess, *_: object) -> None:
        started.append(engine)

    async def work() -> None:
        monkeypatch.setattr(EngineProcess, "start", start)
        await never_loses_a_cancellation(
            lambda: engine_help(EngineInstall("x", "1", "config", tmp_path, (tmp_path, tmp_path)), {}),
            lambda: started[-1].exited.set_result(0),
        )

    run(work())


def test_the_first_failure_is_kept_and_consequences_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CAUSE_LIMIT", 10)

    async def work() -> None:
        failure = Failure()
        loop = asyncio.get_running_loop()
        clock = Clock()
        reset = ConnectionResetError(errno.ECONNRESET, "")
        await asyncio.to_thread(failure.report_broken, loop, "rank 1", reset)
        failure.report(RankError("the cause"))
        clock.forward(2 * launch.CAUSE_LIMIT)
        await asyncio.sleep(0.01)
        assert failure.future.result().message == "the cause"
        alone = Failure()
        await asyncio.to_thread(alone.report_broken, loop, "rank 1", reset)
        clock.forward(2 * launch.CAUSE_LIMIT)
        expected = "The engine's connection to rank 1 broke: Connection reset by peer."
        assert (await alone.future).message == expected
        await first_of(alone.future, loop.create_future())

    run(work())
    loop = asyncio.new_event_loop()
    loop.close()

    async def late() -> None:
        Failure().report_broken(loop, "rank 1", RankError("too late"))  # that loop is gone; nothing happens

    run(late())


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_what_no_program_can_have_caused_is_reported_at_once(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "CAUSE_LIMIT", 1000)

    async def work() -> None:
        failure = Failure()
        failure.report_broken(asyncio.get_running_loop(), "rank zero", OSError(number, ""))
        problem = await failure.future
        assert f"rank zero broke: {os.strerror(number)}. Is a cable unplugged" in problem.message

    run(work())


def test_small_facts_of_this_machine() -> None:
    assert default_threads() >= 1
    assert 0 < free_port() < 65536
