"""Ranks on hosts that are apart: what takes which cable, and what happens when one is cut."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flare.cores.export import export_core
from netlab import Lab
from tests.cores.making import PUBLISHER
from tests.rank.lab import KEY, text_of, until_true

pytestmark = [pytest.mark.root, pytest.mark.engine]

READY_LIMIT = 90.0
NOTICED = 5.0  # the promise for a cable that was cut
SLACK = 10.0  # seconds that a busy machine may add
WEIGHTS = 50 << 20  # bytes of layers that the engine sends to rank 1; a little less than it really sends


class TwoHosts:
    """Rank 0 on host0 and rank 1 on host1, on a management network and two rails."""

    def __init__(self, lab: Lab, core: Path, folder: Path, data: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.clients: list[subprocess.Popen[bytes]] = []
        key = folder / "key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        meeting = ("--rendezvous-key-file", str(key), "--accept-publisher", PUBLISHER.fingerprint)
        common = (*meeting, "--threads", "1", "--context-length", "256", "--max-concurrency", "1")
        zero = lab.hosts[0].address
        self.ranks = [
            self.spawn(0, data, str(core), "--rank", "0", "--rendezvous", "0.0.0.0:29800", *common),
            self.spawn(1, data, "--rank", "1", "--rendezvous", f"{zero}:29800", *common),
        ]
        until_true(
            lambda: "serving: " in self.output(0) or any(rank.poll() is not None for rank in self.ranks),
            READY_LIMIT,
        )
        assert "serving: " in self.output(0), self.output(0) + self.output(1)

    def spawn(self, number: int, data: Path, *words: str) -> subprocess.Popen[bytes]:
        host = self.lab.hosts[number]
        settings = host.home / ".config/flare/config.toml"
        settings.parent.mkdir(parents=True, exist_ok=True)
        interfaces = ", ".join(f'"{end.name}"' for end in host.fabric)
        settings.write_text(f"[fabric]\ninterfaces = [{interfaces}]\n")
        with (self.folder / f"rank{number}.log").open("wb") as output:
            process: subprocess.Popen[bytes] = host.popen(
                [sys.executable, "-m", "flare", "run", *words],
                env={"XDG_DATA_HOME": str(data), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            return process

    def output(self, rank: int) -> str:
        return text_of(self.folder / f"rank{rank}.log")

    def client(self, code: str, *words: str) -> None:
        """Run a Python program on rank zero's host until the end."""
        argv = [sys.executable, "-c", code, *words]
        quiet = subprocess.DEVNULL
        self.clients.append(self.lab.hosts[0].popen(argv, stdin=quiet, stdout=quiet, stderr=quiet))

    def tunnel_port(self) -> int:
        """Return the loopback port at which rank zero's engine reaches rank 1."""
        for word_file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = word_file.read_bytes().split(b"\0")
                inside = (word_file.parent / "ns/net").stat().st_ino == self.network(0)
                if inside and b"--rpc" in words:
                    return int(words[words.index(b"--rpc") + 1].rpartition(b":")[2])
        raise AssertionError("rank zero's engine does not run")

    def network(self, host: int) -> int:
        return Path(f"/var/run/netns/{self.lab.hosts[host].namespace}").stat().st_ino

    def carried(self) -> int:
        """Return the bytes that came to rank 1 over the rails."""
        return sum(self.lab.hosts[1].counters(end.name).received for end in self.lab.hosts[1].fabric)

    def cut_rails(self) -> None:
        for rail in (0, 1):
            self.lab.cut(0, 1, rail)

    def until_ended(self, record: Callable[[str, object], None]) -> None:
        """Wait for the end of both, and record how long it took: a busy machine is no fault of ours."""
        begun = time.monotonic()
        until_true(lambda: all(rank.poll() is not None for rank in self.ranks), NOTICED + SLACK)
        seconds = time.monotonic() - begun
        record("seconds", round(seconds, 2))
        print(f"the group ended {seconds:.2f} s after the cut; the promise is {NOTICED:g} s")

    def close(self) -> None:
        for process in (*self.ranks, *self.clients):
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def hosts(tmp_path: Path, smollm: Path, engine_data: Path) -> Iterator[TwoHosts]:
    source = Path(shutil.copy(smollm, tmp_path / "SmolLM2.gguf"))
    core = export_core(source, tmp_path / "core", revision="cpu", ranks=2, publisher=PUBLISHER)
    with Lab(hosts=2, rails=2) as lab:
        made = TwoHosts(lab, core, tmp_path, engine_data)
        yield made
        made.close()


