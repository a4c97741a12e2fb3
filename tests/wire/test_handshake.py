"""The handshake: both roles without sockets, every refusal, and any input whatever."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import LocalProtocolError, RemoteProtocolError
from flare.identity import Identity
from flare.wire.handshake import (
    MESSAGE_1,
    MESSAGE_2,
    MESSAGE_3,
    Initiator,
    NotAnAgentError,
    OwnKeyError,
    Responder,
    UnexpectedPeerError,
)
from flare_workers.cipher import RecordCipher

ALICE = Identity.from_seed(bytes([1] * 32))
BOB = Identity.from_seed(bytes([2] * 32))
EVE = Identity.from_seed(bytes([3] * 32))

Roles = tuple[Initiator, Responder]


def roles(**initiator: object) -> Roles:
    return (
        Initiator(ALICE.sign, ALICE.public_key, **initiator),  # type: ignore[arg-type]
        Responder(BOB.sign, BOB.public_key),
    )


def finish(initiator: Initiator, responder: Responder) -> None:
    responder.receive(initiator.to_send())
    initiator.receive(responder.to_send())
    responder.receive(initiator.to_send())


def test_both_sides_agree() -> None:
    initiator, responder = roles(expected_peer=BOB.public_key)
    assert (initiator.finished, responder.finished) == (False, False)
    finish(initiator, responder)
    assert (initiator.finished, responder.finished) == (True, True)
    assert initiator.peer_public_key == BOB.public_key
    assert responder.peer_public_key == ALICE.public_key
    assert initiator.handshake_hash == responder.handshake_hash
    assert (initiator.peer_version, responder.peer_version) == (None, 7)
    for sender, receiver in ((initiator, responder), (responder, initiator)):
        record = sender.ciphers()[0].seal(b"after the handshake")
        assert receiver.ciphers()[1].open(record[2:]) == b"after the handshake"
        assert sender.ciphers()[0].counter == 2


def test_byte_by_byte() -> None:
    initiator, responder = roles()
    for sender, receiver, length in (
        (initiator, responder, MESSAGE_1),
        (responder, initiator, MESSAGE_2),
        (initiator, responder, MESSAGE_3),
    ):
        message = sender.to_send()
        assert len(message) == length
        for byte in message:
            assert receiver.to_send() == b""
            receiver.receive(bytes((byte,)))
    assert initiator.finished
    assert responder.finished


def test_what_follows_the_handshake_is_kept() -> None:
    initiator, responder = roles()
    responder.receive(initiator.to_send())
    initiator.receive(responder.to_send() + b"early")
    responder.receive(initiator.to_send() + b"first ")
    responder.receive(b"frame")
    assert initiator.leftover() == b"early"
    assert responder.leftover() == b"first frame"
    assert responder.leftover() == b""


def test_another_version_completes_the_handshake() -> None:
    initiator, responder = roles(version=8)
    finish(initiator, responder)
    assert responder.finished
    assert responder.peer_version == 8


def test_nothing_is_told_before_the_end() -> None:
    initiator, responder = roles()
    for role in (initiator, responder):
        for ask in ("peer_public_key", "handshake_hash"):
            with pytest.raises(LocalProtocolError, match="not finished"):
                getattr(role, ask)
        for method in (role.ciphers, role.leftover):
            with pytest.raises(LocalProtocolError, match="not finished"):
                method()


# Refusals


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-OpenSSH\r\n", b"FLAREFLX", b"\x16\x03\x01"]
)
def test_a_wrong_magic(start: bytes) -> None:
    _, responder = roles()
    with pytest.raises(NotAnAgentError, match="first bytes"):
        responder.receive(start)
    assert responder.to_send() == b""


def test_something_that_is_no_agent() -> None:
    initiator, _ = roles()
    with pytest.raises(NotAnAgentError, match="does not speak this handshake"):
        initiator.receive(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def test_a_proof_under_other_keys() -> None:
    initiator, _ = roles()
    with pytest.raises(NotAnAgentError, match="does not open"):
        initiator.receive(bytes([9] * 32) + (112).to_bytes(2, "big") + bytes(112))


def test_a_changed_proof() -> None:
    for position in (0, 31, 34, 80, MESSAGE_2 - 1):
        initiator, responder = roles()
        responder.receive(initiator.to_send())
        message = bytearray(responder.to_send())
        message[position] ^= 1
        with pytest.raises(RemoteProtocolError):
            initiator.receive(message)
        assert initiator.to_send() == b""  # message 3 would have told who we are


def test_another_key_than_expected() -> None:
    initiator, responder = roles(expected_peer=EVE.public_key)
    responder.receive(initiator.to_send())
    with pytest.raises(UnexpectedPeerError, match="another key") as caught:
        initiator.receive(responder.to_send())
    assert caught.value.found == BOB.public_key
    assert initiator.to_send() == b""


def test_our_own_key_as_responder() -> None:
    initiator = Initiator(ALICE.sign, ALICE.public_key)
    responder = Responder(ALICE.sign, ALICE.public_key)
    responder.receive(initiator.to_send())
    with pytest.raises(OwnKeyError, match="own key"):
        initiator.receive(responder.to_send())


class _Forger:
    """A responder that may send any proof under the right keys."""

    def __init__(self, initiator: Initiator) -> None:
        message_1 = initiator.to_send()
        own = X25519PrivateKey.from_private_bytes(bytes([7] * 32))
        self.ephemeral = own.public_key().public_bytes_raw()
        shared = own.exchange(X25519PublicKey.from_public_bytes(message_1[10:]))
        self.transcript = message_1 + self.ephemeral
        salt = hashlib.sha256(self.transcript).digest()
        info = b"flare orbit responder to initiator"
        self.cipher = RecordCipher(HKDF(SHA256(), 32, salt, info).derive(shared))

    def message_2(self, public_key: bytes, signature: bytes) -> bytes:
        return self.ephemeral + self.cipher.seal(public_key + signature)


def test_a_forger_that_is_right_passes() -> None:
    initiator, _ = roles()
    forger = _Forger(initiator)
    signed = b"flare orbit responder\x00" + hashlib.sha256(forger.transcript).digest()
    initiator.receive(forger.message_2(BOB.public_key, BOB.sign(signed)))
    assert initiator.finished


@pytest.mark.parametrize("prefix", [b"flare orbit initiator\x00", b"flare orbit responder", b""])
def test_a_signature_for_another_role(prefix: bytes) -> None:
    initiator, _ = roles()
    forger = _Forger(initiator)
    signature = BOB.sign(prefix + hashlib.sha256(forger.transcript).digest())
    with pytest.raises(RemoteProtocolError, match="signature is wrong"):
        initiator.receive(forger.message_2(BOB.public_key, signature))


@pytest.mark.parametrize(
    "key", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32, (2**255 - 19).to_bytes(32, "little")]
)
def test_keys_that_are_not_sound(key: bytes) -> None:
    initiator, _ = roles()
    forger = _Forger(initiator)
    with pytest.raises(RemoteProtocolError, match="not a sound Ed25519 key"):
        initiator.receive(forger.message_2(key, bytes(64)))


@pytest.mark.parametrize(
    "ephemeral", [bytes(32), b"\x01" + bytes(31), (2**255 - 19 - 1).to_bytes(32, "little")]
)
def test_ephemeral_keys_that_give_no_secret(ephemeral: bytes) -> None:
    initiator, responder = roles()
    with pytest.raises(RemoteProtocolError, match="gives no secret"):
        responder.receive(b"FLAREFLT" + (7).to_bytes(2, "big") + ephemeral)
    with pytest.raises(RemoteProtocolError, match="gives no secret"):
        initiator.receive(ephemeral + (112).to_bytes(2, "big") + bytes(112))


def test_a_relay_cannot_pass_a_proof_on() -> None:
    """Eve relays Alice's proof to Bob over a handshake of her own: it is bound to the other transcript."""
    alice, eve_as_bob = Initiator(ALICE.sign, ALICE.public_key), Responder(EVE.sign, EVE.public_key)
    finish(alice, eve_as_bob)
    eve, bob = Initiator(EVE.sign, ALICE.public_key), Responder(BOB.sign, BOB.public_key)
    bob.receive(eve.to_send())
    eve.receive(bob.to_send())
    with pytest.raises(RemoteProtocolError, match="signature is wrong"):
        bob.receive(eve.to_send())


