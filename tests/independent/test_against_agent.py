"""A real agent, spoken to by the independent peer."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from . import bodies, decoder
from .agents import Agent, expect_closed, expect_error, is_open, running_agent
from .decoder import RefusedError
from .peer import ClosedError, IndependentPeer, RemoteError, controllers_record, sign_record
from .samples import build_core


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent of the test's own."""
    with running_agent(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def unpaired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent for tests that leave it unpaired."""
    with running_agent(tmp_path_factory.mktemp("unpaired")) as found:
        yield found


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent for tests that leave its controller as it is."""
    with running_agent(tmp_path_factory.mktemp("paired")) as found:
        found.pair()
        yield found


def test_unknown_key_hears_only_protocol_and_public_key(unpaired: Agent) -> None:
    with unpaired.peer() as peer:
        peer.send_hello()
        hello = peer.read_hello()
        bodies.HELLO_TO_STRANGERS(hello, "HELLO")
        assert hello == {"protocol": 7, "public_key": unpaired.public_key.hex()}


@pytest.mark.parametrize("piece", [1, 20])
def test_hello_in_many_records(unpaired: Agent, piece: int) -> None:
    with unpaired.peer() as peer:
        peer.piece = piece
        peer.send_hello()
        assert peer.read_hello()["protocol"] == 7


def test_wrong_magic_is_closed(unpaired: Agent) -> None:
    with unpaired.raw() as connection:
        connection.sendall(b"FLAREFLU" + decoder.message_1(IndependentPeer(connection).ephemeral)[8:])
        expect_closed(connection)


def test_zero_shared_secret_is_closed(unpaired: Agent) -> None:
    with unpaired.raw() as connection:
        connection.sendall(decoder.MAGIC + b"\0\x07" + bytes(32))
        expect_closed(connection)


@pytest.mark.parametrize("version", [6, 8])
def test_another_version_is_told_after_the_handshake(unpaired: Agent, version: int) -> None:
    with unpaired.peer(version=version) as peer:
        peer.send_hello(protocol=version)
        error = expect_error(peer, "version")
        assert {"7", str(version)} <= set(re.findall(r"\d+", error.message))


def test_own_key_is_closed(unpaired: Agent) -> None:
    pem = (unpaired.home / "config/flare/agent/node.key").read_bytes()
    own = load_pem_private_key(pem, None)
    assert isinstance(own, Ed25519PrivateKey)
    with unpaired.raw() as connection:
        peer = IndependentPeer(connection, own)
        one = decoder.message_1(peer.ephemeral)
        connection.sendall(one)
        two = b""
        while len(two) < decoder.MESSAGE_2_BYTES:
            two += connection.recv(decoder.MESSAGE_2_BYTES - len(two))
        forward, _ = decoder.directions(
            decoder.agree(peer.ephemeral, two[:32]), decoder.sha256(one, two[:32])
        )
        connection.sendall(decoder.seal_identity(forward, b"initiator", decoder.sha256(one, two), own))
        expect_closed(connection)


def test_changed_message_3_is_closed(unpaired: Agent) -> None:
    with unpaired.raw() as connection:
        connection.sendall(decoder.message_1(IndependentPeer(connection).ephemeral))
        got = b""
        while len(got) < decoder.MESSAGE_2_BYTES:
            got += connection.recv(decoder.MESSAGE_2_BYTES - len(got))
        connection.sendall(b"\0\x70" + bytes(112))
        expect_closed(connection)


def test_changed_record_ends_the_session(unpaired: Agent) -> None:
    with unpaired.session() as peer:
        record = bytearray(peer.encode("STATUS", {}))
        record[-1] ^= 1
        peer.socket.sendall(record)
        with pytest.raises((ClosedError, RemoteError)):
            peer.expect("OK", "STATUS")
        with pytest.raises(ClosedError):
            peer.read()


@pytest.mark.parametrize(
    ("frame", "body"),
    [
        ("STATUS", {}),
        ("GET", {"path": "/etc/hostname", "offset": 0, "length": 1}),
        ("STAT", {"path": "/nowhere"}),
        ("REMOVE", {"group": "nothing"}),
        ("METRICS", {}),
        ("STOP", {"group": "nothing"}),
        ("ATTACH", {}),
        ("PUT", {"kind": "blob", "name": "0" * 64, "size": 1}),
        ("HAVE", {"kind": "blob", "name": "0" * 64, "size": 1}),
        ("CONTROLLERS", {"records": []}),
    ],
)
def test_unknown_key_is_forbidden_everything(unpaired: Agent, frame: str, body: dict[str, Any]) -> None:
    with unpaired.session() as peer:
        peer.send(frame, body)
        expect_error(peer, "forbidden")


def test_hello_must_come_first(unpaired: Agent) -> None:
    with unpaired.peer() as peer:
        peer.send("STATUS", {})
        with pytest.raises((ClosedError, RemoteError)):
            peer.expect("OK")


def test_pairing_with_the_code(agent: Agent) -> None:
    with agent.session(agent.controller) as peer:
        reply = peer.request("PAIR", agent.pair_body(peer))
        expected = decoder.pairing_proof(agent.code, b"node", peer.handshake_hash)
        assert hmac.compare_digest(bytes.fromhex(reply["proof"]), expected)
        bodies.node_facts(reply["node"], "OK.node")
        bodies.text(reply["address"], "OK.address")
    with agent.peer(agent.controller) as peer:
        peer.send_hello(controllers_revision=1)
        hello = bodies.check_body("HELLO", json.dumps(peer.read_hello()).encode())
        assert hello["controllers_revision"] == 1
        bodies.node_facts(hello["node"], "HELLO.node")


def test_a_wrong_code_is_refused_and_the_right_one_still_works(agent: Agent) -> None:
    wrong = "AAAA-" * 7 + "AAAA"
    with agent.session() as peer:
        peer.send("PAIR", agent.pair_body(peer, wrong))
        expect_error(peer, "pairing_refused")
    with agent.session() as peer:
        body = agent.pair_body(peer)
        del body["proof"]
        peer.send("PAIR", body)
        expect_error(peer, "pairing_refused")
    with agent.session() as first, agent.session() as second:
        second.send("PAIR", agent.pair_body(first) | {"controllers": [controllers_record(second.identity)]})
        expect_error(second, "pairing_refused")
    agent.pair()


def test_a_set_without_the_sessions_key_is_refused(unpaired: Agent) -> None:
    with unpaired.session() as peer:
        body = unpaired.pair_body(peer) | {"controllers": [controllers_record(Ed25519PrivateKey.generate())]}
        peer.send("PAIR", body)
        expect_error(peer, "pairing_refused")


def test_a_paired_node_refuses_others_and_hears_the_same_pair_again(agent: Agent) -> None:
    agent.pair()
    with agent.session() as stranger:
        stranger.send("PAIR", agent.pair_body(stranger))
        expect_error(stranger, "pairing_refused")
    agent.pair()


def test_status(paired: Agent) -> None:
    with paired.session(paired.controller) as peer:
        status = peer.request("STATUS", {})
        assert status["public_key"] == paired.public_key.hex()
        assert status["controllers_revision"] == 1
        assert peer.request("STATUS", {"toward": "127.0.0.1"})["address"] == "127.0.0.1"
        assert peer.request("METRICS", {})["groups"] == []


def test_fabric(paired: Agent) -> None:
    with paired.session(paired.controller) as peer:
        assert isinstance(peer.request("FABRIC", {})["endpoints"], list)


def put(peer: IndependentPeer, kind: str, name: str, data: bytes) -> bodies.Json:
    """PUT in its two steps; the second OK."""
    first = peer.request("PUT", {"kind": kind, "name": name, "size": len(data)})
    if first.get("already"):
        return first
    peer.send("DATA", data)
    return peer.expect("OK", "PUT done")


@pytest.mark.parametrize("size", [0, 1, 65_510, 65_511, 3_000_000])
def test_put_and_get_of_a_core(paired: Agent, size: int) -> None:
    data = hashlib.shake_256(b"core").digest(size)
    with paired.session(paired.controller) as peer:
        name = f"0123456789abcdef0123456789abcdef-{size + 1}/part.safetensors"
        assert put(peer, "core", name, data) == {"bytes": size}
        assert peer.request("HAVE", {"kind": "core", "name": name, "size": size})["have"]
        (path,) = (paired.home / "cache").rglob(name)
        assert path.read_bytes() == data
        for offset, length in [(0, size), (size // 2, size - size // 2), (size, 0)]:
            assert peer.request("GET", {"path": str(path), "offset": offset, "length": length}) == {
                "length": length
            }
            assert peer.read_data(length) == data[offset : offset + length]
        assert put(peer, "core", name, data) == {"already": True}


def test_put_of_a_blob_is_checked_against_its_name(paired: Agent) -> None:
    data = b"content" * 1000
    name = hashlib.sha256(data).hexdigest() + ".safetensors"
    with paired.session(paired.controller) as peer:
        assert put(peer, "blob", name, data) == {"bytes": len(data)}
    with paired.session(paired.controller) as peer, pytest.raises(RemoteError):
        put(peer, "blob", hashlib.sha256(b"other").hexdigest() + ".safetensors", data)


@pytest.mark.parametrize(
    "body",
    [
        b'{"path":"/a","path":"/b","offset":0,"length":1}',
        b'{"path":"/a","offset":true,"length":1}',
        b'{"path":"/a","offset":-1,"length":1}',
        b'{"path":"/a","offset":9007199254740992,"length":1}',
        b'{"path":"/a","offset":0}',
        b'{"path":"/a","offset":NaN,"length":1}',
        b'{"path":"\\ud800","offset":0,"length":1}',
        b'{"path":"/a","offset":0,"length":1,"x":' + b"[" * 40 + b"]" * 40 + b"}",
        b"[]",
        b"\xff",
        b"",
    ],
)
def test_bodies_that_break_the_rules(paired: Agent, body: bytes) -> None:
    with pytest.raises(RefusedError):
        bodies.check_body("GET", body)
    with paired.session(paired.controller) as peer:
        peer.send("GET", body)
        error = expect_error(peer, "protocol")
        if b'"offset":0}' in body:
            assert "length" in error.message


def test_a_second_frame_in_one_record_is_refused(paired: Agent) -> None:
    with paired.session(paired.controller) as peer:
        frame = decoder.frame_header(decoder.TAGS["STATUS"], 2) + b"{}"
        peer.socket.sendall(peer.outgoing.seal(frame + frame))
        with pytest.raises((RemoteError, ClosedError)):
            for _ in range(2):
                peer.expect("OK", "STATUS")


def test_requests_of_too_much_are_refused(paired: Agent) -> None:
    with paired.session(paired.controller) as peer:
        peer.send("GET", {"path": "/etc/hostname", "offset": 0, "length": (256 << 20) + 1})
        expect_error(peer, "protocol")
    with paired.session(paired.controller) as peer:
        peer.socket.sendall(peer.outgoing.seal(decoder.frame_header(decoder.TAGS["STOP"], (1 << 20) + 1)))
        expect_error(peer, "protocol")


def test_controllers_bring_the_node_along(agent: Agent) -> None:
    agent.pair()
    other = Ed25519PrivateKey.generate()
    keys = [
        {"name": "one", "public_key": decoder.public_key(agent.controller).hex()},
        {"name": "two", "public_key": decoder.public_key(other).hex()},
    ]
    both = sign_record(agent.controller, {"kind": "controllers", "revision": 2, "keys": keys})
    alone = sign_record(other, {"kind": "controllers", "revision": 3, "keys": keys[1:]})
    with agent.session(agent.controller) as peer:
        peer.send("CONTROLLERS", {"records": [alone]})
        with pytest.raises(RemoteError):
            peer.expect("OK", "CONTROLLERS")
    with agent.session(agent.controller) as waiting:
        with agent.session(agent.controller) as peer:
            assert peer.request("CONTROLLERS", {"records": [both]}) == {"revision": 2}
            assert waiting.request("STATUS", {})["controllers_revision"] == 2
        with agent.session(other) as peer:
            assert peer.request("CONTROLLERS", {"records": [alone]}) == {"revision": 3}
            assert peer.request("STATUS", {})["controllers_revision"] == 3
        with pytest.raises((ClosedError, RemoteError)):
            waiting.request("STATUS", {})
    with agent.session(agent.controller) as peer:
        peer.send("STATUS", {})
        expect_error(peer, "forbidden")


def test_an_address_holds_at_most_16_unfinished_handshakes(agent: Agent) -> None:
    held = [socket.create_connection(("127.0.0.1", agent.port), timeout=20) for _ in range(20)]
    try:
        for connection in held:
            connection.sendall(decoder.MAGIC)
        with agent.session():
            pass
        for connection in held[:4]:
            expect_closed(connection)
        assert sum(map(is_open, held)) <= 16
    finally:
        for connection in held:
            connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on every 127.x.y.z address")
def test_at_most_64_unfinished_handshakes_and_the_oldest_go(agent: Agent) -> None:
    held = []
    try:
        for host in range(2, 7):
            for _ in range(15):
                held.append(
                    socket.create_connection(
                        ("127.0.0.1", agent.port), 20, source_address=(f"127.0.0.{host}", 0)
                    )
                )
                held[-1].sendall(decoder.MAGIC)
        with agent.session():
            pass
        for connection in held[: len(held) - 64]:
            expect_closed(connection)
        assert 60 <= sum(map(is_open, held)) <= 64
    finally:
        for connection in held:
            connection.close()


def test_the_log_says_why_pairing_was_refused(agent: Agent) -> None:
    identity = Ed25519PrivateKey.generate()
    another = [controllers_record(Ed25519PrivateKey.generate())]
    with agent.session(identity) as peer:
        peer.send("PAIR", agent.pair_body(peer, "AAAA-" * 7 + "AAAA"))
        expect_error(peer, "pairing_refused")
    with agent.session(identity) as peer:
        peer.send("PAIR", agent.pair_body(peer) | {"controllers": another})
        expect_error(peer, "pairing_refused")
    deadline = time.monotonic() + 60
    while len(reasons := [line[24:] for line in agent.log if "refused to pair with" in line]) < 2:
        assert time.monotonic() < deadline, agent.log
        time.sleep(0.05)
    assert len(set(reasons)) == len(reasons)


def test_a_core_of_several_files(paired: Agent, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    primary = build_core(tmp_path / "made", packed=True)
    core = bodies.read_primary(primary)
    entry = f"{core.index['export']}-{primary.stat().st_size}"
    with paired.session(paired.controller) as peer:
        for path in ("a.safetensors", "model/a.gguf"):
            data = (tmp_path / "made" / path).read_bytes()
            assert put(peer, "core", f"{entry}/{path}", data) == {"bytes": len(data)}
        (stored,) = (paired.home / "cache").rglob(f"{entry}/a.safetensors")
        assert bodies.verify_files(stored) == core
        found = peer.request("STAT", {"path": str(stored)})
        companion = {"name": "model/a.gguf", "size": core.index["files"][1]["size"]}
        assert found["companions"] == [companion]
        assert found["size"] == primary.stat().st_size
