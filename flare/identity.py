"""Ed25519 identities: one key a node, one a controller, one a publisher.

The fingerprint is the lower-case hex SHA-256 of the public key.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from flare.errors import IdentityError, NotFoundError
from flare.files import ensure_private_folder, read_private, write_new

PUBLIC_KEY_LENGTH = 32
SIGNATURE_LENGTH = 64
MAX_KEY_FILE = 4096  # a PKCS#8 PEM of an Ed25519 key has 119 bytes

_FIELD = 2**255 - 19
# The y coordinates of the eight points of small order (RFC 8032's curve). A signature under such a
# key verifies for messages that nobody signed, so none of them is anybody's identity.
_SMALL_ORDER_Y = frozenset(
    {
        0,
        1,
        _FIELD - 1,
        2707385501144840649318225287225658788936804267575313519463743609750303402022,
        55188659117513257062467267217118295137698188065244968500265048394206261417927,
    }
)


class Identity:
    """A private Ed25519 key and what follows from it."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()
        self.fingerprint: str = fingerprint(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.fingerprint[:16]})"

    @classmethod
    def generate(cls) -> Identity:
        """Return a fresh identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Return the identity of a raw 32-byte seed."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path, what: str = "The key") -> Identity:
        """Read an owner-only PKCS#8 PEM file.

        Raises:
            NotFoundError: there is no such file.
            IdentityError: others can read it, or it is no Ed25519 key.
        """
        pem = read_private(path, MAX_KEY_FILE, what)
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(
                f"{what} {path} is not an unencrypted Ed25519 key in PKCS#8 PEM. Restore it from a backup, "
                "or move it away so that a new identity is made (peers must then be paired again)."
            )
        return cls(key)

    @classmethod
    def load_or_create(cls, path: Path, what: str = "The key") -> Identity:
        """Read the key at `path`, or make one there: 0600 in a 0700 folder.

        Of several first uses at once all return the key that one of them published.
        """
        ensure_private_folder(path.parent)
        try:
            return cls.load(path, what)
        except NotFoundError:
            identity = cls.generate()
        try:
            write_new(path, identity.private_pem())
        except FileExistsError:
            return cls.load(path, what)
        return identity

    def private_pem(self) -> bytes:
        """Return the private key as PKCS#8 PEM."""
        return self._private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature over `message`."""
        return self._private_key.sign(message)


def fingerprint(public_key: bytes) -> str:
    """Return the hex SHA-256 of a public key."""
    return hashlib.sha256(public_key).hexdigest()


def check_public_key(public_key: bytes) -> bytes:
    """Return `public_key` if it is canonical and not of small order.

    Raises:
        IdentityError: it is not.
    """
    if len(public_key) != PUBLIC_KEY_LENGTH:
        raise IdentityError(f"A public key has {PUBLIC_KEY_LENGTH} bytes, not {len(public_key)}.")
    y = int.from_bytes(public_key, "little") & (2**255 - 1)
    if y >= _FIELD or y in _SMALL_ORDER_Y:
        raise IdentityError("That public key is not a sound Ed25519 key (not canonical, or of small order).")
    return public_key


def public_key_from_hex(text: str) -> bytes:
    """Return the checked public key that 64 hex digits stand for.

    Raises:
        IdentityError: they stand for none.
    """
    try:
        public_key = bytes.fromhex(text)
    except ValueError:
        public_key = b""
    if len(text) != 2 * PUBLIC_KEY_LENGTH or len(public_key) != PUBLIC_KEY_LENGTH:
        raise IdentityError(f"A public key is written as {2 * PUBLIC_KEY_LENGTH} hex digits.")
    return check_public_key(public_key)


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Tell whether `signature` over `message` was made by the owner of `public_key`."""
    try:
        Ed25519PublicKey.from_public_bytes(check_public_key(public_key)).verify(signature, message)
    except (InvalidSignature, ValueError, IdentityError):
        return False
    return True
