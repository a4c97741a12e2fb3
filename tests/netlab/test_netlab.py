"""The namespace lab: hosts that are apart, cables that can be cut, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from netlab import Host, Lab, LabError
from netlab.guard import NAMESPACES, start_time

TOOLS = Path(__file__).parents[2] / "tools"

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 29900)) as server:
    print("ready", flush=True)
    while True:
        connection, peer = server.accept()
        with connection:
            size = 0
            while data := connection.recv(1 << 16):
                size += len(data)
            connection.sendall(f"{size} from {peer[0]}".encode())
"""

CLIENT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 29900), timeout=float(sys.argv[3])) as connection:
        connection.sendall(bytes(int(sys.argv[2])))
        connection.shutdown(socket.SHUT_WR)
        print(connection.recv(100).decode(), end="")
except OSError as error:
    print(f"failed: {type(error).__name__}", end="")
"""


def send(host: Host, address: str, size: int = 1, timeout: float = 5.0) -> str:
    done = host.run(
        [sys.executable, "-c", CLIENT, address, str(size), str(timeout)], capture_output=True, text=True
    )
    return str(done.stdout)


def serve(host: Host, address: str = "0.0.0.0") -> subprocess.Popen[str]:
    server = host.popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


def stop(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.communicate()


def ours(prefix: str) -> list[str]:
    return [entry.name for entry in NAMESPACES.iterdir() if entry.name.startswith(prefix)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended may wait long until the system's first process collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def prefix_of(pid: int) -> str:
    return f"netlab-{pid}-{start_time(pid)}-"


@pytest.mark.root
def test_hosts_are_apart_and_meet_on_the_management_network() -> None:
    with Lab(hosts=2) as lab:
        homes = set()
        for host in (*lab.hosts, lab.controller):
            words = ["sh", "-c", "uname -n; echo $HOME; echo $XDG_CONFIG_HOME; echo $MORE"]
            done = host.run(words, capture_output=True, text=True, env={"MORE": "yes"})
            assert done.stdout.splitlines() == [host.name, str(host.home), "", "yes"]
            assert host.home.is_dir()
            homes.add(host.home)
        assert len(homes) == 3
        server = serve(lab.hosts[1])
        assert send(lab.controller, lab.hosts[1].address, 10) == f"10 from {lab.controller.address}"
        assert send(lab.hosts[0], lab.hosts[1].address, 10) == f"10 from {lab.hosts[0].address}"
        stop(server)
    assert not any(home.exists() for home in homes)
    assert ours(prefix_of(os.getpid())) == []


@pytest.mark.root
def test_a_ring_connects_neighbours_alone_and_counters_show_which_cable_was_used(tmp_path: Path) -> None:
    with Lab(hosts=4, topology="ring", rails=2, folder=tmp_path) as lab:
        assert {(cable.low, cable.high, cable.rail) for cable in lab.cables} == {
            (low, high, rail) for low, high in ((0, 1), (1, 2), (2, 3), (0, 3)) for rail in (0, 1)
        }
        assert [end.name for end in lab.hosts[0].fabric] == ["fabric0", "fabric1", "fabric2", "fabric3"]
        assert [end.peer for end in lab.hosts[0].fabric] == [1, 1, 3, 3]
        assert lab.controller.fabric == ()
        first, second = (lab.cable(1, 0, rail) for rail in (0, 1))
        server = serve(lab.hosts[1])
        size = 1 << 20
        assert send(lab.hosts[0], second.high_end.address, size) == f"{size} from {second.low_end.address}"
        sent = lab.hosts[0].counters(second.low_end.name)
        assert size < sent.sent < 1.1 * size
        assert lab.hosts[1].counters(second.high_end.name).received == sent.sent
        assert lab.hosts[0].counters(first.low_end.name).sent == 0
        assert lab.hosts[0].counters().sent < 10_000
        assert send(lab.hosts[2], first.low_end.address).startswith("failed: ")
        stop(server)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "controller",
        "host0",
        "host1",
        "host2",
        "host3",
    ]


@pytest.mark.root
def test_cables_are_cut_restored_and_deleted() -> None:
    with Lab(hosts=3, topology="chain") as lab:
        assert [(cable.low, cable.high) for cable in lab.cables] == [(0, 1), (1, 2)]
        near, far = lab.hosts[:2]
        address = lab.cable(0, 1).high_end.address
        server = serve(far)

        def carrier(host: Host) -> str:
            done = host.run(["ip", "-json", "link", "show", "dev", "fabric0"], capture_output=True, text=True)
            return str(json.loads(done.stdout)[0]["operstate"])

        assert send(near, address) == "1 from 10.78.0.10"
        lab.cut(0, 1)
        assert send(near, address, timeout=0.5).startswith("failed: ")
        wait_for(lambda: carrier(far) != "UP")
        lab.restore(0, 1)
        assert send(near, address) == "1 from 10.78.0.10"
        lab.cut(1, 0)
        assert send(near, address, timeout=0.5).startswith("failed: ")
        lab.restore(1, 0)
        assert send(near, address) == "1 from 10.78.0.10"
        lab.delete(1, 0)
        assert send(near, address, timeout=0.5).startswith("failed: ")
        with pytest.raises(LabError, match="There is no cable 0 between host0 and host1"):
            lab.cut(0, 1)
        with pytest.raises(LabError, match="does not exist"):
            near.counters("fabric0")
        assert send(near, far.address) == "1 from 10.77.0.10", "the management network is another one"
        lab.cut_management(far)
        assert send(near, far.address, timeout=0.5).startswith("failed: ")
        lab.restore_management(far)
        assert send(near, far.address) == "1 from 10.77.0.10"
        stop(server)


@pytest.mark.root
def test_the_fabric_sees_the_kernels_own_interfaces() -> None:
    code = """
