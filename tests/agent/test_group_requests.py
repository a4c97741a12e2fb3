"""RUN, ATTACH, STOP, REMOVE against a real agent whose ranks are real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.agent.ranks import SHUTDOWN_GRACE
from flare.errors import (
    BusyError,
    ClockSkewError,
    ConflictError,
    CoreError,
    FlareError,
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    RankError,
    RemoteProtocolError,
    UnreachableError,
    UsageError,
)
from flare.identity import Identity
from flare.trust.grants import sign_grant
from flare.wire import messages
from flare.wire.messages import Attach, Controllers, Executable, Metrics, Remove, Status, Stop
from tests.agent.world import (
    EXPORT,
    LAUNCH_KEY,
    PUBLISHER,
    Agent,
    Peer,
    cpu_of,
    descendants_of,
    drive,
    is_alive,
    lines_to_exit,
    lines_until,
    local_source,
    wait_for,
)
from tests.cores.making import PUBLISHER as CORE_PUBLISHER
from tests.cores.making import write_core


def launch(number: int, name: str = "glm") -> dict[str, str]:
    return {"launch": f"{name}-20261130T120000Z-{number:04d}", "name": name}


async def run_to_exit(
    peer: Peer, agent: Agent, request: messages.Run
) -> tuple[messages.RunReply, list[str], messages.Exit]:
    async with peer.session(agent) as session:
        reply = await session.request(request)
        assert isinstance(reply, messages.RunReply)
        lines, ended = await lines_to_exit(session)
        return reply, lines, ended


def test_run_streams_output_and_exit(paired: Agent, controller: Peer) -> None:
    reply, lines, ended = drive(run_to_exit(controller, paired, controller.run_request(paired, "exit:0")))
    assert reply.launch == "glm-20261130T120000Z-0001"
    assert reply.pid > 0
    assert lines[-1] == "ready"
    assert (ended.status, ended.signal) == (0, None)
    [group] = drive(controller.ask(paired, Status())).groups
    assert (group.name, group.rank, group.ranks, group.state, group.status) == ("glm", 1, 2, "exited", 0)
    assert group.core == "core.safetensors"


def test_what_a_rank_is_told(paired: Agent, controller: Peer) -> None:
    serving = ("--max-concurrency", "4", "--engine-arg=exit:0", "--allow-unsafe-engine-args")
    request = controller.run_request(paired, serving=serving, rank_zero=("--port", "8123"))
    _, lines, _ = drive(run_to_exit(controller, paired, request))
    report = json.loads(lines[0])
    words = report["argv"]
    assert words[0] == "run"
    assert "--rank 1 --rendezvous 127.0.0.1:29800 --ranks 2" in " ".join(words)
    assert words[words.index("--core-cache") + 1] == str(paired.paths.cache)
    assert words[words.index("--max-concurrency") + 1] == "4"
    assert "--port" not in words  # rank zero's alone
    profile = Path(words[words.index("--publisher-profile") + 1])
    assert PUBLISHER.fingerprint in profile.read_text()
    assert report["key"] == LAUNCH_KEY.hex()
    environment = report["environment"]
    assert LAUNCH_KEY.hex() not in json.dumps([words, environment])
    assert "CUDA_VISIBLE_DEVICES" not in environment  # the CPU device is no CUDA device
    assert environment["HOME"] == str(paired.home)


def test_environment_is_an_allow_list(new_agent: Callable[..., Agent], controller: Peer) -> None:
    secrets = {
        "HF_TOKEN": "secret",
        "LD_PRELOAD": "",
        "PYTHONPATH": "/nowhere",
        "AWS_SECRET": "x",
        "LC_ALL": "C",
    }
    agent = new_agent(environment=secrets).start("--accept-first")
    drive(controller.pair(agent, None))
    _, lines, _ = drive(run_to_exit(controller, agent, controller.run_request(agent, "exit:0")))
    environment = json.loads(lines[0])["environment"]
    allowed = {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LC_ALL",
        "TZ",
        "TMPDIR",
        "PYTHONUNBUFFERED",
        "FLARE_LAUNCH",
    }
    assert set(environment) <= allowed | {"LC_CTYPE"}
    assert environment["LC_ALL"] == "C"


def test_attach_gets_retained_then_live_output(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as first:
            await first.request(controller.run_request(paired, "chatter"))
            await lines_until(first, "still here")
            async with controller.session(paired) as second:
                await second.request(Attach(group="glm"))
                lines = await lines_until(second, "still here")
                assert "ready" in lines
                await lines_until(second, "still here")
                async with controller.session(paired) as third:
                    await third.request(Stop())
                    ended = await third.receive(messages.Exit, timeout=60)
                    assert ended.status == 0
                for session in (first, second):
                    lines, ended = await lines_to_exit(session)
                    assert "draining" in lines
                    assert ended.status == 0
        async with controller.session(paired) as late:
            await late.request(Attach())
            lines, ended = await lines_to_exit(late)
            assert "draining" in lines

    drive(scenario())


def test_a_vanished_controller_changes_nothing(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            reply = await session.request(controller.run_request(paired, "chatter"))
        # What the rank says from now on has no reader: twice, so that the agent has noticed.
        async with controller.session(paired) as other:
            await other.request(Attach(group="glm"))
            await lines_until(other, "ready")
            await lines_until(other, "still here")
            await lines_until(other, "still here")
        [group] = (await controller.ask(paired, Status())).groups
        assert group.state == "running"
        assert group.pid == reply.pid
        assert group.phase == "serving"
        async with controller.session(paired) as session:
            await session.request(Stop(group="glm"))  # and leaves before the answer
        while (await controller.ask(paired, Status())).groups[0].state == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    drive(scenario())


def test_a_slow_reader_does_not_hold_the_rank(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as slow:
            await slow.request(controller.run_request(paired, "flood:60000", "exit:0"))
            # Nothing is read: the socket's buffers fill, and the rank goes on to its end.
            while (await controller.ask(paired, Status())).groups[0].state == "running":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            lines, ended = await lines_to_exit(slow)
            assert ended.status == 0
            assert lines[-1] == "ready"
            assert any("this reader is too slow" in line for line in lines)

    drive(scenario())


def test_speaking_out_of_turn_ends_the_session_and_not_the_rank(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(controller.run_request(paired))
            await session.send(Status())
            with pytest.raises(RemoteProtocolError):
                await lines_to_exit(session)
        assert (await controller.ask(paired, Status())).groups[0].state == "running"

    drive(scenario())


def test_failed_rank(paired: Agent, controller: Peer) -> None:
    _, _, ended = drive(run_to_exit(controller, paired, controller.run_request(paired, "exit:3")))
    assert ended.status == 3
    [group] = drive(controller.ask(paired, Status())).groups
    assert (group.state, group.status) == ("failed", 3)
    assert group.url is None  # nobody answers there any more
    drive(controller.ask(paired, Remove(group=group.launch)))
    assert drive(controller.ask(paired, Status())).groups == ()
    with pytest.raises(NotFoundError, match="There is no launch"):
        drive(controller.ask(paired, Remove(group=group.launch)))


def test_killed_rank(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            reply = await session.request(controller.run_request(paired))
            await lines_until(session, "ready")
            with pytest.raises(BusyError, match="still runs"):
                await controller.ask(paired, Remove(group=reply.launch))
            os.kill(reply.pid, signal.SIGKILL)
            _, ended = await lines_to_exit(session)
            assert (ended.signal, ended.reason) == (signal.SIGKILL, "ended by SIGKILL")

    drive(scenario())


def test_the_log_tells_launches_orders_and_ends(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(controller.run_request(paired))
            await lines_until(session, "ready")
            async with controller.session(paired) as other:
                await other.request(Stop(now=False))
                await other.receive(messages.Exit, timeout=60)
        request = controller.run_request(paired, "exit:3", **launch(2, "nemo"))
        async with controller.session(paired) as session:
            await session.request(request)

    drive(scenario())
    wait_for(lambda: "failed with status 3" in paired.log())
    log = paired.log()
    glm = "glm (glm-20261130T120000Z-0001), rank 1 of 2: "
    nemo = "nemo (nemo-20261130T120000Z-0002), rank 1 of 2: "
    assert f"INFO {glm}starts core.safetensors on GPU 0, asked by workstation\n" in log
    assert f"INFO {glm}is to end after what runs, asked by workstation\n" in log
    assert f"INFO {glm}ended with status 0\n" in log
    assert f"INFO {nemo}starts core.safetensors on GPU 0, asked by workstation\n" in log
    assert f"WARNING {nemo}failed with status 3: " in log
    assert "Session from" not in log


def test_python_m_flare_starts_ranks_too(new_agent: Callable[..., Agent], controller: Peer) -> None:
    agent = new_agent(real=True).start("--accept-first")

    async def scenario() -> None:
        await controller.pair(agent, None)
        async with controller.session(agent) as session:
            reply = await session.request(controller.run_request(agent, rendezvous="127.0.0.1:9"))
            command = Path(f"/proc/{reply.pid}/cmdline").read_bytes().split(b"\0")
            assert command[1:4] == [b"-m", b"flare", b"run"]
            await session.receive(messages.Log, timeout=60)  # the real rank speaks: it says its state
            async with controller.session(agent) as other:
                await other.request(Stop(now=True))
                await other.receive(messages.Exit, timeout=60)

    drive(scenario())


def test_stop_now_does_not_wait_for_a_drain(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(controller.run_request(paired, "stubborn"))
            await lines_until(session, "ready")
            started = time.monotonic()
            async with controller.session(paired) as other:
                await other.request(Stop(now=True))
                ended = await other.receive(messages.Exit, timeout=60)
            assert ended.signal == signal.SIGKILL
            assert time.monotonic() - started < 40

    drive(scenario())


def test_two_controllers_want_the_same_device(paired: Agent, controller: Peer) -> None:
    laptop = Peer(2, "laptop")
    second = controller.controllers.with_added(controller.identity, "laptop", laptop.key)

    async def ask(peer: Peer, number: int) -> str:
        async with peer.session(paired) as session:
            try:
                await session.request(peer.run_request(paired, **launch(number, peer.name)))
            except BusyError as problem:
                return str(problem)
            return "started"

    async def scenario() -> None:
        await controller.ask(paired, Controllers(records=second.after(1)))
        for round_number in range(3):
            number = round_number * 10
            answers = await asyncio.gather(
                *(ask(peer, number + turn) for turn in range(2) for peer in (controller, laptop))
            )
            assert answers.count("started") == 1
            assert all("holds the GPU CPU-" in answer for answer in answers if answer != "started")
            async with controller.session(paired) as session:
                await session.request(Stop())
                await session.receive(messages.Exit, timeout=60)

    drive(scenario())


def refusals(paired: Agent, controller: Peer) -> list[tuple[messages.Run, type[FlareError], str]]:
    """Return every RUN that is refused before anything is reserved, with its error and words of it."""
    now = int(time.time())
    stranger = Peer(9)
    good = controller.grant(paired)
    signed = sign_grant(controller.identity, good)
    own_member = good.members[1]
    return [
        (controller.signed_run(sign_grant(stranger.identity, good)), ForbiddenError, ""),
        (controller.signed_run(replace(signed, signature=bytes(64))), ForbiddenError, ""),
        (
            controller.signed_run(
                sign_grant(controller.identity, replace(good, kind="transfer_grant", launch_key_sha256=None))
            ),
            ForbiddenError,
            "",
        ),
        (
            controller.run_request(paired, issued=now - 700, expires=now - 100),
            ClockSkewError,
            "this node's clock says",
        ),
        (
            controller.run_request(paired, issued=now + 120, expires=now + 600),
            ClockSkewError,
            "this node's clock says",
        ),
        (controller.run_request(paired, issued=now, expires=now + 6000), ForbiddenError, ""),
        (controller.run_request(paired, rank=0), ForbiddenError, ""),
        (controller.run_request(paired, rank=7), ForbiddenError, ""),
        (
            controller.run_request(paired, members=(own_member, replace(own_member, rank=1))),
            ForbiddenError,
            "",
        ),
        (replace(controller.signed_run(signed), launch_key=bytes(32)), ForbiddenError, ""),
        (controller.run_request(paired, serving=("--core-cache", "/tmp")), UsageError, "no serving option"),
        (controller.run_request(paired, serving=("--port", "1")), UsageError, "no serving option"),
        (controller.run_request(paired, rendezvous="nowhere"), RemoteProtocolError, "rendezvous"),
        (
            controller.run_request(paired, executable=Executable("flare-" + "0" * 16, "0" * 64)),
            NotFoundError,
            "does not hold",
        ),
        (
            controller.run_request(paired, executable=Executable("../../bin/sh", "0" * 64)),
            RemoteProtocolError,
            "has no place for",
        ),
        (
            replace(controller.signed_run(signed), publisher="nonsense"),
            RemoteProtocolError,
            "publisher profile",
        ),
        (
            replace(
                controller.signed_run(signed),
                publisher=f'name = "x"\npublic_key = "{Identity.from_seed(b"q" * 32).public_key.hex()}"\n',
            ),
            ForbiddenError,
            "",
        ),
        (
            controller.run_request(
                paired, members=(good.members[0], replace(own_member, gpus=("GPU-none",)))
            ),
            NotFoundError,
            "has no GPU GPU-none",
        ),
    ]


def test_every_refusal_of_run_reserves_nothing(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        for number, (request, error, words) in enumerate(refusals(paired, controller)):
            with pytest.raises(error) as caught:
                await controller.ask(paired, request)
            assert words in str(caught.value), (number, str(caught.value))
        status = await controller.ask(paired, Status())
        assert status.groups == ()
        assert status.gpus[0].group is None
        await run_to_exit(controller, paired, controller.run_request(paired, "exit:0"))

    drive(scenario())


def test_a_launch_runs_once_and_not_after_its_stop(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        await run_to_exit(controller, paired, controller.run_request(paired, "exit:0"))
        with pytest.raises(ConflictError, match="started on this node before"):
            await controller.ask(paired, controller.run_request(paired, "exit:0"))
        # A stop that overtakes its launch.
        with pytest.raises(NotFoundError):
            await controller.ask(paired, Stop(group=launch(2)["launch"]))
        with pytest.raises(ConflictError, match="stopped before it started"):
            await controller.ask(paired, controller.run_request(paired, **launch(2)))
        # STOP of what ended already answers with how.
        async with controller.session(paired) as session:
            await session.request(Stop(group=launch(1)["launch"]))
            assert (await session.receive(messages.Exit)).status == 0

    drive(scenario())


def test_stop_and_attach_want_a_name_when_several_are_there(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        with pytest.raises(NotFoundError, match="no running group on this node"):
            await controller.ask(paired, Stop())
        for number in (1, 2):
            await run_to_exit(controller, paired, controller.run_request(paired, "exit:0", **launch(number)))
        with pytest.raises(ConflictError, match="Several groups are on this node"):
            await controller.ask(paired, Attach())

    drive(scenario())


def test_rank_zero_reads_its_core_in_place(paired: Agent, controller: Peer, tmp_path: Path) -> None:
    from flare.cores.primary import load_primary

    primary = load_primary(write_core(tmp_path / "models", {"model/a.bin": b"x" * 1000}))
    assert primary.path is not None
    good = controller.grant(paired)
    own = replace(good.members[1], rank=0)
    package = replace(
        good.package,
        export=primary.index.export.hex(),
        length=primary.size,
        files=(primary.path.name, "model/a.bin"),
        source=local_source(paired, primary.path),
        index_sha256=primary.index_sha256.hex(),
        publisher=CORE_PUBLISHER.fingerprint,
    )
    changes: dict[str, Any] = {"members": (own,), "single_host": True, "rendezvous": None, "package": package}

    def request(number: int, **more: Any) -> messages.Run:
        built = controller.run_request(paired, "exit:0", rank=0, **{**launch(number), **changes, **more})
        from flare.trust.publishers import PublisherProfile

        return replace(built, publisher=PublisherProfile("core", CORE_PUBLISHER.public_key).to_text())

    async def scenario() -> None:
        _, lines, _ = await run_to_exit(controller, paired, request(1, rank_zero=("--port", "8123")))
        report = json.loads(lines[0])
        assert report["argv"][1] == str(primary.path)
        assert "--rank" not in report["argv"]
        assert report["argv"][report["argv"].index("--port") + 1] == "8123"
        assert report["key"] is None
        with pytest.raises(ConflictError, match="is not the core that the grant names"):
            await controller.ask(paired, request(2, package=replace(package, index_sha256="ef" * 32)))
        with pytest.raises(ConflictError, match="is not the core that the grant names"):
            await controller.ask(paired, request(3, package=replace(package, length=7)))
        missing = replace(package, source=local_source(paired, tmp_path / "gone.safetensors"))
        with pytest.raises(NotFoundError, match="cannot be read on this node"):
            await controller.ask(paired, request(4, package=missing))
        with pytest.raises(NotFoundError, match="is not in this node's cache"):
            await controller.ask(paired, request(5, package=replace(package, source=None)))
        with pytest.raises(RemoteProtocolError, match="could leave its folder"):
            await controller.ask(
                paired, request(6, package=replace(package, source=None, files=("../x.safetensors",)))
            )
        other = tmp_path / "other.safetensors"
        other.write_bytes(b"x" * primary.size)
        with pytest.raises(CoreError):
            broken = replace(package, source=local_source(paired, other))
            await controller.ask(paired, request(7, package=broken))

    drive(scenario())


def test_an_executable_that_does_not_start(paired: Agent, controller: Peer) -> None:
    paired.launcher.chmod(0o644)
    with pytest.raises(RankError, match=r"could not be started: .*Permission denied"):
        drive(controller.ask(paired, controller.run_request(paired)))
    paired.launcher.chmod(0o755)
    assert drive(controller.ask(paired, Status())).gpus[0].group is None


def test_metrics_name_groups_and_devices(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(controller.run_request(paired))
            await lines_until(session, "ready")
            metrics = await controller.ask(paired, Metrics())
            [group] = metrics.groups
            assert group.report.state == "running"
            assert group.document is None
            assert metrics.gpus[0].group == group.report.launch

    drive(scenario())


def test_stopping_the_agent_ends_ranks_and_tells_who_is_attached(paired: Agent, controller: Peer) -> None:
    engine = paired.home / "engine"
    assert paired.process is not None
    process = paired.process.pid

    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(controller.run_request(paired, f"engine:{engine}"))
            await lines_until(session, "ready")
            os.kill(process, signal.SIGTERM)
            lines, ended = await lines_to_exit(session)
            assert "draining" in lines
            assert ended.status == 0

    below = descendants_of(process)
    drive(scenario())
    assert paired.ended() == 0
    assert not is_alive(int(engine.read_text()))
    assert not [found for found in below if is_alive(found)]


@pytest.mark.parametrize("stubborn", [False, True])
def test_killed_agent_leaves_nothing(paired: Agent, controller: Peer, stubborn: bool) -> None:
    engine = paired.home / "engine"

    async def scenario() -> int:
        async with controller.session(paired) as session:
            behaviours = ["stubborn"] if stubborn else []
            reply = await session.request(controller.run_request(paired, f"engine:{engine}", *behaviours))
            await lines_until(session, "ready")
            return int(reply.pid)

    rank = drive(scenario())
    assert paired.process is not None
    below = descendants_of(paired.process.pid)
    assert rank in below
    assert len(below) >= 4  # spawner, keeper, rank, engine
    assert paired.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: not any(is_alive(process) for process in below), 5, "the end of every process")


def test_a_second_signal_does_not_wait_for_a_drain(paired: Agent, controller: Peer) -> None:
    assert paired.process is not None
    process = paired.process.pid

    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(controller.run_request(paired, "stubborn"))
            await lines_until(session, "ready")
            os.kill(process, signal.SIGTERM)
            await lines_until(session, "draining")
            started = time.monotonic()
            os.kill(process, signal.SIGTERM)
            _, ended = await lines_to_exit(session)
            assert ended.signal == signal.SIGKILL
            assert time.monotonic() - started < SHUTDOWN_GRACE - 1

    drive(scenario())
    assert paired.ended() == 0


def test_uploaded_executable_must_be_the_one_that_was_asked_for(paired: Agent, controller: Peer) -> None:
    import hashlib

    program = b"#!/bin/sh\necho mine $1\n"
    digest = hashlib.sha256(program).hexdigest()
    name = f"flare-{digest[:16]}"

    async def scenario() -> None:
        async with controller.session(paired) as session:
            reply = await session.request(messages.Put(kind="executable", name=name, size=len(program)))
            assert not reply.already
            await session.send_data(program)
            assert (await session.receive(messages.PutDone)).bytes == len(program)
        request = controller.run_request(paired, executable=Executable(name, digest), **launch(1))
        _, lines, ended = await run_to_exit(controller, paired, request)
        assert lines == ["mine run"]
        assert ended.status == 0
        with pytest.raises(IntegrityError, match="is not the one that was asked for"):
            wrong = Executable(name, digest[:16] + "0" * 48)
            await controller.ask(paired, controller.run_request(paired, executable=wrong, **launch(2)))

    drive(scenario())
    assert oct((paired.paths.executables / name).stat().st_mode & 0o777) == "0o555"


def test_unreachable_after_the_end(paired: Agent, controller: Peer) -> None:
    assert paired.stop() == 0
    with pytest.raises(UnreachableError):
        drive(controller.ask(paired, Status()))
    assert EXPORT not in paired.log()
    assert cpu_of(paired).startswith("CPU-")
