"""The handshake: three messages that give both sides each other's key and two record keys. Sans-I/O.

| role | state | on | next state |
|---|---|---|---|
| initiator | wants message 2 (message 1 waits in `to_send`) | 146 bytes | finished (message 3 waits) |
| responder | wants message 1 | 42 bytes | wants message 3 (message 2 waits) |
| responder | wants message 3 | 114 bytes | finished |
| both | any but finished | anything else | failed: nothing more is sent |
| both | finished | bytes | finished: they belong to the first frame (`leftover`) |
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import NoReturn

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flare.errors import IdentityError, LocalProtocolError, RemoteProtocolError
from flare.identity import PUBLIC_KEY_LENGTH, SIGNATURE_LENGTH, check_public_key, verify
from flare_workers.cipher import CipherError, RecordCipher

PROTOCOL_VERSION = 7
MAGIC = b"FLAREFLT"

_KEY = 32  # an X25519 key, and a record key
_HELLO_1 = len(MAGIC) + 2
_PROOF_PLAINTEXT = PUBLIC_KEY_LENGTH + SIGNATURE_LENGTH
_PROOF_CIPHERTEXT = _PROOF_PLAINTEXT + 16  # 112 bytes: with the AEAD's tag
_PROOF_RECORD = 2 + _PROOF_CIPHERTEXT

MESSAGE_1 = _HELLO_1 + _KEY
MESSAGE_2 = _KEY + _PROOF_RECORD
MESSAGE_3 = _PROOF_RECORD

_INFO_INITIATOR = b"flare orbit initiator to responder"
_INFO_RESPONDER = b"flare orbit responder to initiator"
_SIGNED_INITIATOR = b"flare orbit initiator\x00"
_SIGNED_RESPONDER = b"flare orbit responder\x00"


class NotAnAgentError(RemoteProtocolError):
    """What came is no handshake of this protocol at all."""


class OwnKeyError(RemoteProtocolError):
    """The peer has our own key: we are talking to ourselves, or the key file was copied."""


class UnexpectedPeerError(RemoteProtocolError):
    """The peer proved another key than the one that was expected.

    Attributes:
        found: the key it proved.
    """

    def __init__(self, message: str, found: bytes) -> None:
        super().__init__(message)
        self.found = found


class _Handshake:
    """What both roles share: the transcript, the ephemeral key, the failure that sticks."""

    def __init__(
        self,
        identity_sign: Callable[[bytes], bytes],
        public_key: bytes,
        *,
        version: int = PROTOCOL_VERSION,
        ephemeral: bytes | None = None,
    ) -> None:
        self._sign = identity_sign
        self._public_key = public_key
        self._version = version
        self._ephemeral: X25519PrivateKey | None = (
            X25519PrivateKey.generate()
            if ephemeral is None
            else X25519PrivateKey.from_private_bytes(ephemeral)
        )
        self._ephemeral_public = self._ephemeral.public_key().public_bytes_raw()
        self._transcript = b""  # the messages so far, as they were sent
        self._received = bytearray()
        self._out = bytearray()
        self._to_initiator: RecordCipher | None = None
        self._to_responder: RecordCipher | None = None
        self._peer_public_key: bytes | None = None
        self._failure: RemoteProtocolError | None = None
        self._finished = False

    @property
    def finished(self) -> bool:
        """True when both sides have proved their keys; `ciphers` and `peer_public_key` may be asked."""
        return self._finished

    @property
    def peer_public_key(self) -> bytes:
        """The peer's Ed25519 public key, proved.

        Raises:
            LocalProtocolError: the handshake is not finished.
        """
        self._require_finished()
        assert self._peer_public_key is not None
        return self._peer_public_key

    @property
    def peer_version(self) -> int | None:
        """The protocol version that message 1 named; None at an initiator, which learns it by HELLO."""
        return None

    @property
    def handshake_hash(self) -> bytes:
        """SHA-256 of all three messages: what pairing proofs are bound to."""
        self._require_finished()
        return hashlib.sha256(self._transcript).digest()

    def to_send(self) -> bytes:
        """Return what must be sent now, once."""
        out, self._out = bytes(self._out), bytearray()
        return out

    def leftover(self) -> bytes:
        """Return what came after the handshake's last byte, once: the first frame's records."""
        self._require_finished()
        rest, self._received = bytes(self._received), bytearray()
        return rest

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Take received bytes.

        Raises:
            RemoteProtocolError: the peer broke the handshake; close without a reply.
        """
        if self._failure is not None:
            raise self._failure
        self._received += data
        if not self._finished:
            self._advance()

    def _advance(self) -> None:
        raise NotImplementedError

    def _require_finished(self) -> None:
        if not self._finished:
            raise LocalProtocolError("The handshake is not finished yet.")

    def _take(self, length: int) -> bytes | None:
        if len(self._received) < length:
            return None
        message = bytes(self._received[:length])
        del self._received[:length]
        return message

    def _derive(self, peer_ephemeral: bytes, hello: bytes) -> None:
        """Make both record keys; `hello` is message 1 and the responder's ephemeral key."""
        assert self._ephemeral is not None
        try:
            shared = self._ephemeral.exchange(X25519PublicKey.from_public_bytes(peer_ephemeral))
        except ValueError:  # all zero: the peer's key is a point of small order
            self._fail("The peer's ephemeral key gives no secret.")
        self._ephemeral = None
        salt = hashlib.sha256(hello).digest()

        def record_key(info: bytes) -> RecordCipher:
            return RecordCipher(HKDF(SHA256(), _KEY, salt, info).derive(shared))

        self._to_responder = record_key(_INFO_INITIATOR)
        self._to_initiator = record_key(_INFO_RESPONDER)

    def _proof(self, cipher: RecordCipher, signed: bytes) -> bytes:
        return bytes(
            cipher.seal(self._public_key + self._sign(signed + hashlib.sha256(self._transcript).digest()))
        )

    def _check_proof(self, cipher: RecordCipher, record: bytes, signed: bytes, transcript: bytes) -> bytes:
        """Return the key that the record proves."""
        if int.from_bytes(record[:2], "big") != _PROOF_CIPHERTEXT:
            self._fail("The peer does not speak this handshake.", NotAnAgentError)
        try:
            plaintext = bytes(cipher.open(record[2:]))
        except CipherError:
            self._fail("The peer's handshake record does not open.", NotAnAgentError)
        public_key, signature = plaintext[:PUBLIC_KEY_LENGTH], plaintext[PUBLIC_KEY_LENGTH:]
        try:
            check_public_key(public_key)
        except IdentityError:
            self._fail("The peer's public key is not a sound Ed25519 key.")
        if not verify(public_key, signature, signed + hashlib.sha256(transcript).digest()):
            self._fail("The peer's handshake signature is wrong.")
        if hmac.compare_digest(public_key, self._public_key):
            self._fail("The peer has this side's own key.", OwnKeyError)
        return public_key

    def _fail(self, message: str, error: type[RemoteProtocolError] = RemoteProtocolError) -> NoReturn:
        self._fail_with(error(message))

    def _fail_with(self, failure: RemoteProtocolError) -> NoReturn:
        self._failure = failure
        self._out.clear()
        self._received.clear()
        self._ephemeral = None
        for cipher in (self._to_initiator, self._to_responder):
            if cipher is not None:
                cipher.close()
        raise failure