def test_the_engines_bytes_take_the_rails_and_its_port_is_closed_to_the_network(hosts: TwoHosts) -> None:
    near, far = hosts.lab.hosts
    carried = [far.counters(end.name).received for end in far.fabric]
    assert sum(carried) > WEIGHTS
    assert far.counters().received < 1 << 20  # the meeting alone
    endpoint = re.search(r"endpoint +: 127\.0\.0\.1:(\d+)", hosts.output(1))
    assert endpoint, hosts.output(1)
    script = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
    for address in (far.address, far.fabric[0].address):
        done = near.run([sys.executable, "-c", script, address, endpoint[1]], capture_output=True, text=True)
        assert "ConnectionRefusedError" in done.stderr


def test_a_cut_management_cable_ends_both_ranks(
    hosts: TwoHosts, record_property: Callable[[str, object], None]
) -> None:
    hosts.lab.cut_management(hosts.lab.hosts[1])
    hosts.until_ended(record_property)
    assert [rank.returncode for rank in hosts.ranks] == [15, 15]
    assert "failed: Rank 1" in hosts.output(0)
    assert "failed: Rank zero is gone" in hosts.output(1)


def test_cut_rails_end_the_group_though_nobody_asks_for_anything(
    hosts: TwoHosts, record_property: Callable[[str, object], None]
) -> None:
    hosts.cut_rails()
    hosts.until_ended(record_property)
    assert_the_cable_is_the_reason(hosts)


def test_one_cut_rail_of_two_ends_the_group(
    hosts: TwoHosts, record_property: Callable[[str, object], None]
) -> None:
    hosts.lab.cut(1, 0, 1)
    hosts.until_ended(record_property)
    assert_the_cable_is_the_reason(hosts)


def test_rails_that_are_cut_while_requests_run_end_the_group(
    hosts: TwoHosts, record_property: Callable[[str, object], None]
) -> None:
    url = re.search(r"http://127\.0\.0\.1:\d+", hosts.output(0))
    assert url, hosts.output(0)
    hosts.client(
        "import json, sys, urllib.request as http\n"
        "body = json.dumps({'prompt': 'word ' * 180, 'max_tokens': 40, 'cache_prompt': False}).encode()\n"
        "while True:\n"
        "    head = {'Content-Type': 'application/json'}\n"
        "    http.urlopen(http.Request(sys.argv[1] + '/v1/completions', body, head)).read()\n",
        url[0],
    )
    before = hosts.carried()
    until_true(lambda: hosts.carried() > before + (2 << 20))
    hosts.cut_rails()
    hosts.until_ended(record_property)
    assert_the_cable_is_the_reason(hosts)


def test_an_engine_that_reads_nothing_is_not_taken_for_a_cut_cable(
    hosts: TwoHosts, record_property: Callable[[str, object], None]
) -> None:
    # The engine serves one connection; what comes on a second one stays unread, until all buffers are full.
    hosts.client(
        "import socket, sys\n"
        "connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "while True:\n"
        "    connection.sendall(bytes(65536))\n",
        str(hosts.tunnel_port()),
    )
    before = hosts.carried()
    until_true(lambda: hosts.carried() > before + (1 << 20))
    begun = time.monotonic()
    until_true(lambda: time.monotonic() - begun > 2 * NOTICED)
    assert [rank.poll() for rank in hosts.ranks] == [None, None], hosts.output(0) + hosts.output(1)
    hosts.cut_rails()
    hosts.until_ended(record_property)
    assert_the_cable_is_the_reason(hosts)


def assert_the_cable_is_the_reason(hosts: TwoHosts) -> None:
    # One of them notices first and tells the other over the management network, or both notice at once.
    assert {rank.returncode for rank in hosts.ranks} in ({4}, {4, 15})
    for rank in (0, 1):
        assert re.search(r"failed: .*broke: .*Is a cable unplugged", hosts.output(rank)), hosts.output(rank)
