"""Pairing and delegation against real agents."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import tomllib
from pathlib import Path

from flare.identity import Identity
from flare.system import free_port
from flare.trust.join_code import generate
from tests.orbit.lab import Lab, wait_for
from tests.orbit.terminal import terminal


def code_of(orbit: Lab, name: str) -> str:
    outcome = orbit.flare("agent", "join-code", "--json", home=name)
    assert outcome.code == 0, outcome
    return str(json.loads(outcome.out)["code"])


def test_a_code_pairs_and_both_sides_show_the_same_fingerprint(orbit: Lab) -> None:
    agent = orbit.start("maxwell")
    refused = orbit.flare("orbit", "pair", agent.address)
    assert refused.code == 5
    assert "Without a code only a node that accepts the first controller can be paired" in refused.err
    code = code_of(orbit, "maxwell")
    wrong = orbit.flare("orbit", "pair", agent.address, "--code", "-", stdin="AAAA-" * 7 + "AAAA\n")
    assert wrong.code == 5
    assert "The code is wrong (every host has its own), used or older than 24 hours" in wrong.err
    paired = orbit.flare("orbit", "pair", agent.address, "--code", "-", stdin=code.lower() + "\n")
    assert paired.code == 0, paired
    assert paired.out.splitlines() == [
        f"Paired: maxwell at {agent.address}",
        f"  fingerprint {agent.fingerprint}",
    ]
    assert "Compare each fingerprint with what the host printed" in paired.err
    document = tomllib.loads(orbit.orbit_file.read_text())
    assert document["node"][0]["fingerprint"] == agent.fingerprint
    assert document["node"][0]["address"] == agent.address
    key = orbit.folder / "controller/.config/flare/orbit/controller.key"
    assert key.stat().st_mode & 0o777 == 0o600
    again = orbit.flare("orbit", "pair", agent.address)
    assert (again.code, again.out.splitlines()[0]) == (0, f"Already paired: maxwell at {agent.address}")


def test_several_hosts_are_reported_each_on_its_own(orbit: Lab) -> None:
    first = orbit.start("maxwell", "--accept-first")
    second = orbit.start("hertz")
    outcome = orbit.flare("orbit", "pair", first.address, second.address)
    assert outcome.code == 5
    assert "Paired: maxwell" in outcome.out
    assert f"{second.address} refused to pair" in outcome.err
    assert [node["name"] for node in tomllib.loads(orbit.orbit_file.read_text())["node"]] == ["maxwell"]


def test_every_host_has_a_code_of_its_own(orbit: Lab) -> None:
    hosts = [orbit.start(name).address for name in ("maxwell", "hertz")]
    codes = [code_of(orbit, name) for name in ("maxwell", "hertz")]
    one_short = orbit.flare("orbit", "pair", *hosts, "volta", "--code", "-", stdin="\n".join(codes))
    assert one_short.code == 2
    assert "has 2 join codes for 3 hosts" in one_short.err
    swapped = orbit.flare("orbit", "pair", *hosts, "--code", "-", stdin="\n".join(codes[::-1]))
    assert swapped.code == 5
    assert swapped.err.count("every host has its own") == 2
    paired = orbit.flare("orbit", "pair", *hosts, "--code", "-", stdin="\n".join(codes) + "\n")
    assert paired.code == 0, paired
    assert paired.out.count("Paired: ") == 2


def test_one_code_pairs_several_hosts_where_they_have_the_same(orbit: Lab) -> None:
    code = generate()
    for name in ("maxwell", "hertz"):
        installed = orbit.flare("agent", "join-code", "--code-file", "-", home=name, stdin=code)
        assert installed.code == 0, installed
    hosts = [orbit.start(name).address for name in ("maxwell", "hertz")]
    for host in hosts:
        assert orbit.flare("orbit", "pair", host, "--code", "-", stdin="\n").code == 2
    paired = orbit.flare("orbit", "pair", *hosts, "--code", "-", stdin=code + "\n\n")
    assert paired.code == 0, paired


def test_a_person_is_asked_for_each_code(orbit: Lab) -> None:
    hosts = [orbit.start(name).address for name in ("maxwell", "hertz")]
    argv, environment = orbit.command("orbit", "pair", *hosts)
    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        argv, env=environment, stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, text=True
    )
    os.close(terminal)
    shown = ""

    def answer(question: str, word: str) -> None:
        nonlocal shown
        while question not in shown:
            shown += os.read(ours, 4096).decode()
        shown = shown.partition(question)[2]
        os.write(ours, word.encode() + b"\n")

    try:
        answer(f"Code for {hosts[0]} (flare agent join-code prints it there", code_of(orbit, "maxwell"))
        answer(f"Code for {hosts[1]} (", "nonsense")
        answer(f"Code for {hosts[1]} (", code_of(orbit, "hertz"))
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert out.count("Paired: ") == 2


def test_a_name_that_is_taken_needs_another_one(orbit: Lab) -> None:
    orbit.paired("maxwell")
    other = orbit.start("maxwell2", "--accept-first")
    orbit.orbit_file.write_text(orbit.orbit_file.read_text().replace('name = "maxwell"', 'name = "maxwell2"'))
    taken = orbit.flare("orbit", "pair", other.address)
    assert taken.code == 7
    assert "The name maxwell2 belongs to another node" in taken.err
    assert "--name OTHER" in taken.err
    named = orbit.flare("orbit", "pair", other.address, "--name", "hertz")
    assert named.code == 0, named
    assert "hertz" in named.out
    renamed = orbit.flare("orbit", "pair", other.address, "--name", "volta")
    assert renamed.code == 7
    assert "is recorded as hertz" in renamed.err


def test_a_name_that_is_taken_costs_no_code(orbit: Lab) -> None:
    orbit.paired("maxwell")
    host = orbit.start("hertz").address
    code = code_of(orbit, "hertz")
    taken = orbit.flare("orbit", "pair", host, "--code", "-", "--name", "maxwell", stdin=code)
    assert taken.code == 7
    assert f"{host} (fingerprint" in taken.err
    assert "was not paired. If they are two hosts, run" in taken.err
    assert orbit.flare("orbit", "pair", host, "--code", "-", stdin=code).code == 0


def test_a_nodes_own_name_that_is_taken_has_a_remedy(orbit: Lab) -> None:
    """The node tells its name to who is paired alone; then it needs no code any more."""
    orbit.paired("maxwell")
    orbit.orbit_file.write_text(orbit.orbit_file.read_text().replace('name = "maxwell"', 'name = "hertz"'))
    host = orbit.start("hertz").address
    code = code_of(orbit, "hertz")
    taken = orbit.flare("orbit", "pair", host, "--code", "-", stdin=code)
    assert taken.code == 7
    assert "was paired but not recorded" in taken.err
    assert f"run `flare orbit pair {host} --name OTHER`" in taken.err
    with terminal(*orbit.command("orbit", "pair", host, "--name", "volta")) as screen:
        screen.wait_for(f"Code for {host}")
        screen.type("\n")
        assert screen.end() == 0, screen.text
    assert f"Paired: volta at {host}" in screen.text.replace("\r", "")


def test_nobody_is_asked_for_the_code_of_a_host_that_does_not_answer(orbit: Lab) -> None:
    host = orbit.start("maxwell").address
    gone = f"127.0.0.1:{free_port()}"
    with terminal(*orbit.command("orbit", "pair", gone, host)) as screen:
        screen.wait_for(f"Code for {host}")
        screen.type(code_of(orbit, "maxwell") + "\n")
        assert screen.end() == 4, screen.text
    assert f"Code for {gone}" not in screen.text
    assert f"{gone} refused the connection" in screen.text
    assert "Paired: maxwell" in screen.text
    told = orbit.flare("orbit", "pair", orbit.start("hertz").address)
    assert told.code == 5
    assert "asks for in a terminal and with --code - reads from standard input" in told.err


def test_a_changed_key_is_refused_until_the_node_is_forgotten(orbit: Lab) -> None:
    orbit.paired("maxwell")
    address = orbit.agents["maxwell"].address
    orbit.end("maxwell")
    (orbit.folder / "maxwell/.config/flare/agent/node.key").unlink()
    (orbit.folder / "maxwell/.config/flare/agent/controllers.toml").unlink()
    orbit.start("maxwell", "--accept-first", listen=address)
    status = orbit.flare("orbit", "status")
    assert status.code == 5
    assert "key changed" in status.out
    assert "changed since pairing" in status.err
    refused = orbit.flare("orbit", "pair", address)
    assert refused.code == 5
    assert "but maxwell is recorded there" in refused.err
    assert orbit.flare("orbit", "forget", "maxwell").code == 0
    assert orbit.flare("orbit", "pair", address).code == 0
    assert orbit.flare("orbit", "status").code == 0


def test_a_moved_node_gets_its_new_address(orbit: Lab) -> None:
    orbit.paired("maxwell")
    orbit.end("maxwell")
    moved = orbit.start("maxwell")
    away = orbit.flare("orbit", "status")
    assert away.code == 4
    assert "If maxwell has another address now, `flare orbit pair ADDRESS` records it." in away.err
    outcome = orbit.flare("orbit", "pair", moved.address)
    assert outcome.out.startswith(f"Address updated: maxwell is now at {moved.address}\n")
    with terminal(*orbit.command("orbit", "pair", moved.address)) as screen:
        assert screen.end() == 0, screen.text
    assert "Code for" not in screen.text
    assert "Already paired: maxwell" in screen.text
    assert orbit.flare("orbit", "status").code == 0


def test_a_reset_node_says_so_and_can_be_paired_again(orbit: Lab) -> None:
    orbit.paired("maxwell")
    assert orbit.flare("agent", "reset", home="maxwell").code == 0

    def told() -> bool:
        outcome = orbit.flare("orbit", "status")
        return outcome.code == 5 and "Node maxwell does not accept this controller" in outcome.err

    wait_for(told)
    code = code_of(orbit, "maxwell")
    outcome = orbit.flare("orbit", "pair", orbit.agents["maxwell"].address, "--code", code)
    assert outcome.code == 0, outcome
    assert orbit.flare("orbit", "status").code == 0


def second_controller(orbit: Lab, home: str = "laptop") -> tuple[str, str]:
    """Return the public key of another controller and its orbit file's folder."""
    outcome = orbit.flare("orbit", "controllers", "list", "--json", home=home)
    return json.loads(outcome.out)["own_public_key"], str(orbit.folder / home / ".config/flare/orbit.toml")


