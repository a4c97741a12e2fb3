"""Launching, following and stopping groups on real agents; the ranks are small programs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from flare.errors import UnreachableError
from flare.orbit.client import Client
from flare.orbit.controller import Controller
from flare.orbit.launch import launch, plan_launch
from flare.orbit.request import RunOptions, plan_request
from flare.paths import Paths
from tests.cores.making import MIB, PUBLISHER, pattern, write_core
from tests.orbit.lab import Lab, read_until, wait_for
from tests.orbit.reporting import RecordingReporter

TRUST = ("--accept-publisher", PUBLISHER.fingerprint)


def make_core(folder: Path, *, ranks: int = 2, size: int = 3000, name: str = "tiny.safetensors") -> Path:
    return write_core(
        folder,
        {"model/Tiny.gguf": pattern(size), "model/empty.json": b""},
        name=name,
        engine="llama.cpp",
        layout="multi_host" if ranks > 1 else "single_host",
        ranks=ranks,
        parallel={"tensor": 1, "pipeline": ranks},
        rank_ranges=[None] + [[]] * (ranks - 1) if ranks > 1 else [None],
    )


def states(orbit: Lab) -> dict[str, str]:
    return {str(run["name"]): str(run["state"]) for run in orbit.runs()}


def completed(orbit: Lab, *words: str) -> list[str]:
    """What the shell offers for the last word."""
    argv, environment = orbit.command()
    done = subprocess.run(
        argv,
        env=environment
        | {
            "_FLARE_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("flare", *words)),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return [line.removeprefix("plain,") for line in done.stdout.splitlines()]


def test_a_dry_run_prints_the_placement_and_sends_nothing(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("hertz", "maxwell")
    core = make_core(tmp_path / "core")
    outcome = orbit.flare("orbit", "run", str(core), "--nodes", "maxwell,hertz", "--dry-run", *TRUST)
    assert outcome.code == 0, outcome
    assert outcome.out.splitlines() == [
        f"Group tiny: Tiny, llama.cpp, 2 ranks, {core}",
        "  rank 0  maxwell  the CPU (cpu)  receives 3,000 bytes",
        "  rank 1  hertz  the CPU (cpu)  needs no core data",
    ]
    assert "without a key" not in outcome.err
    assert orbit.flare("orbit", "cores").out == "No node has a core in its cache.\n"
    assert orbit.runs() == []
    words = ("--nodes", "maxwell,hertz", "--dry-run", "--json", "--host", "0.0.0.0")
    outcome = orbit.flare("orbit", "run", str(core), *words, *TRUST)
    assert json.loads(outcome.out)["url"] == "http://127.0.0.1:8000"
    assert "0.0.0.0 without a key: every machine that reaches maxwell can use the model" in outcome.err
    assert not (orbit.orbit_file.parent / "trust.toml").exists()


def test_a_launch_is_followed_and_ctrl_c_stops_it(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    words = ("orbit", "run", str(core), "--nodes", "maxwell,hertz", "--name", "glm", "--port", "8123", *TRUST)
    with orbit.running(*words) as process:
        lines = read_until(process, "[rank 1 hertz] serving")
        text = "".join(lines)
        assert "Uploading 3 files" in text
        assert f"maxwell runs {orbit.folder}/bin/flare" in text
        assert "http://127.0.0.1:8123 on maxwell answers once" in text
        assert re.search(
            r"\[rank 0 maxwell\] rank 0 says hello from run \S+/tiny\.safetensors --rank 0", text
        )
        assert "[rank 1 hertz] rank 1 says hello from run --rank 1 --rendezvous 127.0.0.1:" in text
        taken = orbit.flare("orbit", "run", str(core), "--name", "glm", "--dry-run")
        assert taken.code == 7
        assert "A group named glm runs already on" in taken.err
        full = orbit.flare("orbit", "run", str(core), "--name", "other")
        assert full.code == 7
        assert "is held by the running group glm-" in full.err
        listed = orbit.flare("orbit", "ls").out
        assert re.search(r"glm +running +serving .* 0 maxwell:0, 1 hertz:0 +http://127.0.0.1:8123", listed)
        process.send_signal(signal.SIGINT)
        rest = "".join(read_until(process, "Stopped glm"))
        assert "running requests are finished first" in rest
        assert process.wait(timeout=60) == 0
    assert states(orbit) == {"glm": "exited"}


def test_ctrl_c_twice_leaves_at_once_and_says_what_remains(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1)
    with orbit.running("orbit", "run", str(core), "--served-name", "slow", *TRUST) as process:
        read_until(process, "] serving")
        process.send_signal(signal.SIGINT)
        read_until(process, "[rank 0 maxwell] draining")
        process.send_signal(signal.SIGINT)
        rest = "".join(read_until(process, "may still run"))
        assert "Left while rank 0 on maxwell may still run" in rest
        assert process.wait(timeout=60) == 130
    assert states(orbit) == {"tiny": "running"}
    assert orbit.flare("orbit", "stop", "--now").code == 0
    assert states(orbit)["tiny"] != "running"


def test_sigterm_leaves_a_followed_group_and_says_that_it_runs_on(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1)
    with orbit.running("orbit", "run", str(core), *TRUST) as process:
        started = "".join(read_until(process, "] serving"))
        assert "Ctrl-C stops the group" in started
        assert "Follow it: flare orbit attach" not in started
        process.send_signal(signal.SIGTERM)
        rest = "".join(read_until(process, "Terminated"))
        assert (
            "Terminated: tiny runs on (rank 0 on maxwell). Follow it with `flare orbit attach tiny`, end it "
            "with `flare orbit stop tiny`."
        ) in rest
        assert process.wait(timeout=60) == 143
    assert states(orbit) == {"tiny": "running"}
    assert orbit.flare("orbit", "stop", "--now").code == 0


def test_ctrl_c_while_a_group_drains_says_that_it_goes_on(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1)
    with orbit.running("orbit", "run", str(core), "--served-name", "slow", *TRUST) as group:
        read_until(group, "] serving")
        with orbit.running("orbit", "stop") as process:
            read_until(process, "asked rank 0 on maxwell to stop")
            drains = "".join(read_until(process, "finishes running requests"))
            assert "its --drain-timeout allows (120 s unless given). `flare orbit stop tiny --now`" in drains
            process.send_signal(signal.SIGINT)
            rest = "".join(read_until(process, "interrupted"))
            assert process.wait(timeout=60) == 130
        assert (
            "Left while tiny stops. Its nodes go on with it: rank 0 on maxwell was asked to finish running "
            "requests and end. Look with `flare orbit ls`, hurry it with `flare orbit stop tiny --now`."
        ) in rest
        assert "Traceback" not in rest
        read_until(group, "draining")
        assert orbit.flare("orbit", "stop", "tiny", "--now").code == 0


def test_ctrl_c_during_an_upload_starts_nothing(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1, size=120 * MIB)
    with orbit.running("orbit", "run", str(core), *TRUST) as process:
        read_until(process, "Uploading")
        assert "Interrupted: tiny was not started." in orbit.interrupted(process, "maxwell")
    assert orbit.runs() == []


def test_detach_attach_stop_and_rm(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    first = orbit.flare("orbit", "run", str(core), "--name", "glm", "--detach", *TRUST)
    assert first.code == 0, first
    with orbit.running("orbit", "attach", "glm") as process:
        read_until(process, "] serving")
        process.send_signal(signal.SIGINT)
        read_until(process, "Detached; the group goes on.")
        assert process.wait(timeout=60) == 0
    assert states(orbit) == {"glm": "running"}
    for command in ("attach", "stop", "rm"):
        assert completed(orbit, "orbit", command, "g") == ["glm"]
    (launch,) = completed(orbit, "orbit", "stop", "glm-")
    assert launch == orbit.runs()[0]["launch"]
    assert completed(orbit, "orbit", "run", "--nodes", "maxwell,h") == ["maxwell,hertz"]
    assert sorted(completed(orbit, "orbit", "forget", "")) == ["hertz", "maxwell"]
    refused = orbit.flare("orbit", "rm", "glm")
    assert refused.code == 7
    assert "Stop it first: `flare orbit stop glm`" in refused.err
    assert orbit.flare("orbit", "stop", "nobody").code == 11
    stopped = orbit.flare("orbit", "stop", "glm")
    assert stopped.code == 0, stopped
    assert stopped.out.startswith("Stopped glm (glm-")
    assert "asked rank 0" in stopped.err
    assert "asked rank 1" not in stopped.err  # it left with rank zero
    again = orbit.flare("orbit", "stop", "glm")
    assert again.code == 11
    assert "has ended already" in again.err
    assert "No group runs on these nodes." in orbit.flare("orbit", "stop").err
    attached = orbit.flare("orbit", "attach")
    assert attached.code == 0
    assert "] stopped." in attached.out
    second = orbit.flare("orbit", "run", str(core), "--name", "glm", "--detach")
    assert "has the core in its cache already" in second.err
    launches = [str(run["launch"]) for run in orbit.runs()]
    with orbit.running("orbit", "attach", "glm") as process:
        told = "".join(read_until(process, "] serving"))
    assert f"Of 2 launches called glm this follows {launches[1]} (running); `flare orbit ls`" in told
    ended = json.loads(orbit.flare("orbit", "stop", "--json").out)["stopped"]
    assert [(rank["rank"], rank["status"], rank["remark"]) for rank in ended] == [(0, 0, None), (1, 0, None)]
    removed = orbit.flare("orbit", "rm", launches[0])
    assert removed.out == f"Removed the history of {launches[0]}.\n"
    assert [run["launch"] for run in orbit.runs()] == launches[1:]
    assert orbit.flare("orbit", "rm", "glm").code == 0
    assert orbit.runs() == []
    gone = orbit.flare("orbit", "rm", "glm")
    assert gone.code == 11
    assert "neither a saved group nor a run called glm" in gone.err


def test_a_failed_rank_gives_the_exit_code_and_its_last_words(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    outcome = orbit.flare(
        "orbit",
        "run",
        str(core),
        "--name",
        "glm",
        "--nodes",
        "maxwell,hertz",
        "--served-name",
        "exit-3-at-0",
        *TRUST,
    )
    assert outcome.code == 15, outcome
    assert "The group glm failed:\n  rank 0 on maxwell failed with status 3" in outcome.err
    assert "[rank 0 maxwell] out of memory" in outcome.out
    listed = orbit.flare("orbit", "ls")
    assert re.search(r"glm +failed", listed.out)
    assert orbit.flare("orbit", "attach", "glm").code == 15
    assert orbit.flare("orbit", "rm", "glm").code == 0


def test_a_saved_group_starts_again_by_its_name(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    words = (
        "orbit",
        "run",
        str(core),
        "--name",
        "glm",
        "--persistent",
        "--detach",
        "--nodes",
        "hertz,maxwell",
    )
    assert orbit.flare(*words, "--max-concurrency", "4", "--port", "8200", *TRUST, "--dry-run").code == 0
    assert "glm" not in orbit.orbit_file.read_text()
    assert orbit.flare(*words, "--max-concurrency", "4", "--port", "8200", *TRUST).code == 0
    assert orbit.flare("orbit", "stop").code == 0
    listed = orbit.flare("orbit", "ls").out
    assert re.search(rf"glm +stopped +{core}", listed)
    again = orbit.flare("orbit", "run", "--name", "glm", "--detach", "--max-concurrency", "2")
    assert again.code == 0, again
    assert "rank 0  hertz" in again.out
    assert "http://127.0.0.1:8200" in again.out
    with orbit.running("orbit", "attach", "glm") as process:
        assert "--max-concurrency 2" in "".join(read_until(process, "says hello"))
    assert orbit.flare("orbit", "stop", "glm", "--now").code == 0
    orbit.end("maxwell")
    assert re.search("glm +unknown", orbit.flare("orbit", "ls").out)
    orbit.start("maxwell")
    assert orbit.flare("orbit", "pair", orbit.agents["maxwell"].address).code == 0
    assert "Removed the saved group glm." in orbit.flare("orbit", "rm", "glm").out
    assert "[[group]]" not in orbit.orbit_file.read_text()


def test_a_core_on_a_node_is_read_in_place_and_never_copied(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    outcome = orbit.flare("orbit", "run", f"hertz:{core}", "--detach", *TRUST)
    assert outcome.code == 0, outcome
    assert f"rank 0  hertz  the CPU (cpu)  reads {core} in place" in outcome.out
    assert orbit.flare("orbit", "cores").out == "No node has a core in its cache.\n"
    assert orbit.flare("orbit", "stop").code == 0


def test_a_core_on_a_node_that_cannot_be_used_is_refused(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1)
    missing = orbit.flare("orbit", "run", f"maxwell:{tmp_path}/none.safetensors", "--dry-run", *TRUST)
    assert missing.code == 11
    assert f"Node maxwell has no core at {tmp_path}/none.safetensors" in missing.err
    nobody = orbit.flare("orbit", "run", f"nobody:{core}", "--dry-run")
    assert nobody.code == 11
    assert "No node named nobody is paired" in nobody.err
    model = tmp_path / "core/model/Tiny.gguf"
    model.write_bytes(b"short")
    changed = orbit.flare("orbit", "run", f"maxwell:{core}", "--dry-run", *TRUST)
    assert changed.code == 6
    assert "has 5 bytes on node maxwell" in changed.err
    model.unlink()
    missing = orbit.flare("orbit", "run", f"maxwell:{core}", "--dry-run", *TRUST)
    assert missing.code == 6
    assert f"The core {core} needs the file model/Tiny.gguf beside it." in missing.err
    data = bytearray(core.read_bytes())
    data[-5] ^= 1  # inside the digest table
    core.write_bytes(data)
    model.write_bytes(pattern(3000))
    for reference in (f"maxwell:{core}", str(core)):
        damaged = orbit.flare("orbit", "run", reference, "--dry-run", *TRUST)
        assert damaged.code == 6
        assert f"The digest table of {reference} is not the one that was signed" in damaged.err


def test_a_large_file_goes_over_several_connections_and_arrives_whole(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    size = 50 * MIB + 12345
    core = make_core(tmp_path / "core", ranks=1, size=size)
    outcome = orbit.flare("orbit", "run", str(core), "--detach", "--transfer-streams", "3", *TRUST)
    assert outcome.code == 0, outcome
    (arrived,) = (tmp_path / "maxwell/.cache/flare/cores").glob("*/model/Tiny.gguf")
    assert hashlib.sha256(arrived.read_bytes()).digest() == hashlib.sha256(pattern(size)).digest()
    assert orbit.flare("orbit", "stop").code == 0
    assert re.search(r"maxwell +tiny +3 +\d+\.\d MB +not yet +\S+", orbit.flare("orbit", "cores").out)


def test_a_rank_zero_that_holds_the_core_needs_no_way_to_it(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    words = ("--nodes", "maxwell,hertz", "--detach", *TRUST)
    elsewhere = ("orbit", "run", f"hertz:{core}", "--roce-ring", *words)
    refused = orbit.flare(*elsewhere)
    assert refused.code == 4
    assert "none of these nodes has an active one" in refused.err
    assert orbit.flare("orbit", "run", str(core), *words).code == 0  # uploads it, and nobody verifies it yet
    assert orbit.flare("orbit", "stop").code == 0
    held = orbit.flare(*elsewhere)
    assert held.code == 0, held
    assert "maxwell has the core in its cache already." in held.err
    assert orbit.flare("orbit", "stop").code == 0


def test_a_name_that_runs_on_any_node_is_taken(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core", ranks=1)
    words = ("orbit", "run", str(core), "--name", "glm", "--detach", *TRUST)
    assert orbit.flare(*words, "--nodes", "maxwell").code == 0
    taken = orbit.flare(*words, "--nodes", "hertz")
    assert taken.code == 7
    assert "A group named glm runs already on maxwell (glm-" in taken.err
    assert "`flare orbit stop glm`, or give this one another name with --name" in taken.err
    assert not [*(tmp_path / "hertz/.cache/flare/cores").iterdir()]
    assert orbit.flare("orbit", "stop").code == 0


def test_detach_tells_of_a_rank_zero_that_fails_at_once(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1)
    outcome = orbit.flare("orbit", "run", str(core), "--detach", "--served-name", "taken", *TRUST)
    assert outcome.code == 15
    assert "ended as soon as it was started: rank 0 on maxwell failed with status 9" in outcome.err
    assert "port 8123 is taken" in outcome.err
    assert "Started" not in outcome.out


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_before_the_ranks_meet_ends_its_group(
    orbit: Lab, tmp_path: Path, rank: int, followed: bool
) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    words = ["orbit", "run", str(core), "--nodes", "maxwell,hertz", "--served-name", f"unmet-3-at-{rank}"]
    began = time.monotonic()
    outcome = orbit.flare(*words, *([] if followed else ["--detach"]), *TRUST)
    assert time.monotonic() - began < 20  # seconds of a busy machine; unstopped ranks would wait for ever
    assert outcome.code == 15
    node, other = ("maxwell", "hertz") if rank == 0 else ("hertz", "maxwell")
    assert f"rank {rank} on {node} failed with status 3: config.toml has no such key." in outcome.err
    if followed:
        told = f"rank {1 - rank} on {other} will not meet rank {rank} on {node}: stopping."
        assert told in outcome.err
    else:
        assert "ended as soon as it was started: rank" in outcome.err
        assert "Started" not in outcome.out
    listed = orbit.flare("orbit", "ls").out
    assert f"rank {rank} on {node} failed with status 3: config.toml has no such key." in listed
    assert orbit.flare("orbit", "rm", "tiny").code == 0


def test_a_build_of_the_operators_own_runs_on_every_node(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    build = tmp_path / "build"
    build.write_text(
        (orbit.folder / "bin/flare").read_text().replace("Path(__file__).parent", f"Path({str(tmp_path)!r})")
    )
    words = (
        "orbit",
        "run",
        f"maxwell:{core}",
        "--name",
        "glm",
        "--detach",
        "--executable",
        str(build),
        *TRUST,
    )
    refused = orbit.flare(*words)
    assert refused.code == 2
    assert f"chmod +x {build}" in refused.err
    build.chmod(0o755)
    first = orbit.flare(*words)
    assert first.code == 0, first
    assert f"Uploading {build} to maxwell as flare-" in first.err
    assert f"Uploading {build} to hertz as flare-" in first.err
    assert orbit.flare("orbit", "stop").code == 0
    again = orbit.flare(*words, "--json")
    assert again.code == 0, again
    assert "Uploading" not in again.err
    document = json.loads(again.out)
    assert document["members"] == [{"rank": 0, "node": "maxwell"}, {"rank": 1, "node": "hertz"}]
    assert orbit.flare("orbit", "stop", document["launch"]).code == 0
    assert orbit.flare("orbit", "run", str(core), "--executable", str(tmp_path / "none")).code == 11
    assert orbit.flare("orbit", "run", str(core), "--executable", str(tmp_path)).code == 2


def test_a_full_cache_is_refused_before_anything_is_sent(orbit: Lab, tmp_path: Path) -> None:
    settings = orbit.folder / "maxwell/.config/flare/config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[agent]\ncache_limit = 2000\n")
    orbit.paired("maxwell")
    outcome = orbit.flare("orbit", "run", str(make_core(tmp_path / "core", ranks=1)), *TRUST)
    assert outcome.code == 9, outcome
    assert "but the cache of maxwell has room for 2,000" in outcome.err
    assert "Uploading" not in outcome.err


def test_a_group_whose_rank_zero_is_away_is_stopped_as_far_as_it_goes(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    words = (
        "orbit",
        "run",
        str(core),
        "--nodes",
        "maxwell,hertz",
        "--name",
        "glm",
        "--served-name",
        "stay",
        *TRUST,
    )
    assert orbit.flare(*words, "--detach").code == 0
    orbit.agents["maxwell"].process.kill()
    orbit.end("maxwell")
    assert "no node that answered knows rank 0" in orbit.flare("orbit", "ls").err
    outcome = orbit.flare("orbit", "stop", "glm")
    assert outcome.code == 4
    assert "Stopped glm" in outcome.out
    assert "Ranks on maxwell could not be asked" in outcome.err
    assert "did not." in orbit.flare("orbit", "stop", "glm").err


def test_a_member_that_is_lost_stops_the_others(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    reporter = RecordingReporter()
    paths = Paths.from_environment({"HOME": str(orbit.folder / "controller")})
    controller = Controller.open(paths, reporter)
    request = plan_request(
        controller.orbit,
        RunOptions(
            core=f"maxwell:{core}",
            name="glm",
            nodes=("maxwell", "hertz"),
            accept_publisher=PUBLISHER.fingerprint,
        ),
    )

    async def scenario() -> None:
        client = Client(controller)
        plan = await plan_launch(client, request)
        orbit.end("hertz")
        with pytest.raises(UnreachableError, match="hertz"):
            await launch(client, plan, None)

    asyncio.run(scenario())
    assert "Stopping what was started of glm." in reporter.notes
    wait_for(lambda: states(orbit) == {"glm": "exited"} or states(orbit) == {"glm": "failed"})


def test_peers_that_stay_are_told_to_stop(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = make_core(tmp_path / "core")
    words = ("orbit", "run", str(core), "--name", "glm", "--served-name", "stay", "--detach", *TRUST)
    assert orbit.flare(*words).code == 0
    outcome = orbit.flare("orbit", "stop", "glm", "--now")
    assert outcome.code == 0, outcome
    assert "asked rank 1" in outcome.err
    assert "at once" in outcome.err


def test_a_node_without_the_engine_is_named_before_anything_moves(orbit: Lab, tmp_path: Path) -> None:
    (orbit.folder / "bin/llama-server").unlink()
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1)
    outcome = orbit.flare("orbit", "run", str(core), *TRUST)
    assert outcome.code == 8
    assert "llama.cpp" in outcome.err
    assert "Uploading" not in outcome.err


def test_a_core_on_another_node_is_fetched_before_ranks_start(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz", "volta")
    core = make_core(tmp_path / "core", size=3 * MIB + 17)
    for source in ("hertz", "volta"):  # a member of the group, and a node outside it
        words = (
            "orbit",
            "run",
            f"{source}:{core}",
            "--nodes",
            "maxwell,hertz",
            "--name",
            "glm",
            "--detach",
            *TRUST,
        )
        outcome = orbit.flare(*words)
        assert outcome.code == 0, outcome
        if source == "hertz":
            assert f"maxwell fetches the core from {source}." in outcome.err
            assert "maxwell fetched" in outcome.err
        else:
            assert "maxwell has the core in its cache already." in outcome.err
        assert orbit.flare("orbit", "stop").code == 0
    (arrived,) = (tmp_path / "maxwell/.cache/flare/cores").glob("*/model/Tiny.gguf")
    assert arrived.read_bytes() == pattern(3 * MIB + 17)
    assert re.search(r"maxwell +tiny +3 +\S+ MB +yes", orbit.flare("orbit", "cores").out)
