"""The independent peer against itself, and its decoder against tampering."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from . import bodies, decoder
from .decoder import Direction, Frame, FrameSplitter, RefusedError
from .peer import ClosedError, IndependentPeer, RemoteError, controllers_record, sign_record
from .samples import build_core


@pytest.fixture
def pair() -> Iterator[tuple[IndependentPeer, IndependentPeer]]:
    """Two peers on one socket pair, before the handshake."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(10)
    peers = (IndependentPeer(ends[0]), IndependentPeer(ends[1]))
    yield peers
    for peer in peers:
        peer.close()


def shake(initiator: IndependentPeer, responder: IndependentPeer) -> None:
    """Run a handshake between two peers."""
    thread = threading.Thread(target=responder.respond)
    thread.start()
    try:
        initiator.initiate(responder.public_key)
    finally:
        thread.join()


def test_two_peers_agree(pair: tuple[IndependentPeer, IndependentPeer]) -> None:
    left, right = pair
    shake(left, right)
    assert left.handshake_hash == right.handshake_hash
    assert (left.peer_key, right.peer_key) == (right.public_key, left.public_key)
    left.send_hello(controllers_revision=3)
    assert bodies.check_body("HELLO", right.read().body)["controllers_revision"] == 3
    right.send_hello()
    assert left.read_hello()["public_key"] == right.public_key.hex()


@pytest.mark.parametrize("piece", [1, 9, 65_510])
@pytest.mark.parametrize("size", [0, 1, 9, 5_000])
def test_bodies_of_any_cut_arrive(
    pair: tuple[IndependentPeer, IndependentPeer], piece: int, size: int
) -> None:
    left, right = pair
    shake(left, right)
    left.piece = piece
    body = bytes(range(256)) * 20
    sender = threading.Thread(target=left.send, args=("DATA", body[:size]))
    sender.start()
    assert right.read_data(size) == body[:size]
    sender.join()


def test_error_is_heard(pair: tuple[IndependentPeer, IndependentPeer]) -> None:
    left, right = pair
    shake(left, right)
    right.send("ERROR", {"code": "forbidden", "message": "No."})
    with pytest.raises(RemoteError, match="forbidden: No"):
        left.request("STATUS", {})


def test_wrong_responder_never_hears_message_3(pair: tuple[IndependentPeer, IndependentPeer]) -> None:
    left, right = pair
    outcome: list[BaseException] = []

    def respond() -> None:
        try:
            right.respond()
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=respond)
    thread.start()
    with pytest.raises(RefusedError, match="expected"):
        left.initiate(bytes(31) + b"\x05")
    left.close()
    thread.join()
    assert "0 of 114" in str(outcome[0])


def test_own_key_is_refused(pair: tuple[IndependentPeer, IndependentPeer]) -> None:
    left, right = pair
    right.identity = left.identity
    errors: list[BaseException] = []

    def respond() -> None:
        try:
            right.respond()
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=respond)
    thread.start()
    with pytest.raises(RefusedError):
        left.initiate()
    left.close()
    thread.join()
    assert errors


def recorded() -> tuple[tuple[bytes, bytes, bytes], X25519PrivateKey, X25519PrivateKey, bytes, bytes]:
    """A handshake made by hand: the messages, both ephemeral keys, both public keys."""
    own, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    initiator, responder = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    one = decoder.message_1(own)
    ephemeral = other.public_key().public_bytes_raw()
    salt = decoder.sha256(one, ephemeral)
    forward, backward = decoder.directions(decoder.agree(own, ephemeral), salt)
    two = ephemeral + decoder.seal_identity(backward, b"responder", salt, responder)
    three = decoder.seal_identity(forward, b"initiator", decoder.sha256(one, two), initiator)
    return (one, two, three), own, other, decoder.public_key(initiator), decoder.public_key(responder)


def test_recorded_handshake_reads_the_same_from_both_sides() -> None:
    messages, own, other, initiator, responder = recorded()
    left = decoder.read_handshake(*messages, own)
    assert left == decoder.read_handshake(*messages, other)
    assert (left.initiator, left.responder) == (initiator, responder)
    assert left.initiator_to_responder.counter == left.responder_to_initiator.counter == 1
    with pytest.raises(RefusedError, match="neither side"):
        decoder.read_handshake(*messages, X25519PrivateKey.generate())


MESSAGES, OWN_EPHEMERAL, *_ = recorded()


@given(st.integers(0, 2), st.integers(0, 10_000), st.integers(1, 255))
def test_every_changed_handshake_byte_is_noticed(message: int, position: int, change: int) -> None:
    changed = [bytearray(item) for item in MESSAGES]
    changed[message][position % len(changed[message])] ^= change
    with pytest.raises(RefusedError):
        decoder.read_handshake(bytes(changed[0]), bytes(changed[1]), bytes(changed[2]), OWN_EPHEMERAL)


