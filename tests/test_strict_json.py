"""JSON that two parsers could read differently is refused, and the message names the member."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.errors import ConfigError, RemoteProtocolError
from flare.strict_json import Reader, canonical, loads


def read(text: str | bytes) -> dict[str, object]:
    return loads(text, limit=10_000, what="STATUS")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a":1,"a":2}', 'STATUS has the key "a" twice'),
        ('{"b":{"a":1,"a":2}}', 'the key "a" twice'),
        ('{"a":NaN}', "NaN, which is no JSON number"),
        ('{"a":-Infinity}', "-Infinity, which is no JSON number"),
        ('{"a":"\\ud800"}', "lone surrogate"),
        ('{"\\udfff":1}', "lone surrogate"),
        ("[1]", "not a JSON object"),
        ('{"a":', "not JSON"),
        ("", "not JSON"),
        ('{"a":1} x', "not JSON"),
        ('{"a":' + "[" * 40 + "]" * 40 + "}", "deeper than 32"),
        (b'{"a":"\xff"}', "not UTF-8"),
        ('{"a":' + "9" * 5000 + "}", "a number is too long"),
        ('{"a":"' + "x" * 10_000 + '"}', "at most 10000 are allowed"),
    ],
)
def test_refusals(text: str | bytes, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match="STATUS") as caught:
        read(text)
    assert complaint in caught.value.message


def test_brackets_inside_strings_are_no_depth() -> None:
    assert read('{"a":"' + "[{" * 100 + '\\""}') == {"a": "[{" * 100 + '"'}


def test_a_surrogate_pair_is_one_character() -> None:
    assert read('{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet=string.printable),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_canonical_text_reads_back(value: dict[str, object]) -> None:
    text = canonical(value)
    assert text.isascii()
    assert loads(text, limit=len(text), what="x") == value


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_anything_is_parsed_or_refused(data: bytes | str) -> None:
    try:
        loads(data, limit=1000, what="x")
    except RemoteProtocolError:
        return
    json.loads(data)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda reader: reader.text("count"), '"count" is not a string'),
        (lambda reader: reader.text("name", limit=3), '"name" is longer than 3'),
        (lambda reader: reader.text("absent"), '"absent" is missing'),
        (lambda reader: reader.text("nothing"), '"nothing" is missing'),
        (lambda reader: reader.count("flag"), '"flag" is not a whole number'),
        (lambda reader: reader.count("negative"), '"negative" is not a whole number'),
        (lambda reader: reader.count("huge"), '"huge" is not a whole number'),
        (lambda reader: reader.count("fraction"), '"fraction" is not a whole number'),
        (lambda reader: reader.number("name"), '"name" is not a number'),
        (lambda reader: reader.number("flag"), '"flag" is not a number'),
        (lambda reader: reader.flag("count"), '"count" is not true or false'),
        (lambda reader: reader.hex("name", 4), '"name" is not 8 lower-case hex digits'),
        (lambda reader: reader.hex("hex", 5), '"hex" is not 10 lower-case hex digits'),
        (lambda reader: reader.object("items"), '"items" is not an object'),
        (lambda reader: reader.texts("name", limit=1), '"name" is not a list'),
        (lambda reader: reader.texts("items", limit=1), '"items" has 2 items; at most 1'),
        (lambda reader: reader.texts("items", limit=5), "items[0] is not a string"),
        (lambda reader: reader.counts("words", limit=5), "words[0] is not a whole number"),
    ],
)
def test_a_wrong_member_is_named(call: object, complaint: str) -> None:
    value = {
        "count": 3, "name": "hertz", "flag": True, "negative": -1, "huge": 2**53, "fraction": 1.5,
        "hex": "00ff", "items": [1, 2], "words": ["a"], "nothing": None,
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        call(Reader(value, "the file", ConfigError))  # type: ignore[operator]
    assert caught.value.message.startswith("the file")
    assert complaint in caught.value.message


def test_optional_members_have_their_default() -> None:
    reader = Reader({"present": "x", "null": None}, "x")
    assert reader.text("present", default=None) == "x"
    assert reader.text("null", default="d") == "d"
    assert reader.count("absent", default=7) == 7
    assert reader.nested("absent", default=None) is None


def test_signed_bodies_refuse_what_nobody_asked_for() -> None:
    reader = Reader({"known": 1, "extra": 2}, "the grant")
    reader.count("known")
    with pytest.raises(RemoteProtocolError, match='the grant has the unknown member "extra"'):
        reader.finish()


def test_no_object_no_reader() -> None:
    with pytest.raises(RemoteProtocolError, match="not a JSON object"):
        Reader([], "the grant")
