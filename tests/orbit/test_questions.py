"""Questions on a terminal, and Ctrl-C at them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cores.making import PUBLISHER
from tests.orbit.lab import Lab
from tests.orbit.terminal import terminal
from tests.orbit.test_launch import make_core

QUESTION = "Accept this publisher? [y/N]:"
COMMANDS = {
    "run": ("orbit", "run", "CORE", "--nodes", "maxwell"),
    "push": ("orbit", "push", "CORE", "--to", "maxwell"),
    "flare run": ("run", "CORE"),
}
ENDED = "^C\nflare: interrupted.\n"


def words_of(command: str, core: Path) -> list[str]:
    return [str(core) if word == "CORE" else word for word in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_at_the_publisher_question_ends_at_once(orbit: Lab, tmp_path: Path, command: str) -> None:
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1)
    argv, environment = orbit.command(*words_of(command, core))
    if command == "flare run":  # the lab's own `run` stands for ranks that agents start
        argv = [sys.executable, "-c", "from flare.cli.main import main; main()", *argv[1:]]
    with terminal(argv, environment) as screen:
        screen.wait_for(QUESTION)
        screen.interrupt()
        assert screen.end(seconds=15) == 130, screen.text
    assert screen.text.replace("\r", "").endswith(ENDED)
    assert "Accepted" not in screen.text
    assert not (orbit.orbit_file.parent / "trust.toml").exists()


@pytest.mark.parametrize("command", ["run", "push"])
def test_an_answer_is_taken(orbit: Lab, tmp_path: Path, command: str) -> None:
    orbit.paired("maxwell")
    core = make_core(tmp_path / "core", ranks=1)
    argv, environment = orbit.command(*words_of(command, core))
    with terminal(argv, environment) as screen:
        screen.wait_for(QUESTION)
        screen.type("n\n")
        assert screen.end() == 5, screen.text
    assert "was not accepted, so nothing was started" in screen.text
    with terminal(argv, environment) as screen:
        screen.wait_for(QUESTION)
        screen.type("y\n")
        screen.wait_for(f"Accepted the publisher {PUBLISHER.fingerprint}")
        screen.interrupt()
        screen.end()


def test_ctrl_c_at_the_question_for_a_code(orbit: Lab) -> None:
    host = orbit.start("maxwell").address
    with terminal(*orbit.command("orbit", "pair", host)) as screen:
        screen.wait_for(f"Code for {host}")
        screen.interrupt()
        assert screen.end() == 130, screen.text
    assert screen.text.replace("\r", "").endswith(ENDED)
