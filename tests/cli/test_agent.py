"""`flare agent` and its commands, as a person types them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flare.trust.join_code import decode, generate, hmac_key
from tests.agent.world import Agent, Peer, drive

RECORDER = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
case "$*" in *{failing}*) echo "Failed to connect to bus: No medium found" >&2; exit 1;; esac
"""


@pytest.fixture
def new_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    with ExitStack() as stack:
        yield lambda name="node", **options: stack.enter_context(Agent(tmp_path / name, **options))


@pytest.fixture
def node(new_agent: Callable[..., Agent]) -> Agent:
    """An agent that was never started."""
    return new_agent()


def with_systemd(node: Agent, failing: str = "nothing") -> Path:
    """Put recorders where systemctl and loginctl would be; return their log."""
    folder = node.home / "bin"
    folder.mkdir()
    log = node.home / "commands"
    for name in ("systemctl", "loginctl"):
        (folder / name).write_text(RECORDER.format(log=log, failing=failing))
        (folder / name).chmod(0o755)
    node.environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    return log


def test_join_code_for_a_person(node: Agent) -> None:
    done = node.command("agent", "join-code")
    assert done.returncode == 0, done.stderr
    [code] = re.findall(r"Join code: +((?:[A-Z2-7]{4}-){7}[A-Z2-7]{4})\n", done.stdout)
    assert json.loads(node.paths.join_code_file.read_text())["key"] == hmac_key(decode(code)).hex()
    assert f"Fingerprint:  {node.identity.fingerprint}" in done.stdout
    assert f"flare orbit pair {socket.gethostname()} --code -" in done.stdout
    assert "Good until:" in done.stdout
    assert "no agent runs here yet" in done.stderr


def test_join_code_from_a_file_and_from_standard_input(node: Agent, tmp_path: Path) -> None:
    code = generate()
    (tmp_path / "code").write_text(code.lower() + "\n")
    for words, given in ((str(tmp_path / "code"), None), ("-", code)):
        done = node.command("agent", "join-code", "--json", "--code-file", words, input=given)
        assert json.loads(done.stdout)["code"] == code
    done = node.command("agent", "join-code", "--code-file", "-", input="AAAA")
    assert done.returncode == 2
    assert "That is no join code" in done.stderr


def test_join_code_names_the_port_of_a_running_agent(node: Agent) -> None:
    node.start("--name", "spark-1")
    answer = json.loads(node.command("agent", "join-code", "--json").stdout)
    assert answer["name"] == "spark-1"
    assert answer["command"] == f"flare orbit pair 127.0.0.1:{node.port} --code -"
    assert (answer["running"], answer["paired"]) == (True, False)
    assert answer["fingerprint"] == node.fingerprint


def test_join_code_names_the_host_where_the_agent_listens_everywhere(node: Agent) -> None:
    node.start(listen="0")
    done = node.command("agent", "join-code")
    assert f"flare orbit pair {socket.gethostname()}:{node.port} --code -" in done.stdout
    assert "only this host reaches" not in done.stderr


def test_join_code_says_that_an_older_one_is_gone(node: Agent) -> None:
    node.start(listen="127.0.0.3:0")
    first = node.command("agent", "join-code")
    assert f"flare orbit pair 127.0.0.3:{node.port} --code -" in first.stdout
    assert "the agent listens on 127.0.0.3 alone, which only this host reaches" in first.stderr
    assert "pairs nobody any more" not in first.stderr
    second = node.command("agent", "join-code")
    assert "the code that was made here before pairs nobody any more" in second.stderr
    code = re.findall(r"Join code: +(\S+)", second.stdout)[0]
    again = node.command("agent", "join-code", "--code-file", "-", input=code)
    assert "pairs nobody any more" not in again.stderr  # it is the same one


def test_join_code_of_a_paired_node_warns(node: Agent) -> None:
    node.start("--accept-first")
    drive(Peer(1).pair(node, None))
    assert "paired already" in node.command("agent", "join-code").stderr


