from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flare.errors import CoreError, FlareError, IntegrityError, LocalProtocolError, StorageError
from flare.rank.lifecycle import COMES_AFTER, MAX_REASON, Lifecycle, Phase


def test_each_change_is_one_line_with_seconds_and_why() -> None:
    said: list[str] = []
    time = 100.0
    lifecycle = Lifecycle(said.append, clock=lambda: time)
    lifecycle.enter(Phase.RESOLVING, "the core x")
    time = 101.25
    lifecycle.enter(Phase.VERIFYING, "its bytes")
    assert said == ["resolving: the core x (0.0 s)", "verifying: its bytes (1.2 s)"]
    assert lifecycle.uptime == 1.25


def test_the_agent_gets_one_json_line_a_change() -> None:
    read_end, write_end = os.pipe()
    lifecycle = Lifecycle(lambda _: None, write_end)
    lifecycle.enter(Phase.RESOLVING, "the core x")
    for phase in (Phase.VERIFYING, Phase.AGREEING, Phase.LOADING):
        lifecycle.enter(phase, "on")
    lifecycle.enter(Phase.SERVING, "it answers", url="http://127.0.0.1:8000")
    os.close(write_end)
    with open(read_end) as pipe:
        lines = [json.loads(line) for line in pipe]
    assert lines[0] == {"phase": "resolving", "reason": "the core x"}
    assert lines[-1] == {"phase": "serving", "reason": "it answers", "url": "http://127.0.0.1:8000"}


def test_an_agent_that_is_gone_does_not_end_the_rank() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    said: list[str] = []
    Lifecycle(said.append, write_end).enter(Phase.RESOLVING, "x")
    os.close(write_end)
    assert len(said) == 1


def test_a_reason_of_several_lines_is_shown_as_such_and_told_as_one() -> None:
    said: list[str] = []
    read_end, write_end = os.pipe()
    lifecycle = Lifecycle(said.append, write_end, clock=lambda: 0.0)
    lifecycle.enter(Phase.FAILED, "the engine died\n  its last \x1b[31mwords")
    assert said == ["failed: the engine died (0.0 s)", "  its last \\x1b[31mwords"]
    os.close(write_end)
    with open(read_end) as pipe:
        assert json.loads(pipe.read())["reason"] == "the engine died its last \\x1b[31mwords"
    assert lifecycle.ended


def test_of_too_many_lines_the_last_ones_are_told() -> None:
    def reason(text: str) -> str:
        lifecycle = Lifecycle(lambda _: None, clock=lambda: 0.0)
        lifecycle.enter(Phase.FAILED, text)
        assert len(lifecycle.reason) <= MAX_REASON
        return lifecycle.reason

    assert reason("It died. Its last words:\n  one\n\n  two") == "It died. Its last words: one / two"
    words = [f"line {number} " + "x" * 80 for number in range(40)]
    told = reason("\n".join(["It died. Its last words:", *words]))
    assert told.startswith("It died. Its last words: … line 3")
    assert told.endswith(words[-1])
    assert reason("It died.\n" + "x" * 5000) == "It died. " + "x" * 300
    assert reason("y" * 5000 + "\nmore").startswith("y" * 900)


def damage(message: str, file: str) -> IntegrityError:
    problem = IntegrityError(message)
    problem.file = file
    return problem


@pytest.mark.parametrize(
    ("problem", "damaged"),
    [
        (damage("block 3 differs", "model/a"), {"folder": "/cache/core", "file": "model/a"}),
        (CoreError("no core"), {"folder": "/cache/core"}),
        (StorageError("the disk is full"), None),
    ],
)
def test_the_agent_hears_which_stored_core_is_damaged(problem: FlareError, damaged: object) -> None:
    read_end, write_end = os.pipe()
    lifecycle = Lifecycle(lambda _: None, write_end)
    with pytest.raises(type(problem)), lifecycle.reading(Path("/cache/core")):
        raise problem
    lifecycle.fail(problem)
    os.close(write_end)
    with open(read_end) as pipe:
        document = json.loads(pipe.read())
    assert document.get("damaged") == damaged
    assert (document["phase"], document["code"]) == ("failed", problem.code)


def test_a_long_reason_fits_the_agents_line() -> None:
    lifecycle = Lifecycle(lambda _: None)
    lifecycle.enter(Phase.FAILED, "x" * 100_000)
    assert MAX_REASON - 10 < len(lifecycle.reason) <= MAX_REASON


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("before", [None, *Phase])
def test_only_the_documented_changes_are_possible(before: Phase | None, phase: Phase) -> None:
    lifecycle = Lifecycle(lambda _: None)
    lifecycle.phase = before
    if before in COMES_AFTER[phase]:
        lifecycle.enter(phase, "why")
        assert lifecycle.phase is phase
    else:
        with pytest.raises(LocalProtocolError, match="cannot go from"):
            lifecycle.enter(phase, "why")


def test_nothing_follows_the_end() -> None:
    for end in (Phase.STOPPED, Phase.FAILED):
        assert not any(end in before for before in COMES_AFTER.values())
