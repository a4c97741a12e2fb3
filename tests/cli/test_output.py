"""What commands print: tables, sizes, progress, colour."""

from __future__ import annotations

import io
import json

import pytest

from flare.cli import output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (2.5e12, "2.5 TB"),
        (9e15, "9000.0 TB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert output.human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.9, "59 s"), (185, "3 min 05 s"), (7800, "2 h 10 min"), (200_000, "2 d 7 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert output.human_duration(seconds) == text


def test_a_table_escapes_what_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("node", "state"), [("hertz", "up"), ("ev\x1bil\n", None)])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["NODE          STATE", "hertz         up", "ev\\x1bil\\x0a  -"]


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"name": "é\x1b"})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == {"name": "é\x1b"}


def test_messages_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("one\ntwo\x07")
    output.warn("w\x1b")
    output.fail("f\u202e")
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\\x07\n"
    assert captured.err == "flare: warning: w\\x1b\nflare: error: f\\u202e\n"


def test_colour_obeys_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.colour_wanted(Terminal())
    assert not output.colour_wanted(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.colour_wanted(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not output.colour_wanted(Terminal())


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress() as add:
        bar = add("core", 100)
        bar.advance(40)
        bar.advance(60)
        bar.total(100)
        assert bar.done == 100
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress() as add:
        add("core \x1b[2J", 100).advance(50)
    assert "core \\x1b[2J" in terminal.getvalue()


def test_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert output.confirm("Accept?") is None
