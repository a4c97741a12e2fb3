"""The proof that stands at the start of every connection between ranks: bytes in, bytes out.

P = "FLARERNK" · u8 1 · u8 purpose · u16 big-endian rank · 32 random bytes      peer -> rank zero
Z = u16 big-endian ranks · 32 random bytes                                      rank zero -> peer
T = SHA-256(P · Z)
HMAC-SHA256(key, "peer" · 0x00 · T)                                             peer -> rank zero
HMAC-SHA256(key, "zero" · 0x00 · T)                                             rank zero -> peer
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import Final

from flare.errors import RemoteProtocolError
from flare.limits import MAX_RANKS
from flare.values import dataclass
from flare_workers.cipher import RecordCipher

MAGIC: Final = b"FLARERNK"
VERSION: Final = 1
NONCE_LENGTH: Final = 32
KEY_LENGTH: Final = 32
PROOF_LENGTH: Final = 32

_PEER = struct.Struct(">8sBBH32s")
_ZERO = struct.Struct(">H32s")
PEER_HELLO_LENGTH: Final = _PEER.size
ZERO_HELLO_LENGTH: Final = _ZERO.size

INSECURE_KEY: Final = hashlib.sha256(b"flare rank without a launch key").digest()
"""What both sides use where the operator gave no key: it proves nothing, and keeps one protocol."""


class Purpose(IntEnum):
    """What a connection is for."""

    RENDEZVOUS = 0
    RANGES = 1
    ENGINE = 2


@dataclass(frozen=True, slots=True)
class PeerHello:
    """What P says."""

    purpose: Purpose
    rank: int


def peer_hello(purpose: Purpose, rank: int, nonce: bytes) -> bytes:
    """Return P."""
    return _PEER.pack(MAGIC, VERSION, purpose, rank, nonce)


def parse_peer_hello(data: bytes) -> PeerHello:
    """Return what P says.

    Raises:
        RemoteProtocolError: it is none, or of another version.
    """
    magic, version, purpose, rank, _ = _PEER.unpack(data)
    if magic != MAGIC:
        raise RemoteProtocolError("It does not speak the ranks' protocol.")
    if version != VERSION:
        raise RemoteProtocolError(
            f"It speaks version {version} of the ranks' protocol; this is version {VERSION}."
        )
    if purpose not in list(Purpose):
        raise RemoteProtocolError(f"It asks for the unknown purpose {purpose}.")
    return PeerHello(Purpose(purpose), rank)


def zero_hello(ranks: int, nonce: bytes) -> bytes:
    """Return Z."""
    return _ZERO.pack(ranks, nonce)


def parse_zero_hello(data: bytes) -> int:
    """Return the number of ranks that Z says.

    Raises:
        RemoteProtocolError: that is no number of ranks.
    """
    ranks: int = _ZERO.unpack(data)[0]
    if not 2 <= ranks <= MAX_RANKS:
        raise RemoteProtocolError(f"Rank zero says that its group has {ranks} ranks.")
    return ranks


def transcript(peer: bytes, zero: bytes) -> bytes:
    """Return T."""
    return hashlib.sha256(peer + zero).digest()


def peer_proof(key: bytes, digest: bytes) -> bytes:
    """Return the proof that the peer sends."""
    return hmac.digest(key, b"peer\x00" + digest, "sha256")


def zero_proof(key: bytes, digest: bytes) -> bytes:
    """Return the proof that rank zero answers."""
    return hmac.digest(key, b"zero\x00" + digest, "sha256")


def same(left: bytes, right: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(left, right)


def record_ciphers(key: bytes, digest: bytes) -> tuple[RecordCipher, RecordCipher]:
    """Return the ciphers (peer to zero, zero to peer) of a rendezvous connection."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    peer_to_zero, zero_to_peer = (
        HKDF(algorithm=SHA256(), length=32, salt=digest, info=info).derive(key)
        for info in (b"flare rank peer to zero", b"flare rank zero to peer")
    )
    return RecordCipher(peer_to_zero), RecordCipher(zero_to_peer)
