from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.errors import RemoteProtocolError
from flare.rank.proof import (
    PEER_HELLO_LENGTH,
    ZERO_HELLO_LENGTH,
    PeerHello,
    Purpose,
    parse_peer_hello,
    parse_zero_hello,
    peer_hello,
    peer_proof,
    record_ciphers,
    same,
    transcript,
    zero_hello,
    zero_proof,
)

KEY = bytes(range(32))
PEER_NONCE = b"\xaa" * 32
ZERO_NONCE = b"\xbb" * 32


def test_the_bytes_are_the_documented_ones() -> None:
    # Written out from the page alone, not from the code.
    peer = b"FLARERNK" + bytes([1, 2]) + (5).to_bytes(2, "big") + PEER_NONCE
    zero = (7).to_bytes(2, "big") + ZERO_NONCE
    digest = hashlib.sha256(peer + zero).digest()
    assert peer_hello(Purpose.ENGINE, 5, PEER_NONCE) == peer
    assert zero_hello(7, ZERO_NONCE) == zero
    assert transcript(peer, zero) == digest
    assert peer_proof(KEY, digest) == hmac.new(KEY, b"peer\x00" + digest, "sha256").digest()
    assert zero_proof(KEY, digest) == hmac.new(KEY, b"zero\x00" + digest, "sha256").digest()
    assert (len(peer), len(zero)) == (PEER_HELLO_LENGTH, ZERO_HELLO_LENGTH)
    assert parse_peer_hello(peer) == PeerHello(Purpose.ENGINE, 5)
    assert parse_zero_hello(zero) == 7


def test_the_record_keys_are_the_documented_ones() -> None:
    digest = hashlib.sha256(b"transcript").digest()

    def hkdf(info: bytes) -> bytes:  # RFC 5869 with one block of output
        secret = hmac.new(digest, KEY, "sha256").digest()
        return hmac.new(secret, info + b"\x01", "sha256").digest()

    to_zero, to_peer = record_ciphers(KEY, digest)
    assert to_zero.key == hkdf(b"flare rank peer to zero")
    assert to_peer.key == hkdf(b"flare rank zero to peer")


def test_a_proof_of_one_side_is_none_of_the_other() -> None:
    digest = b"d" * 32
    assert not same(peer_proof(KEY, digest), zero_proof(KEY, digest))
    assert not same(peer_proof(KEY, digest), peer_proof(KEY, b"e" * 32))
    assert not same(peer_proof(KEY, digest), peer_proof(b"x" * 32, digest))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HT" + bytes(36), "does not speak"),
        (struct.pack(">8sBBH32s", b"FLARERNK", 9, 0, 1, b""), "version 9"),
        (struct.pack(">8sBBH32s", b"FLARERNK", 1, 3, 1, b""), "unknown purpose 3"),
    ],
)
def test_what_is_no_hello_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        parse_peer_hello(data)


@pytest.mark.parametrize("ranks", [0, 1, 1025])
def test_a_group_of_an_impossible_size_is_refused(ranks: int) -> None:
    with pytest.raises(RemoteProtocolError, match="ranks"):
        parse_zero_hello(zero_hello(ranks, ZERO_NONCE))


@given(st.binary(min_size=PEER_HELLO_LENGTH, max_size=PEER_HELLO_LENGTH))
def test_any_bytes_parse_or_are_the_peers_fault(data: bytes) -> None:
    try:
        parse_peer_hello(data)
    except RemoteProtocolError:
        return
