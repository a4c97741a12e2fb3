"""Frame bodies: they come back as they went, and every rule about a member is provoked once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import (
    BusyError,
    ForbiddenError,
    LocalProtocolError,
    NotFoundError,
    PairingError,
    RemoteProtocolError,
)
from flare.limits import MAX_FILES, MAX_RANGES
from flare.wire import messages as m
from flare.wire.frames import BODY_LIMITS, MAX_REPORT, Tag
from flare.wire.messages.groups import MAX_LINE
from tests.vectors.examples import CONTROLLER, EXAMPLES, GROUP, LAUNCH_KEY, SIGNED_RUN, SIGNED_TRANSFER

IDS = [type(message).__name__ for message in EXAMPLES]
CLASSES = sorted({type(message) for message in EXAMPLES}, key=lambda body: body.__name__)


def example(body: type[m.Message]) -> m.Message:
    return next(message for message in EXAMPLES if isinstance(message, body))


def changed(body: type[m.Message], **members: Any) -> bytes:
    """The example's body with some members set, or left out where None."""
    value = example(body).to_json() | members
    return json.dumps({name: item for name, item in value.items() if item is not None}).encode()


def refused(body: type[m.Message], sentence: str, **members: Any) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        body.from_body(changed(body, **members))


def test_every_exported_body_has_an_example() -> None:
    exported = {
        value
        for value in vars(m).values()
        if isinstance(value, type)
        and issubclass(value, m.Message)
        and value not in (m.Message, m.Empty, m.Request)
    }
    assert exported == set(CLASSES)


@pytest.mark.parametrize("message", EXAMPLES, ids=IDS)
def test_round_trip(message: m.Message) -> None:
    assert type(message).from_body(message.to_body()) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=IDS)
def test_unknown_members_are_ignored(message: m.Message) -> None:
    body = json.dumps(message.to_json() | {"from the future": [1, {"x": None}]}).encode()
    assert type(message).from_body(body) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=IDS)
def test_a_member_of_another_type_is_named(message: m.Message) -> None:
    for name in message.to_json():
        wrong = json.dumps(message.to_json() | {name: {"unlike": True} if name != "document" else 5}).encode()
        if isinstance(message.to_json()[name], dict) and not message.to_json()[name]:
            continue
        with pytest.raises(RemoteProtocolError, match=f"{name}|engines|signer|body"):
            type(message).from_body(wrong)


@pytest.mark.parametrize("message", EXAMPLES, ids=IDS)
def test_a_missing_member_is_named_or_optional(message: m.Message) -> None:
    for name in message.to_json():
        without = {key: value for key, value in message.to_json().items() if key != name}
        try:
            type(message).from_body(json.dumps(without).encode())
        except RemoteProtocolError as problem:
            assert name in str(problem)


def test_requests_name_their_replies() -> None:
    for request in m.REQUESTS:
        assert request.REPLY is not None
        assert request.REPLY.TAG is Tag.OK
    assert {request.TAG for request in m.REQUESTS} == set(Tag) - {
        Tag.HELLO,
        Tag.OK,
        Tag.ERROR,
        Tag.DOWNLOAD_PROGRESS,
        Tag.TRANSFER_PROGRESS,
        Tag.LOG,
        Tag.EXIT,
        Tag.DATA,
    }


def test_limits_by_body() -> None:
    for body in CLASSES:
        large = body in (m.StatusReply, m.MetricsReply, m.StatReply)
        assert (MAX_REPORT if large else BODY_LIMITS[body.TAG]) == body.LIMIT


def test_stat_holds_as_many_companions_as_a_core_may_have() -> None:
    names = (f"model-{number:05d}-of-65535.safetensors" for number in range(MAX_FILES))
    reply = m.StatReply(4_999_999_999, tuple(m.Companion(name, 4_999_999_999) for name in names))
    assert m.StatReply.from_body(reply.to_body()) == reply


def test_secrets_are_not_shown() -> None:
    shown = repr(m.Run(SIGNED_RUN, 0, "", LAUNCH_KEY)) + repr(example(m.Download)) + repr(example(m.Pair))
    for secret in (repr(LAUNCH_KEY), "'token'", "proof"):
        assert secret not in shown


