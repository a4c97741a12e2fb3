"""Join codes: what people type, the proofs, and the node's file."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.errors import ConfigError, UsageError
from flare.trust.join_code import (
    JoinCodeFile,
    controller_proof,
    decode,
    format_code,
    generate,
    hmac_key,
    node_proof,
    proof_matches,
)

CODE = bytes(range(20))
TEXT = "AAAQ-EAYE-AUDA-OCAJ-BIFQ-YDIO-B4IB-CEQT"
ALICE, BOB = bytes([1] * 32), bytes([2] * 32)
NOW = 1_792_420_200


def test_a_code_is_eight_groups_of_four() -> None:
    code = generate()
    assert [len(group) for group in code.split("-")] == [4] * 8
    assert len(decode(code)) == 20
    assert generate() != code


@pytest.mark.parametrize(
    "text", [TEXT, TEXT.lower(), TEXT.replace("-", ""), TEXT.replace("-", " "), f" {TEXT}\n", "-" + TEXT]
)
def test_case_dashes_and_spaces_do_not_matter(text: str) -> None:
    assert decode(text) == CODE


@pytest.mark.parametrize(
    "text", ["", "AAAA", TEXT[:-1], TEXT + "A", TEXT + "-AAAA-AAAA", "1" * 32, "é" * 32, "=" * 32, TEXT + "="]
)
def test_what_is_no_code(text: str) -> None:
    with pytest.raises(UsageError, match="no join code: it has eight groups of four"):
        decode(text)


@given(st.binary(min_size=20, max_size=20))
def test_round_trip(code: bytes) -> None:
    assert decode(format_code(code)) == code


def test_the_proofs_are_the_pages() -> None:
    key, channel = hmac_key(CODE), bytes([9] * 32)
    assert key == hashlib.sha256(CODE).digest()
    assert controller_proof(key, channel) == hmac.new(key, b"controller" + channel, hashlib.sha256).digest()
    assert node_proof(key, channel) == hmac.new(key, b"node" + channel, hashlib.sha256).digest()


def test_comparing_proofs() -> None:
    assert proof_matches(b"x" * 32, b"x" * 32)
    assert not proof_matches(b"y" * 32, b"x" * 32)
    assert not proof_matches(None, b"x" * 32)


def test_a_fresh_code_is_good_for_a_day() -> None:
    file = JoinCodeFile.of(CODE, NOW)
    assert file.accepts(ALICE, NOW)
    assert file.accepts(ALICE, NOW + 86_399)
    assert not file.accepts(ALICE, NOW + 86_400)


def test_a_used_code_is_good_for_the_same_key_for_ten_minutes() -> None:
    file = JoinCodeFile.of(CODE, NOW).used(ALICE, NOW + 100)
    assert file.accepts(ALICE, NOW + 100)
    assert file.accepts(ALICE, NOW + 699)
    assert not file.accepts(ALICE, NOW + 700)
    assert not file.accepts(BOB, NOW + 101)
    assert not file.accepts(ALICE, NOW - 10_000)  # the clock was set back


@pytest.mark.parametrize("file", [JoinCodeFile.of(CODE, NOW), JoinCodeFile.of(CODE, NOW).used(ALICE, NOW)])
def test_the_file(file: JoinCodeFile) -> None:
    assert JoinCodeFile.from_text(file.to_text()) == file
    assert TEXT not in file.to_text()
    assert CODE.hex() not in file.to_text()
    assert file.key.hex() not in repr(file)
    assert repr(file.key) not in repr(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "join-code file is not JSON"),
        ('{"key":"00","expires":1}', '"key" is not 64 lower-case hex digits'),
        ('{"key":"' + "00" * 32 + '"}', '"expires" is missing'),
        ('{"key":"' + "00" * 32 + '","expires":1,"x":1}', 'unknown member "x"'),
        ('{"key":"' + "00" * 32 + '","expires":1,"used_at":1}', '"used_by" and "used_at" belong together'),
        (" " * 5000, "at most 4096"),
    ],
)
def test_a_damaged_file(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        JoinCodeFile.from_text(text)
