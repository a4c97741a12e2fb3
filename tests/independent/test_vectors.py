"""The golden vectors under the second reading of the page: both authors must have understood one thing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from . import bodies, decoder
from .decoder import Direction, FrameSplitter, Handshake, RefusedError

VECTORS = Path(__file__).parents[1] / "vectors"


def load(name: str) -> Any:
    """One file of vectors."""
    return json.loads((VECTORS / name).read_bytes())


def named(items: list[dict[str, Any]], *names: str) -> list[Any]:
    """Vectors as test parameters, with the named members as their id."""
    return [
        pytest.param(item, id="-".join([str(at), *(str(item[name]) for name in names if name in item)]))
        for at, item in enumerate(items)
    ]


def unhex(vector: dict[str, Any], name: str) -> bytes:
    """A member that is hex, which must be lower case."""
    text = vector[name]
    assert text == text.lower()
    return bytes.fromhex(text)


def body_bytes(vector: dict[str, Any]) -> bytes:
    """A frame's body: hex for DATA, else its text."""
    is_data = vector.get("name", vector.get("frame")) == "DATA"
    return bytes.fromhex(vector["body"]) if is_data else vector["body"].encode()


def read_handshake(side: str = "initiator") -> Handshake:
    """The recorded handshake, verified with one side's ephemeral key."""
    vector = load("handshake.json")
    ephemeral = X25519PrivateKey.from_private_bytes(unhex(vector, f"{side}_ephemeral_private"))
    one, two, three = (unhex(vector, f"message{number}") for number in (1, 2, 3))
    return decoder.read_handshake(one, two, three, ephemeral)


@pytest.mark.parametrize("side", ["initiator", "responder"])
def test_handshake(side: str) -> None:
    vector = load("handshake.json")
    handshake = read_handshake(side)
    assert handshake.version == decoder.VERSION
    assert handshake.hash == unhex(vector, "handshake_hash")
    assert handshake.initiator_to_responder == Direction(unhex(vector, "initiator_to_responder_key"), 1)
    assert handshake.responder_to_initiator == Direction(unhex(vector, "responder_to_initiator_key"), 1)
    for role, key in (("initiator", handshake.initiator), ("responder", handshake.responder)):
        private = Ed25519PrivateKey.from_private_bytes(unhex(vector, f"{role}_identity_private"))
        assert key == decoder.public_key(private)


def test_handshake_is_written_alike() -> None:
    vector = load("handshake.json")
    ephemerals = [
        X25519PrivateKey.from_private_bytes(unhex(vector, f"{role}_ephemeral_private"))
        for role in ("initiator", "responder")
    ]
    identities = [
        Ed25519PrivateKey.from_private_bytes(unhex(vector, f"{role}_identity_private"))
        for role in ("initiator", "responder")
    ]
    one = decoder.message_1(ephemerals[0])
    public = ephemerals[1].public_key().public_bytes_raw()
    salt = decoder.sha256(one, public)
    forward, backward = decoder.directions(decoder.agree(ephemerals[0], public), salt)
    two = public + decoder.seal_identity(backward, b"responder", salt, identities[1])
    three = decoder.seal_identity(forward, b"initiator", decoder.sha256(one, two), identities[0])
    assert [one, two, three] == [unhex(vector, f"message{number}") for number in (1, 2, 3)]


@pytest.mark.parametrize("vector", named(load("records.json"), "counter"))
def test_records(vector: dict[str, Any]) -> None:
    key, counter = unhex(vector, "key"), vector["counter"]
    record, plaintext = unhex(vector, "record"), unhex(vector, "plaintext")
    assert Direction(key, counter).open(record) == plaintext
    assert Direction(key, counter).seal(plaintext) == record


@pytest.mark.parametrize("vector", named(load("frames.json"), "name", "answers"))
def test_frames(vector: dict[str, Any]) -> None:
    encoded, body = unhex(vector, "encoded"), body_bytes(vector)
    frame = FrameSplitter().feed(encoded)
    assert frame is not None
    assert (frame.tag, frame.name, frame.body) == (vector["tag"], vector["name"], body)
    if frame.name == "DATA":
        return
    value = json.loads(body)
    if frame.name == "HELLO" and "controllers_revision" not in value:
        bodies.HELLO_TO_STRANGERS(bodies.strict_json(body), "HELLO")
        return
    bodies.check_body(frame.name, body, vector.get("answers"))
    for record in value["controllers"] if frame.name == "PAIR" else value.get("records", []):
        bodies.verify_signed(record, "controllers")
    if "grant" in value:
        bodies.verify_signed(value["grant"], "run_grant" if frame.name == "RUN" else "transfer_grant")


def test_every_frame_has_a_vector() -> None:
    vectors = load("frames.json")
    assert {vector["name"] for vector in vectors} == set(decoder.FRAME_NAMES)
    answered = {vector["answers"] for vector in vectors if "answers" in vector}
    asked = {"STOP", "REMOVE", "ATTACH", *bodies.OKS}
    assert answered <= asked


