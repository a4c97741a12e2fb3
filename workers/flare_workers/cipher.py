"""One direction of a session: a ChaCha20-Poly1305 key and its record counter.

A record on the wire is a big-endian u16 length and that many bytes of ciphertext (the tag included).
The nonce is four zero bytes and the counter as u64 little-endian; there is no associated data.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

Buffer = bytes | bytearray | memoryview

KEY_SIZE = 32
TAG_SIZE = 16
LENGTH_SIZE = 2
MAX_CIPHERTEXT = 65535  # what the u16 length can say
MAX_PLAINTEXT = MAX_CIPHERTEXT - TAG_SIZE
MIN_CIPHERTEXT = TAG_SIZE + 1  # an empty record carries nothing and would let a peer spin us for free
MAX_RECORD = LENGTH_SIZE + MAX_CIPHERTEXT
# The last counter is never used: after it, the next one would no longer fit the u64 that a handover carries.
COUNTER_LIMIT = 2**64 - 1

_NONCE = struct.Struct("<4xQ")
_LENGTH = struct.Struct(">H")

# The *_into calls came with later versions of cryptography; without them one more copy is made.
_HAS_INTO = hasattr(ChaCha20Poly1305, "encrypt_into") and hasattr(ChaCha20Poly1305, "decrypt_into")


class CipherError(Exception):
    """A record that cannot be sealed or opened; the session that it belongs to is over."""


class RecordCipher:
    """Seals or opens the records of one direction, one counter value a record.

    Args:
        key: 32 bytes, known to the two ends alone.
        counter: The next record's counter; 0 for a new session, more for one that was handed over.

    Raises:
        CipherError: The key's length or the counter is out of range.
    """

    __slots__ = ("_aead", "_counter", "_key")

    def __init__(self, key: bytes, counter: int = 0) -> None:
        if len(key) != KEY_SIZE:
            raise CipherError(f"a record key has {KEY_SIZE} bytes, not {len(key)}")
        if not 0 <= counter <= COUNTER_LIMIT:
            raise CipherError(f"a record counter is at least 0 and at most 2**64-1, not {counter}")
        self._key: bytes | None = bytes(key)
        self._aead: ChaCha20Poly1305 | None = ChaCha20Poly1305(key)
        self._counter = counter

    def __repr__(self) -> str:
        return f"<RecordCipher counter={self._counter}{'' if self._aead else ' closed'}>"

    @property
    def counter(self) -> int:
        """The counter that the next record will use."""
        return self._counter

    @property
    def key(self) -> bytes:
        """The key, for a handover only.

        Raises:
            CipherError: The key was forgotten.
        """
        if self._key is None:
            raise CipherError("this direction's key was given away or its session ended")
        return self._key

    def close(self) -> None:
        """Forget the key. Every later use raises CipherError."""
        self._key = None
        self._aead = None

    def seal(self, plaintext: Buffer) -> bytes:
        """Make one whole record, its length included.

        Args:
            plaintext: 1 to 65,519 bytes.

        Raises:
            CipherError: The size is out of range, the counter would wrap, or the key was forgotten.
        """
        size = len(memoryview(plaintext).cast("B"))
        aead = self._ready()
        _check_plaintext_size(size)
        sealed = aead.encrypt(_NONCE.pack(self._counter), plaintext, None)
        self._counter += 1
        return _LENGTH.pack(size + TAG_SIZE) + sealed

    def open(self, ciphertext: Buffer) -> bytes:
        """Open one record's ciphertext (17 to 65,535 bytes, without the length) and return its plaintext.

        Raises:
            CipherError: It does not open under this key and counter; the key is forgotten, because the
                session is over.
        """
        aead = self._ready()
        _check_ciphertext_size(len(memoryview(ciphertext).cast("B")))
        try:
            plaintext = aead.decrypt(_NONCE.pack(self._counter), ciphertext, None)
        except InvalidTag:
            raise self._not_ours() from None
        self._counter += 1
        return plaintext

    def seal_into(self, plaintext: memoryview, record: memoryview) -> int:
        """Seal into a buffer that is reused, without allocating.

        Args:
            plaintext: 1 to 65,519 bytes; must not overlap `record`.
            record: Writable bytes, at least 18 more than the plaintext.

        Returns:
            The record's size in bytes, its length included.

        Raises:
            CipherError: As `seal`; or the buffer is too small.
        """
        size = len(plaintext)
        aead = self._ready()
        _check_plaintext_size(size)
        end = size + LENGTH_SIZE + TAG_SIZE
        if len(record) < end:
            raise CipherError(f"a record of {end} bytes does not fit a buffer of {len(record)}")
        nonce = _NONCE.pack(self._counter)
        if _HAS_INTO:
            aead.encrypt_into(nonce, plaintext, None, record[LENGTH_SIZE:end])
        else:
            record[LENGTH_SIZE:end] = aead.encrypt(nonce, plaintext, None)
        self._counter += 1
        _LENGTH.pack_into(record, 0, size + TAG_SIZE)
        return end

    def open_into(self, ciphertext: memoryview, plaintext: memoryview) -> int:
        """Open into a buffer that is reused, without allocating.

        Args:
            ciphertext: 17 to 65,535 bytes, without the length; must not overlap `plaintext`.
            plaintext: Writable bytes, at least 16 fewer than the ciphertext.

        Returns:
            The plaintext's size in bytes.

        Raises:
            CipherError: As `open`; or the buffer is too small.
        """
        size = len(ciphertext) - TAG_SIZE
        aead = self._ready()
        _check_ciphertext_size(len(ciphertext))
        if len(plaintext) < size:
            raise CipherError(f"a record's {size} bytes of plaintext do not fit a buffer of {len(plaintext)}")
        nonce = _NONCE.pack(self._counter)
        try:
            if _HAS_INTO:
                aead.decrypt_into(nonce, ciphertext, None, plaintext[:size])
            else:
                plaintext[:size] = aead.decrypt(nonce, ciphertext, None)
        except InvalidTag:
            raise self._not_ours() from None
        self._counter += 1
        return size

    def _ready(self) -> ChaCha20Poly1305:
        if self._aead is None:
            raise CipherError("this direction's key was given away or its session ended")
        if self._counter >= COUNTER_LIMIT:
            raise CipherError("the record counter would wrap; a nonce is never used twice")
        return self._aead

    def _not_ours(self) -> CipherError:
        error = CipherError(f"record {self._counter} does not open: it was altered or belongs elsewhere")
        self.close()
        return error


def _check_plaintext_size(size: int) -> None:
    if not 1 <= size <= MAX_PLAINTEXT:
        raise CipherError(f"a record carries 1 to {MAX_PLAINTEXT} bytes, not {size}")


def _check_ciphertext_size(size: int) -> None:
    if not MIN_CIPHERTEXT <= size <= MAX_CIPHERTEXT:
        raise CipherError(f"a record's ciphertext has {MIN_CIPHERTEXT} to {MAX_CIPHERTEXT} bytes, not {size}")
