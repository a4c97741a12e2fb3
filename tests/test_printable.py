"""No text from elsewhere may move a cursor, hide a line or turn the reading direction."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain Grüße 東京", "plain Grüße 東京"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb\x08", "a\\x0db\\x08"),
        ("\x7f\x9b31m", "\\x7f\\x9b31m"),
        ("abc\u202egpj.exe", "abc\\u202egpj.exe"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("one\ntwo\tthree", "one\\x0atwo\\x09three"),
        ("\ud83d", "\\ud83d"),
    ],
)
def test_examples(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_newlines_of_our_own_stay() -> None:
    assert printable("one\ntwo\tthree\x1b", keep_newlines=True) == "one\ntwo\tthree\\x1b"


@given(st.text())
def test_nothing_that_steers_a_terminal_is_left(text: str) -> None:
    for character in printable(text):
        assert unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(character) not in (
            "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
        )  # fmt: skip
