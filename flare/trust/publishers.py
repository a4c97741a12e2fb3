"""Publishers: who signed a core, and whom somebody has accepted."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from flare.errors import ConfigError, IdentityError
from flare.identity import fingerprint, public_key_from_hex
from flare.paths import check_name
from flare.values import dataclass

MAX_PROFILE = 4096  # bytes; a profile has about 250


@dataclass(frozen=True, slots=True)
class PublisherProfile:
    """A publisher's public side: what its owner calls it, and its Ed25519 public key of 32 bytes."""

    name: str
    public_key: bytes

    @property
    def fingerprint(self) -> str:
        """The hex SHA-256 of the public key: what two people compare."""
        return fingerprint(self.public_key)

    def to_text(self) -> str:
        """Return the profile as the small TOML file that people pass on."""
        return (
            "# A flare publisher. Compare the fingerprint with its owner before you accept it.\n"
            f'name = "{self.name}"\n'
            f'public_key = "{self.public_key.hex()}"\n'
            f'fingerprint = "{self.fingerprint}"\n'
        )

    @classmethod
    def from_text(cls, text: str) -> PublisherProfile:
        """Read a profile.

        Raises:
            ConfigError: it is none, or its fingerprint is another key's.
        """
        what = "The publisher profile"
        table = _toml(text, what)
        profile = _profile(table, what)
        if table.get("fingerprint", profile.fingerprint) != profile.fingerprint:
            raise ConfigError(f"{what} of {profile.name} states a fingerprint that is not its key's.")
        return profile


@dataclass(frozen=True, slots=True)
class TrustStore:
    """The publishers that were accepted, in the order in which they were."""

    publishers: tuple[PublisherProfile, ...] = ()

    @classmethod
    def from_text(cls, text: str) -> TrustStore:
        """Read a trust store.

        Raises:
            ConfigError: it is damaged.
        """
        what = "The trust store"
        entries = _toml(text, what).get("publisher", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ConfigError(f'{what} needs its publishers as "[[publisher]]" tables.')
        return cls(
            tuple(_profile(entry, f"{what}, publisher {number}") for number, entry in enumerate(entries))
        )

    def to_text(self) -> str:
        """Return the store as TOML."""
        return "".join(
            f'[[publisher]]\nname = "{profile.name}"\npublic_key = "{profile.public_key.hex()}"\n\n'
            for profile in self.publishers
        )

    def accepts(self, fingerprint: str) -> bool:
        """Tell whether the publisher with this fingerprint was accepted."""
        return any(profile.fingerprint == fingerprint for profile in self.publishers)

    def find(self, fingerprint: str) -> PublisherProfile | None:
        """Return the accepted publisher with this fingerprint."""
        return next((profile for profile in self.publishers if profile.fingerprint == fingerprint), None)

    def with_accepted(self, profile: PublisherProfile) -> TrustStore:
        """Return a store that accepts this publisher too."""
        return self if self.accepts(profile.fingerprint) else TrustStore((*self.publishers, profile))


def _toml(text: str, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise ConfigError(f"{what} is not TOML: {problem}.") from None


def _profile(table: Mapping[str, Any], what: str) -> PublisherProfile:
    name, key = table.get("name"), table.get("public_key")
    if not isinstance(name, str) or not isinstance(key, str):
        raise ConfigError(f'{what} needs a "name" and a "public_key" in quotes.')
    try:
        return PublisherProfile(check_name(name, "publisher name", ConfigError), public_key_from_hex(key))
    except IdentityError as problem:
        raise ConfigError(f"{what}: {problem.message}") from None