def test_status(node: Agent) -> None:
    fresh = node.command("agent", "status")
    assert fresh.returncode == 11
    assert "No agent ever ran here" in fresh.stderr
    assert "run `flare agent install`" in fresh.stderr
    assert "A host that only runs `flare orbit` needs no agent" in fresh.stderr
    node.start("--accept-first", "--name", "spark-1")
    assert "Controllers:  none" in node.command("agent", "status").stdout
    drive(Peer(1, "workstation").pair(node, None))
    text = node.command("agent", "status").stdout
    assert "Node:         spark-1" in text
    assert node.fingerprint in text
    assert f"127.0.0.1:{node.port}" in text
    assert f"Controller:   workstation  {Peer(1).identity.fingerprint}" in text
    answer = json.loads(node.command("agent", "status", "--json").stdout)
    assert answer["controllers_revision"] == 1
    assert answer["running"]["listen"] == [f"127.0.0.1:{node.port}"]
    node.stop()
    assert "Agent:        not running" in node.command("agent", "status").stdout


def test_reset(node: Agent) -> None:
    assert "was not paired" in node.command("agent", "reset").stdout
    node.start("--accept-first")
    drive(Peer(1).pair(node, None))
    key = node.paths.node_key.read_bytes()
    node.command("agent", "join-code")
    assert "The authorized controllers were removed" in node.command("agent", "reset").stdout
    assert not node.paths.controllers_file.exists()
    assert not node.paths.join_code_file.exists()
    assert node.paths.node_key.read_bytes() == key


def test_install_writes_the_unit_and_starts_it(node: Agent) -> None:
    log = with_systemd(node)
    done = node.command("agent", "install", "--listen", "127.0.0.1:29901", "--name", "spark-1")
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == [
        "systemctl --user show-environment",
        "systemctl --user daemon-reload",
        "systemctl --user enable flare-agent.service",
        "systemctl --user restart flare-agent.service",
        "loginctl enable-linger",
    ]
    unit = node.home / ".config/systemd/user/flare-agent.service"
    text = unit.read_text()
    assert f"ExecStart={node.launcher} agent --listen 127.0.0.1:29901 --name spark-1\n" in text
    assert "KillMode=" not in text
    assert "Join code:" in done.stdout
    assert node.identity.fingerprint in done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_one_that_systemd_takes(node: Agent, tmp_path: Path) -> None:
    with_systemd(node)
    node.command("agent", "install")
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", node.home / ".config/systemd/user/flare-agent.service"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # It looks at what the unit needs, too; a host's own units are no subject.
    assert [line for line in done.stderr.splitlines() if "flare-agent.service" in line] == []


def test_install_dry_run_changes_nothing(node: Agent) -> None:
    log = with_systemd(node)
    before = sorted(node.home.rglob("*"))
    done = node.command("agent", "install", "--dry-run")
    assert "ExecStart=" in done.stdout
    assert "systemctl --user restart flare-agent.service" in done.stdout
    answer = json.loads(node.command("agent", "install", "--dry-run", "--json").stdout)
    assert answer["unit"].endswith("flare-agent.service")
    assert sorted(node.home.rglob("*")) == before
    assert not log.exists()


def test_install_with_a_given_code_and_with_accept_first(node: Agent) -> None:
    with_systemd(node)
    code = generate()
    done = node.command("agent", "install", "--json", "--join-code", "-", input=code + "\n")
    assert json.loads(done.stdout)["code"] == code
    node.command("agent", "reset")
    done = node.command("agent", "install", "--accept-first")
    assert "The first controller that connects until" in done.stdout
    assert node.paths.accept_first_file.exists()
    assert not node.paths.join_code_file.exists()
    done = node.command("agent", "install", "--accept-first", "--join-code", code)
    assert done.returncode == 2
    assert "exclude each other" in done.stderr


def test_install_of_a_paired_node_makes_no_code(node: Agent) -> None:
    with_systemd(node)
    node.start("--accept-first")
    drive(Peer(1).pair(node, None))
    done = node.command("agent", "install", "--json")
    assert json.loads(done.stdout)["code"] is None
    assert not node.paths.join_code_file.exists()


def test_install_says_which_step_failed(node: Agent) -> None:
    with_systemd(node, failing="daemon-reload")
    done = node.command("agent", "install")
    assert done.returncode == 1
    assert (
        "`systemctl --user daemon-reload` failed: Failed to connect to bus: No medium found." in done.stderr
    )
    assert "fresh login" in done.stderr


def test_install_without_linger_warns(node: Agent) -> None:
    with_systemd(node, failing="linger")
    done = node.command("agent", "install")
    assert done.returncode == 0
    assert "sudo loginctl enable-linger" in done.stderr


