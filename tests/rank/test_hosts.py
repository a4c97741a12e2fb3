"""Ranks on hosts that are apart: what takes which cable, and what happens when one is cut."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
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

    def until_ended(self) -> float:
        begun = time.monotonic()
        until_true(lambda: all(rank.poll() is not None for rank in self.ranks), NOTICED + SLACK)
        return time.monotonic() - begun

    def close(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


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


def test_a_cut_management_cable_ends_both_ranks_in_time(hosts: TwoHosts) -> None:
    hosts.lab.cut_management(hosts.lab.hosts[1])
    cut = time.monotonic()
    # The kernel's clock decides this, however busy the machine is; what is left after it is 0.3 s of killing.
    until_true(lambda: all("failed: " in hosts.output(rank) for rank in (0, 1)), NOTICED + SLACK)
    assert time.monotonic() - cut < NOTICED
    assert hosts.until_ended() < NOTICED + SLACK
    assert [rank.returncode for rank in hosts.ranks] == [15, 15]
    assert "failed: Rank 1" in hosts.output(0)
    assert "failed: Rank zero is gone" in hosts.output(1)


def test_cut_rails_end_the_group_though_nobody_asks_for_anything(hosts: TwoHosts) -> None:
    for rail in (0, 1):
        hosts.lab.cut(0, 1, rail)
    hosts.until_ended()
    assert all(rank.returncode for rank in hosts.ranks)
    assert "failed: " in hosts.output(0)
    assert "broke" in hosts.output(0) + hosts.output(1)