def test_zero_shared_secret_is_refused() -> None:
    with pytest.raises(RefusedError, match="all zero"):
        decoder.agree(X25519PrivateKey.generate(), bytes(32))


SMALL_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    b"\x01" + bytes(30) + b"\x80",
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa"),
]


@pytest.mark.parametrize("key", SMALL_ORDER)
def test_small_order_keys_are_refused(key: bytes) -> None:
    with pytest.raises(RefusedError, match="small order"):
        decoder.check_public_key(key)


@pytest.mark.parametrize("y", [2**255 - 19, 2**255 - 18, 2**255 - 1])
def test_keys_that_are_not_canonical_are_refused(y: int) -> None:
    with pytest.raises(RefusedError, match="canonical"):
        decoder.check_public_key(y.to_bytes(32, "little"))


def test_ordinary_keys_pass() -> None:
    for _ in range(20):
        decoder.check_public_key(decoder.public_key(Ed25519PrivateKey.generate()))


def test_records_are_bound_to_key_counter_and_bytes() -> None:
    record = Direction(bytes(32), 5).seal(b"x" * 65_519)
    assert len(record) == 2 + 65_535
    assert Direction(bytes(32), 5).open(record) == b"x" * 65_519
    broken = record[:-1] + bytes([record[-1] ^ 1])
    for direction, bad in [
        (Direction(bytes(32), 6), record),
        (Direction(b"k" * 32, 5), record),
        (Direction(bytes(32), 5), broken),
        (Direction(bytes(32), 5), record[:-1]),
        (Direction(bytes(32), 5), b"\0\x10" + bytes(16)),
        (Direction(bytes(32), 2**64 - 1), record),
    ]:
        with pytest.raises(RefusedError):
            direction.open(bad)
    for size in (0, 65_520):
        with pytest.raises(RefusedError):
            Direction(bytes(32)).seal(bytes(size))


def test_stream_splitting() -> None:
    writer = Direction(bytes(32), 1)
    stream = writer.seal(decoder.frame_header(2, 3) + b"{") + writer.seal(b" }")
    stream += writer.seal(decoder.frame_header(24, 0))
    assert decoder.read_stream(Direction(bytes(32), 1), stream) == [Frame(2, b"{ }"), Frame(24, b"")]
    with pytest.raises(RefusedError, match="inside a record"):
        decoder.read_stream(Direction(bytes(32), 1), stream[:-1])
    cut = Direction(bytes(32), 1).seal(decoder.frame_header(2, 3) + b"{")
    with pytest.raises(RefusedError, match="inside a frame"):
        decoder.read_stream(Direction(bytes(32), 1), cut)


@pytest.mark.parametrize(
    "plaintext",
    [b"\x02" + bytes(7), b"\0" + bytes(8), bytes([26]) + bytes(8), b"\x18" + struct.pack("<Q", 1) + b"ab"],
)
def test_frames_that_break_the_record_rule(plaintext: bytes) -> None:
    with pytest.raises(RefusedError):
        FrameSplitter().feed(plaintext)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"1", b"{", b'{"a":1,"a":2}', b'{"a":{"b":1,"b":1}}', b'{"a":NaN}', b'{"a":-Infinity}',
        b'{"a":1e999}', b'{"a":"\\ud800"}', b'{"\\udfff":1}', b'{"a":"\xff"}', b"{} {}", b"\xef\xbb\xbf{}",
        b'{"a":"\n"}', b'{"a":' + b"[" * 32 + b"]" * 32 + b"}", b'{"a":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_strict_json_refuses(text: bytes) -> None:
    with pytest.raises(RefusedError):
        bodies.strict_json(text)


def test_strict_json_accepts() -> None:
    deep = b'{"a":' + b"[" * 31 + b"]" * 31 + b"}"
    assert bodies.strict_json(deep)
    assert bodies.strict_json(b' {"a": "\\ud83d\\ude00", "b": -1.5e3} ') == {"a": "\U0001f600", "b": -1500.0}
    with pytest.raises(RefusedError, match="over 10"):
        bodies.strict_json(deep, 10)


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_strict_json_parses_or_refuses(data: bytes) -> None:
    with contextlib.suppress(RefusedError):
        assert isinstance(bodies.strict_json(data), dict)


@pytest.mark.parametrize("value", [True, -1, 2**53, 1.0, "1", None])
def test_counts(value: object) -> None:
    with pytest.raises(RefusedError, match=r"GET\.offset is not a count"):
        bodies.check_body("GET", json.dumps({"path": "/a", "offset": value, "length": 1}).encode())


