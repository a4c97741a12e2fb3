"""Signed records: exact bytes, verified before they are parsed, of one kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.errors import ForbiddenError, LocalProtocolError, RemoteProtocolError
from flare.identity import Identity
from flare.trust.signed import MAX_BODY, SignedRecord, open_record, sign, verify_signature

ALICE = Identity.from_seed(bytes([1] * 32))
EVE = Identity.from_seed(bytes([3] * 32))
BODY = {"kind": "note", "text": "é"}


def test_a_body_is_signed_as_canonical_text() -> None:
    record = sign(ALICE, BODY)
    assert record.body == '{"kind":"note","text":"\\u00e9"}'
    assert record.signer == ALICE.public_key
    verify_signature(record)
    reader = open_record(record, "note", "the note")
    assert reader.text("text") == "é"
    reader.finish()


def test_json_round_trip() -> None:
    record = sign(ALICE, BODY)
    assert SignedRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("name", ["body", "signer", "signature"])
def test_a_missing_member_is_named(name: str) -> None:
    value: dict[str, object] = {key: item for key, item in sign(ALICE, BODY).to_json().items() if key != name}
    with pytest.raises(RemoteProtocolError, match=f'grant: "{name}" is missing'):
        SignedRecord.from_json(value, "grant")


def test_the_exact_bytes_count() -> None:
    """The same values, written with a space, are another body."""
    record = sign(ALICE, BODY)
    with pytest.raises(ForbiddenError, match="does not match"):
        verify_signature(replace(record, body=record.body.replace(",", ", ")))


def test_another_signer() -> None:
    with pytest.raises(ForbiddenError, match="does not match"):
        verify_signature(replace(sign(ALICE, BODY), signer=EVE.public_key))


def test_a_signer_whose_key_is_not_sound() -> None:
    """Under a key of small order, a signature of zeros verifies for some messages."""
    with pytest.raises(ForbiddenError, match="does not match"):
        verify_signature(SignedRecord('{"kind":"note"}', b"\x01" + bytes(31), b"\x01" + bytes(63)))


def test_a_body_that_is_no_utf8() -> None:
    with pytest.raises(ForbiddenError, match="does not match"):
        verify_signature(SignedRecord("\ud800", ALICE.public_key, bytes(64)))


def test_verified_before_it_is_parsed() -> None:
    with pytest.raises(ForbiddenError, match="does not match"):
        open_record(SignedRecord("not JSON", ALICE.public_key, bytes(64)), "note", "the note")


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32])
def test_keys_that_are_not_sound_are_refused_by_the_reader(key: bytes) -> None:
    value = sign(ALICE, BODY).to_json() | {"signer": key.hex()}
    with pytest.raises(RemoteProtocolError, match='"signer" is not a sound Ed25519 key'):
        SignedRecord.from_json(value)


def raw(body: str) -> SignedRecord:
    return SignedRecord(body, ALICE.public_key, ALICE.sign(body.encode()))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("not JSON", "the note is not JSON"),
        ('{"kind":"note","kind":"note"}', 'the note has the key "kind" twice'),
        ("{}", 'the note: "kind" is missing'),
        ('{"kind":"note","x":1}', 'the note has the unknown member "x"'),
    ],
)
def test_strict_bodies(body: str, sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        open_record(raw(body), "note", "the note").finish()


def test_one_kind_is_never_taken_for_another() -> None:
    with pytest.raises(ForbiddenError, match='kind "note" was sent where one of kind "grant" belongs'):
        open_record(sign(ALICE, BODY), "grant", "the grant")


def test_bodies_of_ours_that_nobody_would_read() -> None:
    with pytest.raises(LocalProtocolError, match='needs a "kind"'):
        sign(ALICE, {"text": "x"})
    with pytest.raises(LocalProtocolError, match="larger than the"):
        sign(ALICE, {"kind": "note", "text": "x" * MAX_BODY})


@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    record = sign(ALICE, BODY)
    field = data.draw(st.sampled_from(["signer", "signature", "body"]))
    value = getattr(record, field)
    old = bytearray(value.encode() if isinstance(value, str) else value)
    position = data.draw(st.integers(0, len(old) - 1))
    old[position] ^= data.draw(st.integers(1, 127))
    new = bytes(old).decode("latin-1") if field == "body" else bytes(old)
    with pytest.raises(ForbiddenError):
        verify_signature(replace(record, **{field: new}))
