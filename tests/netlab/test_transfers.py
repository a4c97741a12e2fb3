"""Cores between real agents on hosts of their own: which cables bytes take, and cables that are cut."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from netlab import Host, Lab
from netlab.host import MANAGEMENT
from netlab.lab import Topology
from tests.cores.making import MIB, pattern, write_core
from tests.netlab.agents import STALL_SECONDS, Agents, Memory, Traffic, agents, used, wait_for

pytestmark = pytest.mark.root

WEIGHTS = "model/weights.safetensors"
SMALL = 3 * MIB  # what control traffic may come to on the management network, far below any payload here


@contextlib.contextmanager
def laboratory(folder: Path, hosts: int, topology: Topology = "direct", rails: int = 1) -> Iterator[Agents]:
    with Lab(hosts, topology=topology, rails=rails, folder=folder) as lab, agents(lab, folder) as made:
        yield made


def core_on(folder: Path, size: int, ranges: list[list[list[int]] | None]) -> Path:
    """A core of one large file; `ranges` says what each rank reads of it."""
    return write_core(
        folder / "core",
        {WEIGHTS: pattern(size), "model/config.json": b"{}"},
        ranks=len(ranges),
        rank_ranges=ranges,
    )


def slow_down(host: Host) -> None:
    """Slow a host's first cable, or the controller's only one: transfers can be met in their middle."""
    shape = ["root", "tbf", "rate", "200mbit", "burst", "512kb", "latency", "50ms"]
    interface = host.fabric[0].name if host.fabric else MANAGEMENT
    host.run(["tc", "qdisc", "add", "dev", interface, *shape])


def speed_up(host: Host) -> None:
    host.run(["tc", "qdisc", "del", "dev", host.fabric[0].name, "root"])


def link_between(source: Host, destination: Host) -> str:
    """How a message names the first cable between two hosts, less its rail."""
    ends = [
        next(each for each in host.fabric if f"host{each.peer}" == other.name)
        for host, other in ((source, destination), (destination, source))
    ]
    return f"link {source.name} {ends[0].address} -> {destination.name} {ends[1].address}"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stored(made: Agents, index: int, ending: str = "") -> Path:
    (found,) = (made.lab.hosts[index].home / ".cache/flare/cores").glob(f"*{ending}/{WEIGHTS}")
    return found


def test_bytes_take_the_fabric_alone_and_two_rails_share_them(tmp_path: Path) -> None:
    size = 96 * MIB
    with laboratory(tmp_path, 2, rails=2) as made:
        host0, host1 = made.lab.hosts
        core = core_on(host0.home, size, [None, None])
        traffic = Traffic(made.lab)
        document = made.push(f"host0:{core}", "--to", "host0,host1")
        assert document["fabric"]
        (skipped, arrived) = document["nodes"]
        assert skipped["skipped"]
        assert (arrived["rails"], arrived["verified"]) == (2, True)
        assert arrived["moved"] >= size
        carried = [traffic(host0, interface.name).sent for interface in host0.fabric]
        assert sum(carried) >= size
        assert abs(carried[0] - carried[1]) <= 0.1 * sum(carried) / 2
        for host in (host0, host1, made.lab.controller):
            assert traffic(host).sent < SMALL
            assert traffic(host).received < SMALL
        assert digest(stored(made, 1, "-rank1")) == digest(core.parent / WEIGHTS)


def test_a_ring_passes_bytes_on_through_one_neighbour_that_keeps_none(tmp_path: Path) -> None:
    size = 160 * MIB
    block = [[0, 0, MIB]]
    with laboratory(tmp_path, 4, "ring") as made:
        hosts = made.lab.hosts
        core = core_on(hosts[0].home, size, [None, block, None, block])
        names = ",".join(host.name for host in hosts)
        traffic = Traffic(made.lab)
        disk = used(hosts[1].home)
        with Memory(made.processes[1].pid) as memory:
            document = made.push(f"host0:{core}", "--to", names, "--roce-ring", "--transfer-streams", "2")
        _, one, two, three = document["nodes"]
        assert (one["relays"], two["relays"], three["relays"]) == ([], ["host1"], [])
        assert all(node["verified"] for node in (one, two, three))
        assert digest(stored(made, 2, "-rank2")) == digest(core.parent / WEIGHTS)
        (upward,) = [each.name for each in hosts[1].fabric if each.peer == 2]
        (downward,) = [each.name for each in hosts[3].fabric if each.peer == 2]
        assert traffic(hosts[1], upward).sent >= size
        assert traffic(hosts[3], downward).sent < SMALL
        assert all(traffic(host).sent < SMALL for host in (*hosts, made.lab.controller))
        # The relay's own block and its metadata are all that it has on the disk.
        assert used(hosts[1].home) - disk < 2 * MIB
        assert memory.peak - memory.before < 48 * MIB


def test_a_core_of_the_controller_goes_up_once_and_down_the_chain(tmp_path: Path) -> None:
    size = 24 * MIB
    with laboratory(tmp_path, 3, "chain") as made:
        hosts = made.lab.hosts
        core = core_on(made.lab.controller.home, size, [None, None, None])
        traffic = Traffic(made.lab)
        document = made.push(str(core), "--to", "host0,host1,host2", "--roce-chain")
        assert [node["source"] for node in document["nodes"]] == [None, "host0", "host0"]
        assert document["nodes"][2]["relays"] == ["host1"]
        assert traffic(hosts[0]).received >= size
        assert all(traffic(host).received < SMALL for host in hosts[1:])
        assert digest(stored(made, 2, "-rank2")) == digest(core.parent / WEIGHTS)
        assert not any(core["verified"] for core in made.cores(0).values())
        again = made.push(str(core), "--to", "host0,host1,host2", "--roce-chain")
        assert [node["moved"] for node in again["nodes"]] == [0, 0, 0]


def test_a_cable_cut_in_the_middle_fails_cleanly_and_the_next_push_completes(tmp_path: Path) -> None:
    size = 96 * MIB
    with laboratory(tmp_path, 2) as made:
        host0, host1 = made.lab.hosts
        core = core_on(host0.home, size, [None, None])
        slow_down(host0)
        traffic = Traffic(made.lab)
        with made.pushing(f"host0:{core}", "--to", "host0,host1") as process:
            wait_for(lambda: traffic(host0, "fabric0").sent > 10 * MIB)
            made.lab.cut(0, 1)
            began = time.monotonic()
            out, err = process.communicate(timeout=60)
            assert process.returncode in (4, 12), (out, err)
            assert "Rank 1's data did not get from host0 to host1" in err
            assert f"of {WEIGHTS} from host0 ({link_between(host0, host1)}, rail 0): " in err
            assert time.monotonic() - began < 3 * STALL_SECONDS
        assert traffic(host0).sent < SMALL
        assert made.cores(1) == {}
        wait_for(lambda: used(host1.home / ".cache/flare") < MIB)
        made.lab.restore(0, 1)
        speed_up(host0)
        document = made.push(f"host0:{core}", "--to", "host0,host1")
        assert document["nodes"][1]["verified"]
        assert digest(stored(made, 1, "-rank1")) == digest(core.parent / WEIGHTS)


def test_one_rail_of_two_that_is_cut_fails_too_and_nothing_takes_another_way(tmp_path: Path) -> None:
    with laboratory(tmp_path, 2, rails=2) as made:
        host0 = made.lab.hosts[0]
        core = core_on(host0.home, 64 * MIB, [None, None])
        slow_down(host0)
        traffic = Traffic(made.lab)
        with made.pushing(f"host0:{core}", "--to", "host0,host1", "--resume") as process:
            wait_for(lambda: traffic(host0, "fabric0").sent > 8 * MIB)
            made.lab.cut(0, 1, rail=0)
            out, err = process.communicate(timeout=60)
            assert process.returncode in (4, 12), (out, err)
            assert f"of {WEIGHTS} from host0 ({link_between(host0, made.lab.hosts[1])}, rail 0): " in err
        assert traffic(host0).sent < SMALL
        # What arrived was kept, and the planner sees one rail now.
        between = Traffic(made.lab)
        document = made.push(f"host0:{core}", "--to", "host0,host1", "--resume")
        assert document["nodes"][1]["rails"] == 1
        assert document["nodes"][1]["moved"] < 60 * MIB
        assert between(host0).sent < SMALL
        assert digest(stored(made, 1, "-rank1")) == digest(core.parent / WEIGHTS)


def test_a_relay_that_dies_is_told_and_ctrl_c_ends_a_transfer_on_every_node(tmp_path: Path) -> None:
    with laboratory(tmp_path, 3, "chain") as made:
        hosts = made.lab.hosts
        core = core_on(hosts[0].home, 64 * MIB, [None, [[0, 0, MIB]], None])
        words = (f"host0:{core}", "--to", "host0,host1,host2", "--roce-chain")
        slow_down(hosts[0])
        (upward,) = [each.name for each in hosts[2].fabric]
        traffic = Traffic(made.lab)
        with made.pushing(*words) as process:
            wait_for(lambda: traffic(hosts[2], upward).received > 4 * MIB)
            assert all(workers(made, index) for index in range(3))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            assert process.returncode == 130, (out, err)
            assert "Interrupted" in err
        wait_for(lambda: all(workers(made, index) == [] for index in range(3)))
        assert made.cores(2) == {}
        traffic = Traffic(made.lab)
        with made.pushing(*words) as process:
            wait_for(lambda: traffic(hosts[2], upward).received > 4 * MIB)
            made.kill(1)
            out, err = process.communicate(timeout=60)
            assert process.returncode in (4, 12), (out, err)
            assert "Rank 2's data did not get from host0 to host2" in err
            assert f"of {WEIGHTS} from host0 over host1 ({link_between(*hosts[1:])}, rail 0): " in err
        made.start(1)
        speed_up(hosts[0])
        assert all(node["skipped"] or node["verified"] for node in made.push(*words)["nodes"])


def workers(made: Agents, index: int) -> list[str]:
    """The titles of an agent's workers that move something."""
    agent = psutil.Process(made.processes[index].pid)
    titles = []
    for process in agent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            titles.append(" ".join(process.cmdline()))
    return [title for title in titles if " from " in title or " to " in title]
