"""Depth and values of JSON are counted on the whole text at once; here against a reader of single bytes."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import RemoteProtocolError
from flare.strict_json import MAX_DEPTH, loads
from flare.wire.messages import Fetch
from tests.vectors.examples import EXAMPLES


def naive_depth(text: str) -> int:
    depth = deepest = 0
    inside = escaped = False
    for character in text:
        if inside:
            inside = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            inside = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _wrapped(depth: int, value: object) -> object:
    for number in range(depth):
        value = [value] if number % 2 else {'"[': value}
    return value


STRINGS = st.text(st.sampled_from('[]{}"\\nu,: x'), max_size=6)
VALUES = st.recursive(
    st.integers() | STRINGS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(STRINGS, inner, max_size=3)
        | st.builds(_wrapped, st.integers(1, 34), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(VALUES, st.booleans())
def test_against_a_naive_count(value: object, spaced: bool) -> None:
    text = json.dumps({"a": value}, separators=(", ", " : ") if spaced else (",", ":"))
    for data in (text, text.encode()):
        if naive_depth(text) > MAX_DEPTH:
            with pytest.raises(RemoteProtocolError, match="nested deeper than 32"):
                loads(data, limit=10**6, what="it")
        else:
            assert loads(data, limit=10**6, what="it") == {"a": value}


@given(st.text(st.sampled_from('[]{}"\\ab:,1 '), max_size=80))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        value = loads(text, limit=1000, what="it")
    except RemoteProtocolError:
        return
    assert value == json.loads(text)


HOSTILE = [
    b'{"' + b'\\"' * 1_500_000,
    b'"' * 3_000_000,
    b'{"a":"' + b"\\\\" * 1_500_000,
    b"[" * 3_000_000,
    b"{}" * 1_500_000,
    b"[]" * 40 + b"[" * 31 + b"[]" * 1_400_000,
    b"{" + b",".join(b'"%d":0' % number for number in range(250_000)) + b',"0":0}',
    b'{"a":' + b"1" * 3_000_000 + b"}",
    b'{"a":"' + b"\\ud800" * 500_000 + b'"}',
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_megabytes_that_are_meant_to_hurt(data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(RemoteProtocolError):
        loads(data, limit=4 * 1024 * 1024, what="it")
    assert time.process_time() - started < 2


def test_text_with_a_lone_surrogate() -> None:
    with pytest.raises(RemoteProtocolError, match="it has a lone surrogate"):
        loads('{"a":"\ud800"}', limit=100, what="it")


MAX_VALUES = 200_000
BUSY = {
    "objects": b'{"a":[' + b",".join([b"{}"] * 1_390_000) + b"]}",
    "numbers": b'{"a":[' + b",".join([b"1e1"] * 1_040_000) + b"]}",
    "strings": b'{"a":[' + b",".join([b'""'] * 1_390_000) + b"]}",
    "members": b"{" + b",".join(b'"%d":0' % number for number in range(320_000)) + b"}",
    "quotes": b'"' * 4_190_000,
    "brackets": b"[]" * 2_090_000,
}


@pytest.mark.parametrize("shape", BUSY)
def test_a_body_of_many_values_is_refused_before_it_is_built(shape: str) -> None:
    taken = []
    for _ in range(3):  # the shortest counts: a busy machine's caches are no subject here
        started = time.process_time()
        with pytest.raises(RemoteProtocolError, match="it has more than 200000 members and items"):
            loads(BUSY[shape], limit=4 * 1024 * 1024, what="it", values=MAX_VALUES)
        taken.append(time.process_time() - started)
    assert min(taken) < 0.1


def test_values_are_counted_outside_strings() -> None:
    text = json.dumps({'a,:["\\': ["b,,,,{{{{::::", {}, 1]}, separators=(",", ":"))
    assert loads(text, limit=1000, what="it", values=6) == json.loads(text)
    with pytest.raises(RemoteProtocolError, match="more than 5 members and items"):
        loads(text, limit=1000, what="it", values=5)


def test_the_longest_ranges_that_may_be_asked_for_fit() -> None:
    ranges = tuple((number * 2**31, 2**30) for number in range(65_536))
    request = replace(next(example for example in EXAMPLES if isinstance(example, Fetch)), ranges=ranges)
    assert Fetch.from_body(request.to_body()) == request