def test_install_without_systemd(node: Agent) -> None:
    node.environment["PATH"] = str(node.home)
    done = node.command("agent", "install")
    assert done.returncode == 14
    assert "There is no systemctl on PATH" in done.stderr
    assert "Run `flare agent --listen '[::]:29900'` in a terminal" in done.stderr
    assert not node.paths.node_key.exists()


def test_install_where_no_user_manager_answers(node: Agent) -> None:
    log = with_systemd(node, failing="show-environment")
    done = node.command("agent", "install", "--listen", "29901")
    assert done.returncode == 14
    [line] = done.stderr.splitlines()
    assert "No systemd user manager answers this login (Failed to connect to bus: No medium found" in line
    assert "Run `flare agent --listen '29901'` in a terminal" in line
    assert log.read_text() == "systemctl --user show-environment\n"
    assert not node.paths.node_key.exists()


def test_install_refuses_what_no_unit_can_hold(node: Agent) -> None:
    with_systemd(node)
    assert node.command("agent", "install", "--listen", "not an address").returncode == 2
    assert node.command("agent", "install", "--name", "a b").returncode == 2


def test_a_wrong_address_in_the_settings_is_named_with_their_file(node: Agent) -> None:
    with_systemd(node)
    node.paths.settings_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    node.paths.settings_file.write_text('[agent]\nlisten = "127.0.0.1:99999"\n')
    for words in (("agent",), ("agent", "install"), ("agent", "join-code")):
        wrong = node.command(*words)
        assert wrong.returncode == 3, wrong
        assert f'{node.paths.settings_file}: "agent.listen": "127.0.0.1:99999" is no address' in wrong.stderr


def test_second_agent_of_one_account(node: Agent) -> None:
    node.start()
    done = node.command("agent", "--listen", "127.0.0.1:0")
    assert done.returncode == 7
    assert (
        f"Another agent runs for this account (process {node.process.pid if node.process else 0}"
        in done.stderr
    )


def test_port_in_use(node: Agent, new_agent: Callable[..., Agent]) -> None:
    node.start()
    other = new_agent("other")
    done = other.command("agent", "--listen", f"127.0.0.1:{node.port}")
    assert done.returncode == 7
    assert f"Cannot listen on 127.0.0.1:{node.port}" in done.stderr


def test_address_that_is_not_here(node: Agent) -> None:
    done = node.command("agent", "--listen", "203.0.113.7:0")
    assert done.returncode == 4
    assert "Choose an address that this host has" in done.stderr


@pytest.mark.parametrize("listen", ["[::]:0", ":0", "0.0.0.0:0"])
def test_wildcards_mean_both_families(node: Agent, listen: str) -> None:
    node.start(listen=listen)
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as probe:
            probe.settimeout(5)
            try:
                probe.connect((host, node.port))
            except OSError:
                assert family == socket.AF_INET6  # a host without IPv6
                assert not Path("/proc/net/if_inet6").read_text().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(node: Agent, number: int) -> None:
    node.start()
    assert node.stop(number) == 0
    assert "stopping" in node.log()


def test_options_of_the_service_belong_to_it(node: Agent) -> None:
    done = node.command("agent", "--listen", "127.0.0.1:0", "join-code")
    assert done.returncode == 2
    assert "--listen belongs behind" in done.stderr


def test_systemd_is_told(node: Agent) -> None:
    path = node.home / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.settimeout(10)
        node.environment["NOTIFY_SOCKET"] = str(path)
        node.start()
        assert listener.recv(100) == b"READY=1"
        assert node.stop() == 0
        assert listener.recv(100) == b"STOPPING=1"


def test_key_that_others_can_read(node: Agent) -> None:
    node.start()
    node.stop()
    node.paths.node_key.chmod(0o644)
    done = node.command("agent", "--listen", "127.0.0.1:0")
    assert done.returncode == 5
    assert f"chmod 600 {node.paths.node_key}" in done.stderr


def test_pair_is_orbits(node: Agent, new_agent: Callable[..., Agent]) -> None:
    node.start()
    code = node.join_code()
    controller = new_agent("controller")
    done = controller.command("agent", "pair", f"127.0.0.1:{node.port}", "--code", "-", input=code + "\n")
    assert done.returncode == 0, done.stderr
    assert node.fingerprint in done.stdout