class Initiator(_Handshake):
    """The side that connects.

    Args:
        identity_sign: signs with the own Ed25519 key.
        public_key: that key's public half.
        version: the protocol version that message 1 names.
        expected_peer: the only public key that is accepted; None accepts any.
        ephemeral: a raw X25519 private key, for golden vectors alone.
    """

    def __init__(
        self,
        identity_sign: Callable[[bytes], bytes],
        public_key: bytes,
        *,
        version: int = PROTOCOL_VERSION,
        expected_peer: bytes | None = None,
        ephemeral: bytes | None = None,
    ) -> None:
        super().__init__(identity_sign, public_key, version=version, ephemeral=ephemeral)
        self._expected_peer = expected_peer
        self._transcript = MAGIC + version.to_bytes(2, "big") + self._ephemeral_public
        self._out += self._transcript

    def ciphers(self) -> tuple[RecordCipher, RecordCipher]:
        """Return (what seals our records, what opens the peer's), each at counter 1."""
        self._require_finished()
        assert self._to_responder is not None and self._to_initiator is not None
        return self._to_responder, self._to_initiator

    def _advance(self) -> None:
        # Something that is no agent is recognised by its first wrong byte, not after 146 of them.
        if len(self._received) >= _KEY + 2:
            length = int.from_bytes(self._received[_KEY : _KEY + 2], "big")
            if length != _PROOF_CIPHERTEXT:
                self._fail("The peer does not speak this handshake.", NotAnAgentError)
        message_2 = self._take(MESSAGE_2)
        if message_2 is None:
            return
        hello = self._transcript + message_2[:_KEY]
        self._derive(message_2[:_KEY], hello)
        assert self._to_initiator is not None and self._to_responder is not None
        found = self._check_proof(self._to_initiator, message_2[_KEY:], _SIGNED_RESPONDER, hello)
        if self._expected_peer is not None and not hmac.compare_digest(found, self._expected_peer):
            self._fail_with(UnexpectedPeerError("The peer proved another key than the expected one.", found))
        self._transcript += message_2
        message_3 = self._proof(self._to_responder, _SIGNED_INITIATOR)
        self._transcript += message_3
        self._out += message_3
        self._peer_public_key = found
        self._finished = True