def test_a_failure_sticks() -> None:
    _, responder = roles()
    with pytest.raises(NotAnAgentError):
        responder.receive(b"x")
    with pytest.raises(NotAnAgentError):
        responder.receive(b"FLAREFLT")
    with pytest.raises(LocalProtocolError):
        responder.ciphers()


# Any input whatever

CHUNKS = st.lists(
    st.one_of(
        st.binary(max_size=160),
        st.just(b"FLAREFLT\x00\x07"),
        st.binary(min_size=32, max_size=32),
        st.just(b"\x00\x70" + bytes(112)),
        st.just("peer"),
    ),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), CHUNKS)
def test_any_input_in_any_state(initiating: bool, chunks: list[bytes | str]) -> None:
    """A legal transition, or a RemoteProtocolError that sticks; "peer" is what a true peer says next."""
    initiator, responder = roles()
    role, peer = (initiator, responder) if initiating else (responder, initiator)
    failed = False
    for chunk in chunks:
        finished = role.finished
        try:
            if chunk == "peer":
                with contextlib.suppress(RemoteProtocolError):  # the peer may have failed by what we sent
                    peer.receive(role.to_send())
                role.receive(peer.to_send())
            else:
                assert isinstance(chunk, bytes)
                role.receive(chunk)
            assert not failed
        except RemoteProtocolError:
            assert not finished
            failed = True
            assert role.to_send() == b""
        assert not (failed and role.finished)