def test_delegation_and_revocation_reach_every_node_that_answers(orbit: Lab) -> None:
    orbit.paired("maxwell", "hertz")
    key, laptop_file = second_controller(orbit)
    Path(laptop_file).write_text(orbit.orbit_file.read_text())
    outside = orbit.flare("orbit", "status", home="laptop")
    assert outside.code == 5
    assert "does not accept this controller" in outside.err
    address = orbit.agents["hertz"].address
    orbit.end("hertz")
    added = orbit.flare("orbit", "controllers", "add", "laptop", key)
    assert added.code == 4
    assert "maxwell has it" in added.out
    assert "hertz does not have it yet" in added.err
    orbit.start("hertz", listen=address)
    assert orbit.flare("orbit", "status").code == 0  # brings hertz along
    Path(laptop_file).write_text(orbit.orbit_file.read_text())
    assert "not ours" not in orbit.flare("orbit", "status", home="laptop").out
    first = Identity.load(orbit.folder / "controller/.config/flare/orbit/controller.key").fingerprint
    removed = orbit.flare("orbit", "controllers", "remove", first, home="laptop")
    assert removed.code == 0, removed
    assert orbit.flare("orbit", "status").code == 5


def test_two_controllers_that_change_the_set_at_once(orbit: Lab) -> None:
    orbit.paired("maxwell")
    key, laptop_file = second_controller(orbit)
    assert orbit.flare("orbit", "controllers", "add", "laptop", key).code == 0
    Path(laptop_file).write_text(orbit.orbit_file.read_text())
    third = Identity.generate().public_key.hex()
    assert orbit.flare("orbit", "controllers", "add", "third", third).code == 0
    behind = orbit.flare("orbit", "controllers", "add", "other", third, home="laptop")
    assert behind.code == 13
    assert "holds revision 3 of the controller set, newer than revision 2" in behind.err
    warned = orbit.flare("orbit", "status", home="laptop")
    assert warned.code == 0
    assert "Copy [controllers] from the controller that wrote it" in warned.err


def test_a_controller_outside_its_own_file_cannot_pair(orbit: Lab) -> None:
    orbit.paired("maxwell")
    key, laptop_file = second_controller(orbit)
    Path(laptop_file).write_text(orbit.orbit_file.read_text())
    outcome = orbit.flare("orbit", "pair", orbit.agents["maxwell"].address, home="laptop")
    assert outcome.code == 5
    assert f"flare orbit controllers add {outcome.err.split()[-2]} {key}" in outcome.err


def test_a_damaged_chain_is_refused(orbit: Lab) -> None:
    orbit.paired("maxwell")
    text = orbit.orbit_file.read_text()
    orbit.orbit_file.write_text(text.replace('"revision":1', '"revision":2'))
    outcome = orbit.flare("orbit", "status")
    assert outcome.code == 3
    assert "the signed controller records do not verify" in outcome.err