# JSON's rules, each once


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "STATUS is not JSON"),
        (b"[]", "STATUS is not a JSON object"),
        (b"\xff", "STATUS is not UTF-8"),
        (b'{"a":1,"a":2}', 'STATUS has the key "a" twice'),
        (b'{"a":NaN}', "STATUS has NaN"),
        (b'{"a":-Infinity}', "STATUS has -Infinity"),
        (b'{"a":1e999}', "STATUS has 1e999, which is too large"),
        (b'{"a":"\\ud800"}', "STATUS has a lone surrogate"),
        (b'{"a":' + b"[" * 32 + b"]" * 32 + b"}", "STATUS is nested deeper than 32"),
        (b'{"a":' + b"9" * 5000 + b"}", "a number is too long"),
        (b'{"toward":5}', '"toward" is not a string'),
        (b'{"toward":"' + b"x" * 400 + b'"}', '"toward" is longer than 300'),
    ],
)
def test_json_rules(body: bytes, sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        m.Status.from_body(body)


def test_a_long_string_without_an_end_is_refused_at_once() -> None:
    """It once took quadratic time: minutes for a body of the size that a stranger may send."""
    with pytest.raises(RemoteProtocolError, match="not JSON"):
        m.Hello.from_body(b'{"' + b'\\"' * 32_000)


def test_a_body_that_is_too_long() -> None:
    with pytest.raises(RemoteProtocolError, match="HELLO has 65537 bytes; at most 65536"):
        m.Hello.from_body(b" " * 65_537)
    hello = m.Hello(7, CONTROLLER.public_key, executable="x" * 70_000)
    with pytest.raises(LocalProtocolError, match=r"HELLO of 70\d+ bytes was to be sent"):
        hello.to_frame()


@pytest.mark.parametrize("value", [-1, 2**53, 1.0, True, "1", [1]])
def test_what_is_no_count(value: object) -> None:
    refused(m.StatReply, '"size" is not a whole number from 0', size=value)


def test_null_is_as_good_as_absent() -> None:
    assert m.Status.from_body(b'{"toward":null}') == m.Status()
    with pytest.raises(RemoteProtocolError, match='"path" is missing'):
        m.Stat.from_body(b'{"path":null}')


# One test a rule of one body


def test_names() -> None:
    for bad in ("", "-x", "a/b", "x" * 64, "a b", "é"):
        refused(m.Pair, "is no controller name .in PAIR.", name=bad)
    assert m.Pair.from_body(changed(m.Pair, name="x" * 63))


def test_a_nodes_name() -> None:
    facts = example(m.PairReply).to_json()["node"]
    refused(m.PairReply, "is no node name", node=facts | {"name": "../x"})


def test_keys_and_proofs_are_lower_case_hex() -> None:
    key = CONTROLLER.public_key.hex()
    for bad in (key.upper(), key[:-2], key + "00", "zz" * 32, f" {key[1:]}"):
        refused(m.Hello, '"public_key" is not 64 lower-case hex digits', public_key=bad)
    refused(m.Pair, '"proof" is not 64 lower-case hex digits', proof="00")


def test_engines() -> None:
    facts = example(m.PairReply).to_json()["node"]
    refused(m.PairReply, '"engines" has a member that is not a text', node=facts | {"engines": {"x": 1}})
    many = {f"engine{number}": "1" for number in range(65)}
    refused(m.PairReply, '"engines" has 65 members; at most 64', node=facts | {"engines": many})


def test_the_protocol_version_is_a_u16() -> None:
    refused(m.Hello, '"protocol" is not a whole number from 0 to 65535', protocol=65_536)


def test_kinds_of_cache_entries() -> None:
    refused(m.Put, '"kind" is none of core, blob, executable', kind="model")
    refused(m.Have, '"kind" is none of core, blob, executable', kind="model")


def test_get_has_a_bound() -> None:
    refused(m.Get, '"length" is not a whole number from 0 to 268435456', length=2**28 + 1)
    refused(m.GetReply, '"length" is not a whole number from 0 to 268435456', length=2**28 + 1)


@pytest.mark.parametrize("bad", [[1], [1, 2, 3], "ab", {"offset": 0}, None])
def test_what_is_no_range(bad: object) -> None:
    refused(m.Fetch, r"ranges\[0\] is not a pair of offset and length", ranges=[bad])


@pytest.mark.parametrize("bad", [[-1, 2], [0, True], [0, 1.5], [0, 2**53]])
def test_numbers_that_are_no_range(bad: object) -> None:
    refused(m.Fetch, r"ranges\[0\] is not a pair of whole numbers", ranges=[bad])


def test_too_many_ranges() -> None:
    refused(m.Fetch, "at most 65536", ranges=[[0, 1]] * (MAX_RANGES + 1))


def test_the_length_of_a_fetch_is_the_sum_of_its_ranges() -> None:
    refused(m.FetchReply, '"length" is not the sum of "ranges"', length=1)


def test_streams() -> None:
    refused(m.Transfer, '"streams" is not a whole number from 1 to 64', streams=0)
    refused(m.Transfer, '"streams" is not a whole number from 0 to 64', streams=65)


def test_profiles_have_a_bound() -> None:
    refused(m.Download, '"publishers" has one longer than 16384', publishers=["x" * 16_385])
    refused(m.Transfer, '"publisher" is longer than 16384', publisher="x" * 16_385)


def test_neighbours_are_texts() -> None:
    endpoint = example(m.FabricReply).to_json()["endpoints"][0]
    for bad in ([{"port": 1}], [["port"]], [{str(number): "x" for number in range(33)}]):
        refused(m.FabricReply, r"lldp\[0\]", endpoints=[endpoint | {"lldp": bad}])


def test_states_of_a_group() -> None:
    groups = [GROUP.to_json() | {"state": "paused"}]
    refused(m.StatusReply, '"state" is none of running, exited, failed', groups=groups)


def test_an_exit_has_a_status_or_a_signal() -> None:
    for members in ({"status": 0, "signal": 9}, {"status": None, "signal": None}):
        refused(m.Exit, 'not exactly one of "status" and "signal"', **members)


def test_a_logs_stream() -> None:
    refused(m.Log, '"stream" is none of stdout, stderr', stream="stdlog")


def test_a_line_has_a_bound_in_bytes() -> None:
    refused(m.Log, '"line" is longer than 16384 bytes', line="é" * (MAX_LINE // 2 + 1))
    refused(m.Log, '"line" is longer than 16384 characters', line="x" * (MAX_LINE + 1))


@pytest.mark.parametrize("line", [b"ok", b"\xff\xfe", b"x" * 20_000, b"\xff" * 20_000, "é".encode() * 10_000])
def test_raw_output_becomes_a_line(line: bytes) -> None:
    log = m.Log.of(line, "stderr")
    assert len(log.line.encode()) <= MAX_LINE
    assert m.Log.from_body(log.to_body()) == log
    if len(line) < 100:
        assert log.line == line.decode("utf-8", "replace")


def test_a_launch_key_has_32_bytes() -> None:
    refused(m.Run, '"launch_key" is not 64 lower-case hex digits', launch_key="00")


def test_a_grant_has_its_own_bound() -> None:
    grant = SIGNED_TRANSFER.to_json() | {"body": "x" * (1024 * 1024 + 1)}
    refused(m.Fetch, 'FETCH, grant: "body" is longer than 1048576', grant=grant)


# ERROR


def test_an_error_carries_code_and_sentence() -> None:
    assert m.Error.of(NotFoundError("No group named x is here.")) == m.Error(
        "not_found", "No group named x is here."
    )
    assert m.Error.of(BusyError("x" * 100_000)).message == "x" * 65_536


def test_a_refusal_says_the_same_whatever_was_asked() -> None:
    first, second = (m.Error.of(ForbiddenError(text)) for text in ("no such file", "not your file"))
    assert first == second
    assert "log" in first.message
    assert "code" not in m.Error.of(PairingError("the code is wrong")).message


def test_a_minimal_hello() -> None:
    full = next(message for message in EXAMPLES if isinstance(message, m.Hello) and message.node)
    assert set(full.minimal().to_json()) == {"protocol", "public_key"}


# Any body whatever

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["core", "running", "maxwell", "00" * 32, "00" * 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.data())
def test_any_members_parse_or_are_refused(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(CLASSES))
    value = example(body).to_json()
    for name in data.draw(st.lists(st.sampled_from([*value, "x"]), max_size=4)) if value else ["x"]:
        value[name] = data.draw(JSON)
    text = json.dumps(value).encode()
    try:
        parsed = body.from_body(text)
    except RemoteProtocolError:
        return
    assert body.from_body(parsed.to_body()) == parsed


@settings(max_examples=200)
@given(st.sampled_from(CLASSES), st.binary(max_size=100))
def test_any_bytes_parse_or_are_refused(body: type[m.Message], data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        body.from_body(data)


@settings(max_examples=200)
@given(st.data())
def test_any_change_of_one_byte_parses_or_is_refused(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(EXAMPLES))
    body = bytearray(message.to_body())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        type(message).from_body(bytes(body))


def test_bodies_are_values() -> None:
    for message in EXAMPLES:
        assert dataclasses.is_dataclass(message)
        assert replace(message) == message  # type: ignore[type-var]
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            message.TAG = Tag.OK  # type: ignore[misc]