class Responder(_Handshake):
    """The side that was connected to. Another protocol version still completes the handshake.

    Args:
        identity_sign: signs with the own Ed25519 key.
        public_key: that key's public half.
        ephemeral: a raw X25519 private key, for golden vectors alone.
    """

    def __init__(
        self,
        identity_sign: Callable[[bytes], bytes],
        public_key: bytes,
        *,
        version: int = PROTOCOL_VERSION,
        ephemeral: bytes | None = None,
    ) -> None:
        super().__init__(identity_sign, public_key, version=version, ephemeral=ephemeral)
        self._peer_version: int | None = None

    @property
    def peer_version(self) -> int | None:
        """The protocol version that message 1 named; None before it came."""
        return self._peer_version

    def ciphers(self) -> tuple[RecordCipher, RecordCipher]:
        """Return (what seals our records, what opens the peer's), each at counter 1."""
        self._require_finished()
        assert self._to_responder is not None and self._to_initiator is not None
        return self._to_initiator, self._to_responder

    def _advance(self) -> None:
        if self._peer_version is None and not self._answer():
            return
        message_3 = self._take(MESSAGE_3)
        if message_3 is None:
            return
        assert self._to_responder is not None
        found = self._check_proof(self._to_responder, message_3, _SIGNED_INITIATOR, self._transcript)
        self._transcript += message_3
        self._peer_public_key = found
        self._finished = True

    def _answer(self) -> bool:
        """Read message 1 and write message 2; False while message 1 is not whole."""
        start = bytes(self._received[: len(MAGIC)])
        if start != MAGIC[: len(start)]:
            self._fail("The first bytes are not this protocol's.", NotAnAgentError)
        message_1 = self._take(MESSAGE_1)
        if message_1 is None:
            return False
        self._peer_version = int.from_bytes(message_1[len(MAGIC) : _HELLO_1], "big")
        self._transcript = message_1 + self._ephemeral_public
        self._derive(message_1[_HELLO_1:], self._transcript)
        assert self._to_initiator is not None
        proof = self._proof(self._to_initiator, _SIGNED_RESPONDER)
        self._transcript += proof
        self._out += self._ephemeral_public + proof
        return True
