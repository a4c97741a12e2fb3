"""Handshake, records, frames and proofs, decoded from the words of docs/protocol.md alone.

Nothing here imports the product. Where the page and the product disagree, a test that uses this module fails,
and the page decides. Everything that breaks a rule raises `RefusedError`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MAGIC = b"FLAREFLT"
VERSION = 7
MESSAGE_1_BYTES = 8 + 2 + 32
HANDSHAKE_RECORD_BYTES = 2 + 112
MESSAGE_2_BYTES = 32 + HANDSHAKE_RECORD_BYTES
RECORD_PLAINTEXT_BYTES = 65_519
FRAME_HEADER_BYTES = 9

# Tags 1 to 25, in order.
FRAME_NAMES = [
    "HELLO", "OK", "ERROR", "PAIR", "HAVE", "PUT", "CONTROLLERS", "TRANSFER", "FETCH",
    "FABRIC", "FETCH_FABRIC", "GET", "STAT", "DOWNLOAD", "DOWNLOAD_PROGRESS", "RUN", "ATTACH", "STOP",
    "REMOVE", "STATUS", "METRICS", "LOG", "EXIT", "DATA", "TRANSFER_PROGRESS",
]  # fmt: skip
TAGS = {name: number for number, name in enumerate(FRAME_NAMES, start=1)}

_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P


class RefusedError(Exception):
    """The bytes break a rule of the page."""


def sha256(*parts: bytes) -> bytes:
    """The SHA-256 of the parts joined."""
    return hashlib.sha256(b"".join(parts)).digest()


# --- keys and signatures


def check_public_key(key: bytes) -> None:
    """Refuse an Ed25519 key that is not canonical or that is of small order.

    Points of order 1, 2 and 4 have y = 1, -1 and 0. A point of order 8 doubles to y = 0, which with the
    curve's equation gives d*y^4 + 2*y^2 = 1. A sign bit on x = 0 only happens at y = 1 and y = -1: covered.
    """
    if len(key) != 32:
        raise RefusedError("an Ed25519 key has 32 bytes")
    y = int.from_bytes(key, "little") & (2**255 - 1)
    if y >= _P:
        raise RefusedError("the key is not canonical")
    if y in (0, 1, _P - 1) or (_D * pow(y, 4, _P) + 2 * y * y - 1) % _P == 0:
        raise RefusedError("the key is of small order")


def verify(key: bytes, signature: bytes, message: bytes) -> None:
    """Refuse unless `signature` is the key's over `message`."""
    check_public_key(key)
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise RefusedError("the signature is wrong") from error


def public_key(private: Ed25519PrivateKey) -> bytes:
    """The raw public key."""
    return private.public_key().public_bytes_raw()


def agree(own: X25519PrivateKey, peer: bytes) -> bytes:
    """X25519; an all-zero result is refused."""
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as error:
        raise RefusedError("the shared secret is all zero") from error


