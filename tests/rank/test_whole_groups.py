"""Whole groups: real ranks, the real engine, a real model, one machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flare.cores.export import export_core
from flare.system import free_port
from tests.cores.making import PUBLISHER
from tests.rank.lab import KEY, text_of, until_true

pytestmark = pytest.mark.engine

READY_LIMIT = 90.0  # seconds: half a second on an idle machine, much more on one that tests in parallel
GONE_LIMIT = 5.0  # the promise: when one part dies, all of the group is gone by then
SLACK = 10.0  # seconds that a busy machine may add to that before the test calls it broken
QUESTION = "What is the capital of France? Answer in one short sentence."
SERVING = ("--threads", "1", "--context-length", "512", "--max-concurrency", "2")


class Group:
    """Ranks as processes of this test, each with its output in a file."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def start(self, core: Path, ranks: int, *words: str) -> Group:
        """Start all ranks and wait until rank zero serves."""
        key = self.folder / "key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        address = f"127.0.0.1:{free_port()}"
        meeting = ("--rendezvous", address, "--rendezvous-key-file", str(key))
        accept = ("--accept-publisher", PUBLISHER.fingerprint)
        group = () if ranks == 1 else ("--rank", "0", *meeting)
        self.spawn(str(core), *group, *accept, *SERVING, "--port", "0", *words)
        for rank in range(1, ranks):
            cache = ("--core-cache", str(self.folder / f"cache{rank}"))
            self.spawn("--rank", str(rank), *meeting, *accept, *cache, "--threads", "1")
        until_true(lambda: "serving: " in self.output(0) or self.ranks[0].poll() is not None, READY_LIMIT)
        match = re.search(r"^serving: (http://\S+) answers", self.output(0), re.MULTILINE)
        assert match, self.all_output()
        self.url = match[1]
        return self

    def spawn(self, *words: str) -> None:
        with (self.folder / f"rank{len(self.ranks)}.log").open("wb") as output:
            self.ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "flare", "run", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                )
            )

    def output(self, rank: int) -> str:
        return text_of(self.folder / f"rank{rank}.log")

    def all_output(self) -> str:
        return "\n".join(f"-- rank {rank}\n{self.output(rank)}" for rank in range(len(self.ranks)))

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=READY_LIMIT)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = self.connection()
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text)

    def chat(self) -> str:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 30}
        status, answer = self.ask("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def stream(self, tokens: int) -> Stream:
        return Stream(self, tokens)

    def processes(self) -> dict[int, str]:
        """Return every process of this group, the engines included: all carry its HOME."""
        marker = f"HOME={self.environment['HOME']}".encode()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def engine_of(self, rank: int) -> int:
        """Return the process of a peer's engine, or of rank zero's."""
        name = "llama-server" if rank == 0 else "ggml-rpc-server"
        parents = {
            pid: int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            for pid in self.processes()
        }
        for pid, command in self.processes().items():
            if (
                name in command
                and "keeper.py" not in command
                and parents.get(parents[pid]) == self.ranks[rank].pid
            ):
                return pid
        raise AssertionError(f"rank {rank} has no {name}: {self.processes()}")

    def until_gone(self) -> float:
        """Wait until no process of the group is left; return how long it took."""
        begun = time.monotonic()

        def gone() -> bool:
            return all(rank.poll() is not None for rank in self.ranks) and not self.processes()

        until_true(gone, GONE_LIMIT + SLACK)
        return time.monotonic() - begun

    def statuses(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        until_true(lambda: not self.processes(), GONE_LIMIT + SLACK)


class Stream:
    """One streaming request, read in a thread."""

    def __init__(self, group: Group, tokens: int) -> None:
        self.connection = group.connection()
        body = {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.response = self.connection.getresponse()
        assert self.response.status == 200
        self.lines: list[bytes] = []
        self.failed = False
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        until_true(lambda: len(self.lines) > 4, READY_LIMIT)

    def _read(self) -> None:
        try:
            while line := self.response.readline():
                self.lines.append(line)
        except (OSError, http.client.HTTPException, ValueError):
            self.failed = True

    def finish(self) -> bool:
        """Wait for its end; tell whether the answer was whole."""
        self.thread.join(READY_LIMIT)
        assert not self.thread.is_alive()
        self.response.close()
        self.connection.close()
        return b"data: [DONE]\n" in self.lines

    def leave(self) -> None:
        """Hang up in the middle."""
        assert self.connection.sock is not None
        self.connection.sock.shutdown(2)
        self.finish()


@pytest.fixture(scope="session")
def cores(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return what gives the primary of a core of so many ranks, exported once."""
    folder = tmp_path_factory.mktemp("cores")
    source = Path(shutil.copy(smollm, folder / "SmolLM2.gguf"))
    made: dict[int, Path] = {}

    def core(ranks: int) -> Path:
        if ranks not in made:
            made[ranks] = export_core(
                source, folder / f"tp{ranks}", revision="cpu", ranks=ranks, publisher=PUBLISHER
            )
        return made[ranks]

    return core


@pytest.fixture
def group(tmp_path: Path, engine_data: Path) -> Iterator[Group]:
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    made = Group(
        tmp_path,
        {**kept, "HOME": str(home), "XDG_DATA_HOME": str(engine_data), "PYTHONUNBUFFERED": "1"},
    )
    yield made
    made.close()


def test_three_ranks_answer_each_holds_layers_and_a_drain_finishes_the_stream(
    group: Group, cores: Callable[[int], Path]
) -> None:
    group.start(cores(3), 3)
    assert "Paris" in group.chat()
    asked = {"input": QUESTION, "temperature": 0, "max_output_tokens": 30}
    status, answer = group.ask("POST", "/v1/responses", asked)  # the pinned build has it
    assert (status, answer["object"]) == (200, "response")
    assert "Paris" in json.dumps(answer["output"])
    holds = re.findall(r"(?m)^rank (\d) .*holds ([\d.]+) (MiB of weights|of 31 layers)", group.output(0))
    assert {rank for rank, *_ in holds} == {"0", "1", "2"}
    assert all(float(amount) > 1 for _, amount, _ in holds)
    for rank in (1, 2):
        assert re.search(r"^serving: holds [\d.]+ MiB of weights", group.output(rank), re.MULTILINE)
    # Engines listen on the loopback address alone.
    for pid, command in group.processes().items():
        if "rpc-server" in command and "keeper.py" not in command:
            assert " -H 127.0.0.1 " in command, pid
    status, document = group.ask("GET", "/metrics?format=json")
    assert status == 200
    assert document["generated_tokens_total"] > 0
    assert document["kv_tokens"]["capacity"] == 1024
    stream = group.stream(40)
    group.ranks[0].send_signal(signal.SIGTERM)
    group.ranks[0].send_signal(signal.SIGTERM)  # systemd and the agent both send one
    until_true(lambda: "draining: " in group.output(0))
    assert group.ask("GET", "/health") == (503, {"status": "draining"})
    assert stream.finish()
    group.until_gone()
    assert group.statuses() == [0, 0, 0], group.all_output()
    assert "stopped: every request was finished" in group.output(0)


@pytest.mark.parametrize("generating", [False, True])
def test_a_killed_rank_ends_the_group_in_time(
    group: Group, cores: Callable[[int], Path], generating: bool
) -> None:
    group.start(cores(3), 3)
    stream = group.stream(400) if generating else None
    group.ranks[1].kill()
    assert group.until_gone() < GONE_LIMIT + SLACK
    assert group.statuses() == [15, -signal.SIGKILL, 15], group.all_output()
    assert "failed: Rank 1 (127.0.0.1) is gone" in group.output(0)
    assert "failed: Rank zero ended the group: Rank 1 (127.0.0.1) is gone" in group.output(2)
    if stream is not None:
        assert not stream.finish()


def test_a_killed_engine_of_a_peer_is_the_reason(group: Group, cores: Callable[[int], Path]) -> None:
    group.start(cores(2), 2)
    os.kill(group.engine_of(1), signal.SIGKILL)
    group.until_gone()
    assert group.statuses() == [15, 8], group.all_output()
    assert re.search(
        r"^failed: Rank 1 .* failed: The engine of rank 1 is gone: ggml-rpc-server was killed by SIGKILL",
        group.output(0),
        re.MULTILINE,
    ), group.output(0)


def test_a_killed_engine_of_rank_zero_ends_all(group: Group, cores: Callable[[int], Path]) -> None:
    group.start(cores(2), 2)
    os.kill(group.engine_of(0), signal.SIGKILL)
    group.until_gone()
    assert group.statuses() == [8, 15], group.all_output()
    assert "The engine of rank 0 is gone: llama-server was killed by SIGKILL" in group.output(1)


def test_a_killed_rank_zero_ends_all(group: Group, cores: Callable[[int], Path]) -> None:
    group.start(cores(2), 2)
    stream = group.stream(400)
    group.ranks[0].kill()
    group.until_gone()
    assert not stream.finish()
    assert group.statuses() == [-signal.SIGKILL, 15], group.all_output()
    assert "failed: Rank zero is gone" in group.output(1)


def test_a_peer_that_is_asked_to_stop_has_the_group_drained(
    group: Group, cores: Callable[[int], Path]
) -> None:
    group.start(cores(2), 2)
    stream = group.stream(30)
    group.ranks[1].terminate()
    assert stream.finish()
    group.until_gone()
    assert group.statuses() == [0, 0], group.all_output()
    assert "rank 1 (127.0.0.1) was asked to stop" in group.output(0)


def test_alone_a_leaving_client_frees_the_engine_and_a_second_signal_cuts(
    group: Group, cores: Callable[[int], Path]
) -> None:
    group.start(cores(1), 1)
    group.stream(400).leave()

    def idle() -> bool:
        requests = group.ask("GET", "/metrics?format=json")[1]["requests"]
        return bool(requests["failed_total"] == 1 and requests["active"] == 0)

    until_true(idle, READY_LIMIT)
    assert "Paris" in group.chat()
    stream = group.stream(480)
    group.ranks[0].terminate()
    until_true(lambda: "draining: " in group.output(0))
    time.sleep(2.1)  # counted from the first signal, which was taken before
    group.ranks[0].terminate()
    assert not stream.finish()
    group.until_gone()
    assert group.statuses() == [1]
    assert "stopped: 1 request(s) were cut: stopped at once" in group.output(0)


def test_a_request_to_stop_while_it_loads_is_heeded(group: Group, cores: Callable[[int], Path]) -> None:
    group.spawn(str(cores(1)), "--accept-publisher", PUBLISHER.fingerprint, *SERVING, "--port", "0")
    until_true(lambda: "verifying: " in group.output(0), READY_LIMIT)
    group.ranks[0].send_signal(signal.SIGINT)
    group.until_gone()
    assert group.statuses() == [0], group.output(0)


def test_a_peer_that_is_stopped_before_all_have_met_ends_the_launch(
    group: Group, cores: Callable[[int], Path]
) -> None:
    key = group.folder / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    meeting = ("--rendezvous", f"127.0.0.1:{free_port()}", "--rendezvous-key-file", str(key))
    accept = ("--accept-publisher", PUBLISHER.fingerprint)
    group.spawn(str(cores(3)), "--rank", "0", *meeting, *accept, *SERVING, "--port", "0")
    group.spawn("--rank", "1", *meeting, *accept, "--core-cache", str(group.folder / "cache"))
    # Not as soon as rank zero says so: then the peer may not have read its welcome yet, and just leaves.
    until_true(lambda: "receiving: " in group.output(1), READY_LIMIT)
    group.ranks[1].terminate()
    group.until_gone()
    assert group.statuses() == [15, 0], group.all_output()
    assert "failed: Rank 1 (127.0.0.1) was stopped on its node" in group.output(0)
    assert "draining: SIGTERM came" in group.output(1)


def test_the_same_answer_alone_and_in_a_group(
    group: Group, cores: Callable[[int], Path], tmp_path: Path
) -> None:
    answers = []
    for ranks in (1, 2):
        group.start(cores(ranks), ranks)
        answers.append(group.chat())
        group.close()
        group.ranks.clear()
        group.folder = tmp_path / f"next{ranks}"
        group.folder.mkdir()
    assert answers[0] == answers[1]
