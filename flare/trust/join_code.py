"""Join codes: a one-time secret that proves node and controller to each other inside their session.

Both proofs are bound to the handshake hash, so neither can be passed on over another connection.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import field, replace

from flare.errors import ConfigError, UsageError
from flare.identity import PUBLIC_KEY_LENGTH
from flare.strict_json import Reader, canonical, loads
from flare.values import dataclass

CODE_LENGTH = 20  # bytes: 160 bits, eight groups of four base32 characters
KEY_LENGTH = 32
JOIN_CODE_LIFETIME = 24 * 3600  # seconds
RETRY_WINDOW = 600  # seconds in which the same key may pair again with the same code: an answer got lost
MAX_FILE = 4096  # bytes; a join-code file has some 200

_GROUP = 4


def generate() -> str:
    """Return a fresh code: eight groups of four base32 characters."""
    return format_code(secrets.token_bytes(CODE_LENGTH))


def format_code(code: bytes) -> str:
    """Return 20 bytes as people read them."""
    text = base64.b32encode(code).decode("ascii")
    return "-".join(text[start : start + _GROUP] for start in range(0, len(text), _GROUP))


def decode(text: str) -> bytes:
    """Return the 20 bytes that a code stands for; case, dashes and spaces do not matter.

    Raises:
        UsageError: it is no code.
    """
    letters = text.replace("-", "").replace(" ", "").strip().upper()
    try:
        code = base64.b32decode(letters.encode("ascii"))
    except (binascii.Error, ValueError):
        code = b""
    if len(code) != CODE_LENGTH or letters.endswith("="):
        raise UsageError(
            "That is no join code: it has eight groups of four letters and digits, as `flare agent install` "
            "printed them on the node."
        )
    return code


def hmac_key(code: bytes) -> bytes:
    """Return the HMAC key that both sides derive from the decoded code."""
    return hashlib.sha256(code).digest()


def controller_proof(key: bytes, handshake_hash: bytes) -> bytes:
    """Return the controller's proof: the node checks it before it sends its own."""
    return hmac.digest(key, b"controller" + handshake_hash, "sha256")


def node_proof(key: bytes, handshake_hash: bytes) -> bytes:
    """Return the node's proof."""
    return hmac.digest(key, b"node" + handshake_hash, "sha256")


def proof_matches(proof: bytes | None, expected: bytes) -> bool:
    """Compare two proofs in constant time; None never matches."""
    return proof is not None and hmac.compare_digest(proof, expected)


@dataclass(frozen=True, slots=True)
class JoinCodeFile:
    """What the node keeps of a code: the HMAC key and the expiry, and whom it has paired.

    Args:
        key: 32 bytes; never the code itself.
        expires: Unix seconds.
        used_by: the controller's key that consumed the code.
        used_at: Unix seconds of that.
    """

    key: bytes = field(repr=False)
    expires: int
    used_by: bytes | None = None
    used_at: int | None = None

    @classmethod
    def of(cls, code: bytes, now: float) -> JoinCodeFile:
        """Return the file for a decoded code, good for 24 hours from `now`."""
        return cls(hmac_key(code), int(now) + JOIN_CODE_LIFETIME)

    def used(self, controller_key: bytes, now: float) -> JoinCodeFile:
        """Return the file after the code paired that controller."""
        return replace(self, used_by=controller_key, used_at=int(now))

    def accepts(self, controller_key: bytes, now: float) -> bool:
        """Tell whether a right proof of that controller pairs now: a fresh code, or the same key again.

        A clock that was set back does not make a used code fresh.
        """
        if self.used_by is None:
            return now < self.expires
        assert self.used_at is not None
        same = hmac.compare_digest(self.used_by, controller_key)
        return same and abs(now - self.used_at) < RETRY_WINDOW

    def to_text(self) -> str:
        """Return the file's text."""
        body: dict[str, object] = {"key": self.key.hex(), "expires": self.expires}
        if self.used_by is not None:
            body |= {"used_by": self.used_by.hex(), "used_at": self.used_at}
        return canonical(body) + "\n"

    @classmethod
    def from_text(cls, text: str | bytes) -> JoinCodeFile:
        """Read the file's text.

        Raises:
            ConfigError: it is not what `to_text` writes.
        """
        what = "The join-code file"
        reader = Reader(loads(text, limit=MAX_FILE, what=what, error=ConfigError), what, ConfigError)
        result = cls(
            key=reader.hex("key", KEY_LENGTH),
            expires=reader.count("expires"),
            used_by=reader.hex("used_by", PUBLIC_KEY_LENGTH, default=None),
            used_at=reader.count("used_at", default=None),
        )
        reader.finish()
        if (result.used_by is None) != (result.used_at is None):
            reader.fail("used_by", 'and "used_at" belong together')
        return result