import json
from dataclasses import asdict
from flare.fabric.endpoints import read_endpoints
print(json.dumps([asdict(one) for one in read_endpoints(interfaces=("fabric0", "fabric1"))]))
"""
    with Lab(hosts=2, rails=2) as lab:
        host = lab.hosts[0]
        host.run(["ip", "address", "add", "10.9.0.1/30", "dev", "fabric0", "label", "fabric0:1"], check=True)

        def endpoints() -> list[tuple[str, str, int]]:
            done = host.run(
                [sys.executable, "-c", code],
                env={"PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout)
            assert all(len(one["mac"]) == 17 and one["pci"] == "" and one["link"] is None for one in found)
            return [(one["interface"], one["address"], one["prefix"]) for one in found]

        assert endpoints() == [
            ("fabric0", "10.78.0.10", 24),
            ("fabric0", "10.9.0.1", 30),
            ("fabric1", "10.78.1.10", 24),
        ]
        lab.cut(1, 0, rail=1)
        wait_for(lambda: len(endpoints()) == 2)


@pytest.mark.root
def test_an_exception_and_a_second_close_leave_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), Lab() as lab:
        server = serve(lab.hosts[0])
        raise KeyboardInterrupt
    assert server.wait(10) == -signal.SIGKILL
    server.communicate()
    lab.close()
    assert ours(prefix_of(os.getpid())) == []
    with pytest.raises(LabError, match="The lab is not built"):
        _ = lab.controller


def start_cli(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "netlab", *words],
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_lab_whose_owner_is_ended_is_removed_with_its_processes(number: signal.Signals) -> None:
    process = start_cli("--hosts", "2", "--", "sh", "-c", "echo pid $$; trap '' INT TERM; sleep 60; sleep 60")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    prefix = prefix_of(process.pid)
    folders = list(Path(tempfile.gettempdir()).glob(f"{prefix}*"))
    assert len(ours(prefix)) == 4
    assert len(folders) == 1
    if number == signal.SIGINT:
        process.send_signal(number)  # the commands ignore it; the second one does not wait for them
        time.sleep(0.3)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode in (-signal.SIGKILL, 130)
    wait_for(lambda: ours(prefix) == [] and not folders[0].exists())
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.root
def test_what_a_killed_guard_left_is_removed_by_the_next_lab() -> None:
    gone = subprocess.Popen(["true"])
    old = prefix_of(gone.pid).replace("None", "1") + "0-"
    gone.wait()
    kept = f"{prefix_of(os.getpid())}other-"
    folder = Path(tempfile.gettempdir()) / f"{old}folder"
    folder.mkdir()
    for name in (f"{old}host0", f"{kept}host0"):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        left = subprocess.Popen(["ip", "netns", "exec", f"{old}host0", "sleep", "60"])
        wait_for(lambda: Path(f"/proc/{left.pid}/comm").read_text() == "sleep\n")  # it is inside by then
        with Lab():
            assert ours(old) == []
            assert left.wait(10) == -signal.SIGKILL
            assert not folder.exists()
            assert ours(kept) == [f"{kept}host0"]
    finally:
        subprocess.run(["ip", "netns", "delete", f"{kept}host0"], check=True)


@pytest.mark.root
def test_a_lab_outlives_its_guard_and_is_removed_all_the_same() -> None:
    with Lab() as lab:
        assert lab._guard is not None
        lab._guard.kill()
        lab._guard.wait()
        home = lab.hosts[0].home
    assert ours(prefix_of(os.getpid())) == []
    assert not home.parent.exists()


@pytest.mark.root
def test_a_lab_that_cannot_be_built_is_removed(tmp_path: Path) -> None:
    (tmp_path / "host1").write_text("a file where a HOME must be")
    with pytest.raises(FileExistsError), Lab(folder=tmp_path):
        pass
    assert ours(prefix_of(os.getpid())) == []


@pytest.mark.root
def test_the_command_line_runs_a_command_everywhere_and_passes_failures_on() -> None:
    process = start_cli("--hosts", "3", "--chain", "--", "sh", "-c", 'uname -n; [ "$(uname -n)" != host1 ]')
    output, _ = process.communicate(timeout=30)
    assert sorted(output.splitlines()) == ["[host0] host0", "[host1] host1", "[host2] host2"]
    assert process.returncode == 1
    process = start_cli("--on", "controller", "--", "sh", "-c", "printf no-newline; kill -9 $$")
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("[controller] no-newline\n", 137)
    process = start_cli("--on", "host7", "--", "true")
    output, _ = process.communicate(timeout=30)
    assert "netlab: There is no host 'host7'. There are host0, host1, controller." in output
    assert process.returncode == 1


@pytest.mark.root
def test_without_a_command_the_lab_describes_itself_and_stays() -> None:
    process = start_cli("--ring", "--hosts", "3")
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith("Ctrl-C"):
        lines.append(process.stdout.readline())
    assert lines[0].startswith("host0  10.77.0.10  HOME /")
    assert lines[1] == "    fabric0  10.78.0.10/24  to host1\n"
    enter = next(line for line in lines if "netns exec" in line)
    assert subprocess.run([*enter.split("unshare")[0].split(), "true"]).returncode == 0
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_without_root_the_refusal_says_so() -> None:
    # Root drops its rights after the imports: an ordinary user may not be allowed to read where Python lives.
    code = "import os, sys, netlab.__main__ as lab; os.geteuid() or os.setuid(65534); sys.exit(lab.main())"
    environment = {**os.environ, "PYTHONPATH": str(TOOLS)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "netlab: The lab makes network namespaces, which only root may. Run it as root.\n"


@pytest.mark.root
def test_without_the_ip_command_the_refusal_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=r"needs the ip command\. Install the package iproute2"), Lab():
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": 1}, "A lab has 2 to 16 hosts, not 1"),
        ({"hosts": 17}, "A lab has 2 to 16 hosts, not 17"),
        ({"topology": "star"}, "direct, as a ring or as a chain, not 'star'"),
        ({"rails": 3}, "Two hosts have 1 to 2 cables, not 3"),
    ],
)
def test_labs_that_nobody_can_build(options: dict[str, object], words: str) -> None:
    with pytest.raises(LabError, match=words):
        Lab(**options)  # type: ignore[arg-type]