def test_members_of_the_table() -> None:
    with pytest.raises(RefusedError, match="GET lacks length"):
        bodies.check_body("GET", b'{"path":"/a","offset":0}')
    assert bodies.check_body("GET", b'{"path":"/a","offset":0,"length":9,"new":1}')["length"] == 9
    for body in (b"{}", b'{"status":0,"signal":9}', b'{"status":true}'):
        with pytest.raises(RefusedError):
            bodies.check_body("EXIT", body)
    assert bodies.check_body("EXIT", b'{"signal":9,"reason":"killed"}')
    with pytest.raises(RefusedError, match="unknown node"):
        bodies.HELLO_TO_STRANGERS({"protocol": 7, "public_key": "0" * 64, "node": {}}, "HELLO")
    big = b'{"x":"' + b"x" * (2 << 20) + b'"'
    for frame, request in [("STOP", None), ("HELLO", None), ("OK", "STOP"), ("OK", "RUN")]:
        with pytest.raises(RefusedError, match="over"):
            bodies.check_body(frame, big + b"}", request)
    assert bodies.check_body("STATUS", big + b"}")
    with pytest.raises(RefusedError, match="grant is over"):
        grant = {"body": "x" * ((1 << 20) + 1), "signer": "0" * 64, "signature": "0" * 128}
        bodies.check_body("FETCH", json.dumps({"grant": grant, "file": "a", "ranges": []}).encode())


def test_controller_sets() -> None:
    first, second = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    start = controllers_record(first)
    keys = [
        {"name": "a", "public_key": decoder.public_key(first).hex()},
        {"name": "b", "public_key": decoder.public_key(second).hex()},
    ]
    body: dict[str, Any] = {"kind": "controllers", "revision": 2, "keys": keys}
    both = sign_record(first, body)
    alone = sign_record(second, {"kind": "controllers", "revision": 3, "keys": keys[1:]})
    assert bodies.verify_controllers([start, both, alone]) == [keys[1]["public_key"]]
    for chain in (
        [],
        [both],
        [start, alone],
        [start, sign_record(second, body)],
        [start, sign_record(first, body | {"more": 1})],
        [start, sign_record(first, body | {"kind": "run_grant"})],
        [start, sign_record(first, body | {"keys": [keys[0], keys[0]]})],
        [start, sign_record(first, body | {"keys": []})],
        [start, both | {"body": both["body"] + " "}],
        [sign_record(second, json.loads(start["body"]))],
    ):
        with pytest.raises(RefusedError):
            bodies.verify_controllers(chain)


def test_join_codes() -> None:
    code = "ABCD-EFGH-IJKL-MNOP-QRST-UVWX-YZ23-4567"
    assert decoder.join_code_key(code) == decoder.join_code_key(code.lower().replace("-", ""))
    assert decoder.pairing_proof(code, b"controller", bytes(32)) != decoder.pairing_proof(
        code, b"node", bytes(32)
    )
    for bad in ("", "ABCD", code + "-ABCD", code[:-1] + "1", code[:-1] + "8"):
        with pytest.raises(RefusedError):
            decoder.join_code_key(bad)


def test_rank_proof_binds_every_part() -> None:
    preface, answer = decoder.rank_preface(0, 1, bytes(32)), decoder.rank_answer(2, bytes(32))
    proofs = {
        decoder.rank_proof(key, side, first, second)
        for key in (bytes(32), b"k" * 32)
        for side in (b"peer", b"zero")
        for first in (preface, decoder.rank_preface(1, 1, bytes(32)), decoder.rank_preface(0, 2, bytes(32)))
        for second in (answer, decoder.rank_answer(3, bytes(32)))
    }
    assert len(proofs) == 24
    peer, zero = decoder.rank_directions(bytes(32), preface, answer)
    assert peer.key != zero.key
    with pytest.raises(RefusedError):
        decoder.rank_proof(bytes(32), b"peer", preface[:-1], answer)


@pytest.mark.parametrize("packed", [False, True])
def test_core_reads_back_and_damage_is_noticed(tmp_path: Path, packed: bool) -> None:
    primary = build_core(tmp_path, packed)
    assert bodies.verify_files(primary).index["model"] == "a"
    whole = primary.read_bytes()
    text_at = whole.index(b"llama.cpp")
    for damaged in (
        whole + b"x",
        whole[:-1],
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole[:text_at] + b"L" + whole[text_at + 1 :],
        whole.replace(b"multi_host", b"single_hst"),
    ):
        primary.write_bytes(damaged)
        with pytest.raises(RefusedError):
            bodies.verify_files(primary)
    primary.write_bytes(whole)
    (tmp_path / "model" / "a.gguf").write_bytes(b"w" * (1 << 20) + b"tale")
    with pytest.raises(RefusedError, match=r"model/a\.gguf is damaged"):
        bodies.verify_files(primary)
