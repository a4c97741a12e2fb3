from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from flare.cli.main import main
from flare.cli.orbit import orbit
from flare.cli.orbit_controllers import report as report_controllers
from flare.errors import FlareError, ForbiddenError, UnreachableError, VersionError
from flare.identity import Identity
from flare.orbit.administration import Distribution
from flare.orbit.client import Answer
from flare.trust.controllers import ControllerSet
from tests.cores.making import PUBLISHER, write_core
from tests.orbit.builders import node_entry


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


Flare = Callable[..., Outcome]


@pytest.fixture
def flare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Flare:
    """Run the command line in this process with an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "FLARE_TRACEBACK"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "home").mkdir()

    def run(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Outcome(int(caught.value.code or 0), printed.out, printed.err)

    return run


def orbit_file(tmp_path: Path) -> Path:
    return tmp_path / "home/.config/flare/orbit.toml"


def write_node(tmp_path: Path, name: str, address: str) -> None:
    identity = Identity.generate()
    path = orbit_file(tmp_path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a") as file:
        file.write(
            f'[[node]]\nname = "{name}"\nfingerprint = "{identity.fingerprint}"\n'
            f'public_key = "{identity.public_key.hex()}"\naddress = "{address}"\n\n'
        )


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands() -> list[tuple[str, ...]]:
    context = click.Context(orbit)
    found: list[tuple[str, ...]] = []
    for name in orbit.list_commands(context):
        command = orbit.get_command(context, name)
        if isinstance(command, click.Group):
            found.extend((name, inner) for inner in command.commands)
        else:
            found.append((name,))
    return found


@pytest.mark.parametrize("command", commands(), ids="-".join)
def test_every_command_has_help_with_an_example(flare: Flare, command: tuple[str, ...]) -> None:
    outcome = flare("orbit", *command, "--help")
    assert outcome.code == 0
    assert f"Example:  flare orbit {command[0]}" in re.sub(
        r"Example:\s+\S+ \$CODE \| ", "Example:  ", outcome.out
    )


def test_a_command_that_is_none_names_the_nearest(flare: Flare) -> None:
    outcome = flare("orbit", "statsu")
    assert outcome.code == 2
    assert "Did you mean `flare orbit status`?" in outcome.err
    assert "`flare orbit --help` lists them" in flare("orbit", "xyzzy").err


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("ls",), ("cores",), ("attach",), ("stop",), ("run", "/x.safetensors")],
    ids=str,
)
def test_before_the_first_pairing_every_command_says_what_to_do(
    flare: Flare, arguments: tuple[str, ...]
) -> None:
    outcome = flare("orbit", *arguments)
    assert outcome.code == 11
    assert "No node is paired yet. Run `flare agent install` on each serving host" in outcome.err
    assert outcome.out == ""


def test_the_first_command_makes_a_private_key(flare: Flare, tmp_path: Path) -> None:
    outcome = flare("orbit", "controllers", "list", "--json")
    key = tmp_path / "home/.config/flare/orbit/controller.key"
    assert key.stat().st_mode & 0o777 == 0o600
    document = json.loads(outcome.out)
    assert document == {
        "revision": 0,
        "own_public_key": Identity.load(key).public_key.hex(),
        "controllers": [],
    }
    assert document["own_public_key"] in flare("orbit", "controllers", "list").out


def test_status_goes_on_when_a_node_is_away_and_fails_when_all_are(flare: Flare, tmp_path: Path) -> None:
    address = f"127.0.0.1:{closed_port()}"
    write_node(tmp_path, "maxwell", address)
    outcome = flare("orbit", "status")
    assert outcome.code == 4
    assert "unreachable" in outcome.out
    assert f"maxwell ({address}) refused the connection" in outcome.err
    outcome = flare("orbit", "status", "--json")
    assert outcome.code == 4
    (node,) = json.loads(outcome.out)["nodes"]
    assert (node["name"], node["reachable"], node["error"]["code"]) == ("maxwell", False, "unreachable")
    for command in ("ls", "cores", "attach", "stop"):
        outcome = flare("orbit", command)
        assert outcome.code == 4, command
        assert "No node answered" in outcome.err


def test_saved_groups_are_listed_while_no_node_answers(flare: Flare, tmp_path: Path) -> None:
    write_node(tmp_path, "maxwell", f"127.0.0.1:{closed_port()}")
    nothing = flare("orbit", "ls")
    assert (nothing.code, nothing.out) == (4, "")  # whether a group runs is not known
    with orbit_file(tmp_path).open("a") as file:
        file.write('[[group]]\nname = "glm"\ncore = "maxwell:/data/glm.safetensors"\n')
    listed = flare("orbit", "ls")
    assert listed.code == 4
    assert re.search(r"glm +unknown +maxwell:/data/glm\.safetensors", listed.out)
    assert "No node answered" in listed.err
    listed = flare("orbit", "ls", "--json")
    assert listed.code == 4
    assert [group["state"] for group in json.loads(listed.out)["saved"]] == ["unknown"]
    assert json.loads(listed.out)["unreachable"] == ["maxwell"]


def test_several_clusters_ask_for_a_name(flare: Flare, tmp_path: Path) -> None:
    write_node(tmp_path, "maxwell", "127.0.0.1:1")
    with orbit_file(tmp_path).open("a") as file:
        file.write('[cluster.a]\nnodes = ["maxwell"]\n[cluster.b]\nnodes = ["maxwell"]\n')
    outcome = flare("orbit", "status")
    assert outcome.code == 3
    assert "Several clusters are defined (a, b): name one with --cluster NAME." in outcome.err


def test_a_wrong_orbit_file_is_named_with_its_line(flare: Flare, tmp_path: Path) -> None:
    write_node(tmp_path, "maxwell", "127.0.0.1:1")
    with orbit_file(tmp_path).open("a") as file:
        file.write('[cluster.a]\nnode = ["maxwell"]\n')
    outcome = flare("orbit", "status")
    assert outcome.code == 3
    assert "orbit.toml:8: unknown key node in cluster a. Did you mean nodes?" in outcome.err


def test_forget_removes_a_node_and_names_what_still_needs_it(flare: Flare, tmp_path: Path) -> None:
    write_node(tmp_path, "maxwell", "maxwell:29900")
    write_node(tmp_path, "hertz", "hertz:29900")
    with orbit_file(tmp_path).open("a") as file:
        file.write('[cluster.a]\nnodes = ["maxwell", "hertz"]\n[[group]]\nname = "g"\nnodes = ["maxwell"]\n')
    outcome = flare("orbit", "forget", "maxwell")
    assert outcome.code == 0
    assert outcome.out == "Forgot maxwell (maxwell:29900).\n"
    assert "The cluster a still names maxwell" in outcome.err
    assert "The saved group g still names maxwell" in outcome.err
    assert "flare agent reset" in outcome.err
    assert flare("orbit", "forget", "maxwell").code == 11


def test_pair_reports_each_host_on_its_own(flare: Flare) -> None:
    first, second = closed_port(), closed_port()
    outcome = flare("orbit", "pair", f"127.0.0.1:{first}", f"127.0.0.1:{second}", "no port:", "--json")
    assert outcome.code == 4
    documents = json.loads(outcome.out)
    assert [document["name"] for document in documents] == [None, None, None]
    assert "refused the connection" in documents[0]["error"]
    assert outcome.err.count("error:") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "b", "--name", "x"), "--name names one node"),
        (("a", "--code", "ABCD"), "That is no join code"),
        (("a", "--name", "-x"), '"-x" is no node name'),
    ],
)
def test_pair_refuses_words_that_do_not_fit(flare: Flare, arguments: tuple[str, ...], message: str) -> None:
    outcome = flare("orbit", "pair", *arguments)
    assert outcome.code == 2
    assert message in outcome.err


def test_run_refuses_before_it_asks_anybody(flare: Flare, tmp_path: Path) -> None:
    write_node(tmp_path, "maxwell", "127.0.0.1:1")
    for arguments, code, message in (
        ((), 2, "Name a core, or a saved group with --name"),
        (("ORG/NAME",), 5, "is not in the controller set"),
        (("/x.safetensors", "--gpus", "one"), 2, "--gpus takes device indices"),
        (("/x.safetensors", "--nodes", ""), 2, "--nodes takes node names such as maxwell,hertz"),
        (("/x.safetensors", "--max-concurrency", "0"), 2, "--max-concurrency takes a whole number"),
        (("/x.safetensors", "--engine-arg=--tools"), 2, "--tools"),
        (("nobody:relative",), 2, "needs an absolute path"),
    ):
        outcome = flare("orbit", "run", *arguments)
        assert (outcome.code, message in outcome.err) == (code, True), outcome


def test_without_a_terminal_the_publisher_must_be_named(
    flare: Flare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = write_core(tmp_path / "core", {"model/a.gguf": b"a"}, engine="llama.cpp")
    assert flare("orbit", "pair", f"127.0.0.1:{closed_port()}").code == 4  # makes the controller set
    write_node(tmp_path, "maxwell", f"127.0.0.1:{closed_port()}")
    outcome = flare("orbit", "run", str(core), "--dry-run")
    assert outcome.code == 4
    assert "is not accepted here yet: a run shows its fingerprint and asks" in outcome.err
    outcome = flare("orbit", "run", str(core))
    assert outcome.code == 5
    assert f"--accept-publisher {PUBLISHER.fingerprint}" in outcome.err
    outcome = flare("orbit", "run", str(core), "--dry-run", "--accept-publisher", PUBLISHER.fingerprint)
    assert outcome.code == 4
    assert "No candidate node answered" in outcome.err
    assert outcome.err.count("refused the connection") == 1
    assert "(or `flare agent` without systemd)" in outcome.err
    outcome = flare("orbit", "run", "ORG/NAME", "--dry-run")
    assert outcome.code == 14
    assert "ORG/NAME is the name of a repository" in outcome.err
    monkeypatch.chdir(tmp_path)
    outcome = flare("orbit", "run", "core/model", "--dry-run")
    assert outcome.code == 2
    assert "For the file here write ./core/model" in outcome.err
    (tmp_path / "Tiny.gguf").write_bytes(b"GGUF" + bytes(20))
    outcome = flare("orbit", "run", "Tiny.gguf", "--dry-run")
    assert outcome.code == 6
    assert "Tiny.gguf is a model, not a core; make one with `flare ignition export" in outcome.err


def test_names_of_the_orbit_file_complete(flare: Flare, tmp_path: Path) -> None:
    from flare.cli.orbit_common import complete_clusters, complete_groups, complete_nodes, complete_runs

    context, parameter = click.Context(orbit), click.Option(["--x"])
    assert complete_nodes(context, parameter, "") == []
    write_node(tmp_path, "maxwell", "127.0.0.1:1")
    write_node(tmp_path, "hertz", "127.0.0.1:2")
    with orbit_file(tmp_path).open("a") as file:
        file.write('[cluster.sparks]\nnodes = ["maxwell"]\n[[group]]\nname = "glm"\n')
    assert complete_nodes(context, parameter, "hertz,m") == ["hertz,maxwell"]
    assert complete_clusters(context, parameter, "sp") == ["sparks"]
    assert complete_groups(context, parameter, "") == ["glm"]
    assert complete_runs(context, parameter, "g") == ["glm"]
    assert not (tmp_path / "home/.config/flare/orbit/controller.key").exists()
    assert flare("orbit", "controllers", "list").code == 0  # makes the key
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_node(tmp_path, "volta", f"127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        assert complete_runs(context, parameter, "") == ["glm"]
        assert time.monotonic() - began < 8  # a session's own time-outs are longer
    with orbit_file(tmp_path).open("a") as file:
        file.write("nonsense")
    assert complete_groups(context, parameter, "") == []


def test_json_of_a_launch_needs_an_end(flare: Flare) -> None:
    outcome = flare("orbit", "run", "/x.safetensors", "--json")
    assert outcome.code == 2
    assert "--json needs --dry-run or --detach" in outcome.err


def test_rm_needs_every_node(flare: Flare, tmp_path: Path) -> None:
    write_node(tmp_path, "maxwell", f"127.0.0.1:{closed_port()}")
    outcome = flare("orbit", "rm", "glm")
    assert outcome.code == 4
    assert "Removing a group needs every node" in outcome.err
    assert "`flare orbit forget NODE` leaves out a host that is gone for good." in outcome.err


def test_controllers_add_refuses_what_is_no_key(flare: Flare) -> None:
    outcome = flare("orbit", "controllers", "add", "laptop", "abcd")
    assert outcome.code == 2
    assert "64 hex digits" in outcome.err
    assert flare("orbit", "controllers", "remove", "nobody").code == 11


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ((ForbiddenError("no"), ForbiddenError("no")), 5),
        ((ForbiddenError("no"), UnreachableError("away")), 4),
        ((None, VersionError("old")), 10),
    ],
)
def test_nodes_that_miss_a_controller_set_give_the_code_that_they_share(
    errors: tuple[FlareError | None, ...], code: int
) -> None:
    answers = [
        Answer(node_entry(number, f"node{number}"), 1 if error is None else None, None, error)
        for number, error in enumerate(errors)
    ]
    controllers = ControllerSet.first(Identity.generate(), "tests")
    with pytest.raises(SystemExit) as caught:
        report_controllers(Distribution(controllers, answers), "Added laptop")
    assert caught.value.code == code
