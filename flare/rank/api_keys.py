"""The keys that clients of the front may show, as the operator's file holds them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from flare.errors import ConfigError
from flare.files import read_private

MAX_KEY_FILE: Final = 64 * 1024
MAX_KEYS: Final = 1000


def read_keys(path: str | None) -> frozenset[bytes]:
    """Return the SHA-256 of every key in a file, one a line; lines that begin with # are remarks.

    Raises:
        ConfigError: the file holds no key, or too many.
        IdentityError, NotFoundError: others can read it, or it is not there.
    """
    if path is None:
        return frozenset()
    text = read_private(Path(path), MAX_KEY_FILE, "The API key file").decode("utf-8", "surrogateescape")
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ConfigError(
            f"The API key file {path} holds {len(keys)} keys; it needs 1 to {MAX_KEYS}, one a line."
        )
    return frozenset(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys)