def expand(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 to 32 bytes."""
    return HKDF(SHA256(), 32, salt, info).derive(secret)


# --- records


@dataclass
class Direction:
    """One direction of a session: its key and the counter of the next record."""

    key: bytes
    counter: int = 0

    def _nonce(self) -> bytes:
        if self.counter >= 2**64 - 1:
            raise RefusedError("the counter would wrap")
        nonce = bytes(4) + struct.pack("<Q", self.counter)
        self.counter += 1
        return nonce

    def seal(self, plaintext: bytes) -> bytes:
        """One record, length included."""
        if not 1 <= len(plaintext) <= RECORD_PLAINTEXT_BYTES:
            raise RefusedError("a record holds 1 to 65,519 bytes")
        ciphertext = ChaCha20Poly1305(self.key).encrypt(self._nonce(), plaintext, None)
        return struct.pack(">H", len(ciphertext)) + ciphertext

    def open(self, record: bytes) -> bytes:
        """The plaintext of one whole record, length included."""
        if len(record) < 2 or len(record) != 2 + int.from_bytes(record[:2], "big"):
            raise RefusedError("not one whole record")
        if len(record) < 2 + 17:
            raise RefusedError("a record's ciphertext has at least 17 bytes")
        try:
            return ChaCha20Poly1305(self.key).decrypt(self._nonce(), record[2:], None)
        except InvalidTag as error:
            raise RefusedError("a record does not open") from error


def split_records(stream: bytes) -> Iterator[bytes]:
    """The records of a byte stream that ends with a whole record."""
    while stream:
        size = 2 + int.from_bytes(stream[:2], "big")
        if len(stream) < size or size < 2 + 17:
            raise RefusedError("the stream ends inside a record")
        yield stream[:size]
        stream = stream[size:]


# --- handshake


def message_1(ephemeral: X25519PrivateKey, version: int = VERSION, magic: bytes = MAGIC) -> bytes:
    """The initiator's first message."""
    return magic + struct.pack(">H", version) + ephemeral.public_key().public_bytes_raw()


def read_message_1(message: bytes) -> tuple[int, bytes]:
    """The protocol version and the initiator's ephemeral key."""
    if len(message) != MESSAGE_1_BYTES or message[:8] != MAGIC:
        raise RefusedError("message 1 is not the protocol's")
    return int.from_bytes(message[8:10], "big"), message[10:]


def directions(shared: bytes, salt: bytes) -> tuple[Direction, Direction]:
    """Initiator to responder, responder to initiator."""
    return (
        Direction(expand(shared, salt, b"flare orbit initiator to responder")),
        Direction(expand(shared, salt, b"flare orbit responder to initiator")),
    )


def seal_identity(direction: Direction, role: bytes, digest: bytes, identity: Ed25519PrivateKey) -> bytes:
    """The handshake record of one side; `role` is b"initiator" or b"responder"."""
    signature = identity.sign(b"flare orbit " + role + b"\0" + digest)
    return direction.seal(public_key(identity) + signature)


def open_identity(direction: Direction, role: bytes, digest: bytes, record: bytes) -> bytes:
    """The public key in a handshake record whose signature holds."""
    if len(record) != HANDSHAKE_RECORD_BYTES:
        raise RefusedError("a handshake record has exactly 112 bytes of ciphertext")
    plaintext = direction.open(record)
    verify(plaintext[:32], plaintext[32:], b"flare orbit " + role + b"\0" + digest)
    return plaintext[:32]


@dataclass(frozen=True)
class Handshake:
    """What a finished handshake leaves; both directions stand at counter 1."""

    version: int
    initiator: bytes
    responder: bytes
    hash: bytes
    initiator_to_responder: Direction
    responder_to_initiator: Direction


def read_handshake(one: bytes, two: bytes, three: bytes, ephemeral: X25519PrivateKey) -> Handshake:
    """Verify a recorded handshake, given the ephemeral private key of either side."""
    version, initiator_ephemeral = read_message_1(one)
    if len(two) != MESSAGE_2_BYTES or len(three) != HANDSHAKE_RECORD_BYTES:
        raise RefusedError("message 2 has 146 bytes and message 3 has 114")
    responder_ephemeral = two[:32]
    own = ephemeral.public_key().public_bytes_raw()
    if own not in (initiator_ephemeral, responder_ephemeral):
        raise RefusedError("the ephemeral key belongs to neither side")
    peer = responder_ephemeral if own == initiator_ephemeral else initiator_ephemeral
    salt = sha256(one, responder_ephemeral)
    forward, backward = directions(agree(ephemeral, peer), salt)
    responder = open_identity(backward, b"responder", salt, two[32:])
    initiator = open_identity(forward, b"initiator", sha256(one, two), three)
    if initiator == responder:
        raise RefusedError("both sides have one key")
    return Handshake(version, initiator, responder, sha256(one, two, three), forward, backward)


# --- frames


@dataclass(frozen=True)
class Frame:
    """One frame as read."""

    tag: int
    body: bytes

    @property
    def name(self) -> str:
        """The frame's name in the page's table."""
        return FRAME_NAMES[self.tag - 1]


def frame_header(tag: int, body_bytes: int) -> bytes:
    """Tag and body length."""
    return struct.pack("<BQ", tag, body_bytes)


def read_header(header: bytes) -> tuple[int, int]:
    """Tag and body length of a header."""
    tag, size = struct.unpack("<BQ", header)
    if not 1 <= tag <= len(FRAME_NAMES):
        raise RefusedError(f"no frame has tag {tag}")
    return tag, size


@dataclass
class FrameSplitter:
    """Puts the plaintexts of records together to frames; every frame must start its own record."""

    _tag: int = 0
    _missing: int = 0
    _body: bytearray = field(default_factory=bytearray)

    def feed(self, plaintext: bytes) -> Frame | None:
        """Take one record's plaintext; return the frame that ends with it."""
        if not self._tag:
            if len(plaintext) < FRAME_HEADER_BYTES:
                raise RefusedError("a record that starts a frame is shorter than the header")
            self._tag, self._missing = read_header(plaintext[:FRAME_HEADER_BYTES])
            plaintext = plaintext[FRAME_HEADER_BYTES:]
            self._body = bytearray()
        if len(plaintext) > self._missing:
            raise RefusedError("bytes follow a frame inside its last record")
        self._body += plaintext
        self._missing -= len(plaintext)
        if self._missing:
            return None
        frame, self._tag = Frame(self._tag, bytes(self._body)), 0
        return frame

    def finish(self) -> None:
        """Refuse an end of stream inside a frame."""
        if self._tag:
            raise RefusedError("the stream ends inside a frame")


def read_stream(direction: Direction, stream: bytes) -> list[Frame]:
    """The frames in everything that one side sent after the handshake."""
    splitter = FrameSplitter()
    frames = [splitter.feed(direction.open(record)) for record in split_records(stream)]
    splitter.finish()
    return [frame for frame in frames if frame]


# --- proofs


def join_code_key(code: str) -> bytes:
    """The HMAC key of a join code: SHA-256 of its 20 decoded bytes."""
    try:
        decoded = base64.b32decode(code.replace("-", "").upper())
    except binascii.Error as error:
        raise RefusedError("the join code is not base32") from error
    if len(decoded) != 20:
        raise RefusedError("a join code has 20 bytes")
    return sha256(decoded)


def pairing_proof(code: str, role: bytes, handshake_hash: bytes) -> bytes:
    """The proof that `role` (b"controller" or b"node") sends."""
    return hmac.digest(join_code_key(code), role + handshake_hash, "sha256")


def rank_preface(purpose: int, rank: int, random: bytes) -> bytes:
    """P of the launch-key proof, sent by the peer."""
    return b"FLARERNK" + struct.pack(">BBH", 1, purpose, rank) + random


def rank_answer(ranks: int, random: bytes) -> bytes:
    """Z of the launch-key proof, sent by rank zero."""
    return struct.pack(">H", ranks) + random


def rank_proof(key: bytes, side: bytes, preface: bytes, answer: bytes) -> bytes:
    """The HMAC that `side` (b"peer" or b"zero") sends; `key` is the launch key."""
    if len(preface) != 44 or len(answer) != 34:
        raise RefusedError("P has 44 bytes and Z has 34")
    return hmac.digest(key, side + b"\0" + sha256(preface, answer), "sha256")


def rank_directions(key: bytes, preface: bytes, answer: bytes) -> tuple[Direction, Direction]:
    """Peer to zero, zero to peer: the records after a proof of purpose 0."""
    salt = sha256(preface, answer)
    return (
        Direction(expand(key, salt, b"flare rank peer to zero")),
        Direction(expand(key, salt, b"flare rank zero to peer")),
    )