def test_stream() -> None:
    vector = load("stream.json")
    handshake = read_handshake()
    sides = {"initiator": handshake.initiator_to_responder, "responder": handshake.responder_to_initiator}
    request: str | None = None
    length: int | None = None
    for step in vector["exchange"]:
        splitter = FrameSplitter()
        records = list(decoder.split_records(unhex(step, "bytes")))
        frames = [splitter.feed(sides[step["from"]].open(record)) for record in records]
        assert frames[:-1] == [None] * (len(records) - 1)
        frame = frames[-1]
        assert frame is not None
        assert (frame.name, frame.body) == (step["frame"], body_bytes(step))
        if frame.name == "DATA":
            assert len(frame.body) == length
            continue
        value = bodies.check_body(frame.name, frame.body, request)
        length = value.get("length")
        if frame.name == "HELLO":
            own = handshake.initiator if step["from"] == "initiator" else handshake.responder
            assert value["public_key"] == own.hex()
        elif frame.name != "OK":
            request = frame.name
    for side in sides:
        sent = b"".join(unhex(step, "bytes") for step in vector["exchange"] if step["from"] == side)
        assert sent == unhex(vector, f"{side}_sends")


def test_stream_does_not_open_in_another_order() -> None:
    sent = unhex(load("stream.json"), "initiator_sends")
    records = list(decoder.split_records(sent))
    with pytest.raises(RefusedError, match="does not open"):
        read_handshake().initiator_to_responder.open(records[1])


@pytest.mark.parametrize("vector", named(load("signed.json"), "kind"))
def test_signed_records(vector: dict[str, Any]) -> None:
    record, kind = vector["record"], vector["kind"]
    bodies.verify_signed(record, kind)
    private = Ed25519PrivateKey.from_private_bytes(unhex(vector, "signer_private"))
    assert record["signer"] == decoder.public_key(private).hex()
    assert record["signature"] == private.sign(record["body"].encode()).hex()
    with pytest.raises(RefusedError, match="signature"):
        bodies.verify_signed(record | {"body": record["body"] + " "}, kind)
    for other in {"controllers", "transfer_grant", "run_grant"} - {kind}:
        with pytest.raises(RefusedError, match="kind"):
            bodies.verify_signed(record, other)


def test_signed_controller_sets_are_one_chain() -> None:
    chain = [vector["record"] for vector in load("signed.json") if vector["kind"] == "controllers"]
    assert len(bodies.verify_controllers(chain)) == 2


def test_grants_say_what_the_page_adds() -> None:
    for vector in load("signed.json"):
        if vector["kind"] == "controllers":
            continue
        grant = bodies.verify_signed(vector["record"], vector["kind"])
        assert 0 < grant["expires"] - grant["issued"] <= 600
        bodies.hexed(32)(grant["package"]["index_sha256"], "index_sha256")
        bodies.hexed(32)(grant["package"]["publisher"], "publisher")
        assert ("launch_key_sha256" in grant) == (vector["kind"] == "run_grant")
        keys = [member["public_key"] for member in grant["members"]]
        assert len(set(keys)) == len(keys)


def test_run_carries_the_key_that_its_grant_names() -> None:
    (run,) = (json.loads(vector["body"]) for vector in load("frames.json") if vector["name"] == "RUN")
    named_digest = json.loads(run["grant"]["body"])["launch_key_sha256"]
    assert hashlib.sha256(bytes.fromhex(run["launch_key"])).hexdigest() == named_digest


def write_contents(folder: Path) -> None:
    """The companions of the core's vector."""
    for path, content in load("core_index.json")["contents"].items():
        pattern, length = unhex(content, "repeat"), content["length"]
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes((pattern * (length // len(pattern) + 1))[:length])


def test_core(tmp_path: Path) -> None:
    vector = load("core_index.json")
    primary = tmp_path / "core.safetensors"
    primary.write_bytes(unhex(vector, "primary"))
    write_contents(tmp_path)
    core = bodies.verify_files(primary)
    assert core.index == json.loads(vector["index"])
    assert (core.index["export"], core.index_sha256) == (vector["export"], vector["index_sha256"])
    assert (core.publisher, core.table) == (vector["publisher"], unhex(vector, "digest_table"))
    assert hashlib.sha256(bytes.fromhex(core.publisher)).hexdigest() == vector["fingerprint"]
    private = Ed25519PrivateKey.from_private_bytes(unhex(vector, "publisher_seed"))
    assert decoder.public_key(private).hex() == vector["publisher"]
    signature = private.sign(b"flare core index\0" + vector["index"].encode())
    assert signature.hex() == vector["signature"]


@pytest.mark.parametrize("vector", named(load("core_index.json")["refused"], "what"))
def test_cores_that_are_refused(tmp_path: Path, vector: dict[str, Any]) -> None:
    primary = tmp_path / "core.safetensors"
    primary.write_bytes(unhex(vector, "primary"))
    reason = "signature" if vector["code"] == "untrusted" else "export|twice|file ends|digest table"
    with pytest.raises(RefusedError, match=reason):
        bodies.read_primary(primary)
