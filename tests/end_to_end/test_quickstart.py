"""The main job on the real model and the real engine: what the README promises, as a test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import quickstart_steps
from flare.system import free_port

pytestmark = pytest.mark.engine

STEPS = Path(quickstart_steps.__file__)
GROUP_ENDS_WITHIN = 5.0  # seconds, from the death of one rank to the end of every process of the group
SLACK = 10.0  # seconds that a busy machine may add to that before the test calls it broken


@dataclass
class Kept:
    """A quickstart that was left running."""

    folder: Path
    output: str
    url: str

    def flare(self, *words: str, check: bool = True) -> str:
        """Run a command of the controller and return what it printed; its errors too without `check`."""
        home = self.folder / "controller"
        data = quickstart_steps.FETCHED / "data"
        environment = {**os.environ, "HOME": str(home), "XDG_DATA_HOME": str(data)}
        command = [str(quickstart_steps.FLARE), *words]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=check
        )
        return result.stdout if check else result.stdout + result.stderr

    def processes(self) -> dict[int, str]:
        """Return every process with a HOME below the folder: its id and command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if any(value.startswith(f"HOME={self.folder}/".encode()) for value in variables):
                found[int(entry.name)] = command
        return found

    def agents(self) -> list[int]:
        """Return the process ids of the two agents."""
        return [int(path.read_text()) for path in self.folder.glob("*/agent.pid")]


def quickstart(folder: Path, *words: str) -> str:
    result = subprocess.run(
        [sys.executable, str(STEPS), *words],
        env={**os.environ, "FLARE_QUICKSTART_FOLDER": str(folder), "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


@pytest.fixture
def kept(tmp_path: Path, engine_data: Path) -> Iterator[Kept]:
    output = quickstart(tmp_path / "quickstart", "--keep")
    found = re.search(r"curl (http://127\.0\.0\.1:\d+)/v1/models", output)
    assert found, output
    group = Kept(tmp_path / "quickstart", output, found.group(1))
    try:
        yield group
    finally:
        for pid in group.agents():
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while group.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert group.processes() == {}


def test_from_nothing_to_answers_and_nothing_left(tmp_path: Path, engine_data: Path) -> None:
    output = quickstart(tmp_path / "quickstart")
    assert "Paris" in output
    assert "Tokyo" in output
    assert "no process is left" in output
    assert re.search(r"rank 1 \S*\s*holds [\d.]+ MiB of weights", output)
    assert Kept(tmp_path / "quickstart", output, "").processes() == {}


def test_the_death_of_one_rank_ends_the_group(kept: Kept) -> None:
    with urllib.request.urlopen(f"{kept.url}/health", timeout=10) as answer:
        assert json.load(answer) == {"status": "serving"}
    ranks = {pid: line for pid, line in kept.processes().items() if pid not in kept.agents()}
    (rank_one,) = [pid for pid, line in ranks.items() if "run --rank 1 " in line and "keeper" not in line]

    os.kill(rank_one, signal.SIGKILL)
    killed = time.monotonic()
    while set(kept.processes()) - set(kept.agents()) and time.monotonic() - killed < 60:
        time.sleep(0.05)
    took = time.monotonic() - killed

    assert set(kept.processes()) == set(kept.agents())
    assert took < GROUP_ENDS_WITHIN + SLACK
    (run,) = json.loads(kept.flare("orbit", "ls", "--json"))["runs"]
    assert run["state"] == "failed"


def test_stop_drains_and_the_devices_are_free_again(kept: Kept) -> None:
    kept.flare("orbit", "stop", "smollm")
    assert set(kept.processes()) == set(kept.agents())
    status = json.loads(kept.flare("orbit", "status", "--json"))
    assert [gpu.get("group") for node in status["nodes"] for gpu in node["gpus"]] == [None, None]
    (run,) = json.loads(kept.flare("orbit", "ls", "--json"))["runs"]
    assert (run["state"], run["ranks"][0]["status"]) == ("exited", 0)


@pytest.mark.parametrize("node", ["maxwell", "hertz"])
def test_a_rank_that_fails_before_the_ranks_meet_ends_the_group(kept: Kept, node: str) -> None:
    kept.flare("orbit", "stop", "smollm")
    settings = kept.folder / node / ".config/flare/config.toml"
    settings.write_text("nonsense = 1\n")
    (core,) = (kept.folder / "cores").glob("*.safetensors")
    words = ("orbit", "run", str(core), "--nodes", "maxwell,hertz", "--name", "again", "--threads", "1")
    began = time.monotonic()
    output = kept.flare(*words, "--port", str(free_port()), *(["--detach"] * (node == "hertz")), check=False)
    rank = 0 if node == "maxwell" else 1
    assert f"rank {rank} on {node} failed with status 3: " in output
    assert f"with status 3: {settings}" in output, output
    assert time.monotonic() - began < GROUP_ENDS_WITHIN + SLACK
    assert set(kept.processes()) == set(kept.agents())
    settings.unlink()
    kept.flare("orbit", "rm", "again")
    kept.flare(*words, "--port", str(free_port()), "--detach")


def test_a_dead_agent_leaves_no_rank(kept: Kept) -> None:
    for pid in kept.agents():
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while kept.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert kept.processes() == {}
    for path in kept.folder.glob("*/agent.pid"):
        path.unlink()
