"""Publishers: who prepared a core. Their public profiles, and the store of those that were accepted."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

from flare.errors import ConfigError, FlareError, TrustError, UsageError
from flare.identity import check_public_key, fingerprint, public_key_from_hex
from flare.paths import check_name

MAX_PROFILE = 16 * 1024  # bytes; a profile has some 200
MAX_STORE = 1024 * 1024  # bytes: thousands of publishers


@dataclass(frozen=True, slots=True)
class PublisherProfile:
    """A publisher's public half.

    Args:
        name: for people; the key decides.
        public_key: 32 bytes.
    """

    name: str
    public_key: bytes

    @property
    def fingerprint(self) -> str:
        """The hex SHA-256 of the public key."""
        return fingerprint(self.public_key)

    def to_text(self) -> str:
        """Return the profile as TOML."""
        return (
            f'name = "{self.name}"\n'
            f'public_key = "{self.public_key.hex()}"\n'
            f'fingerprint = "{self.fingerprint}"\n'
        )

    @classmethod
    def from_text(
        cls, text: str, what: str = "The publisher profile", error: type[FlareError] = ConfigError
    ) -> PublisherProfile:
        """Read a profile.

        Args:
            text: TOML with name, public_key and perhaps the fingerprint, which must then match.
            what: names it in an error.
            error: the class that is raised; for a peer's text pass RemoteProtocolError.

        Raises:
            error: it is none.
        """
        return _profile(_toml(text, MAX_PROFILE, what, error), what, error)


@dataclass(frozen=True, slots=True)
class TrustStore:
    """The publishers that were accepted here, in the order of acceptance."""

    publishers: tuple[PublisherProfile, ...] = ()

    def accepts(self, wanted: str) -> bool:
        """Tell whether the publisher of that fingerprint was accepted."""
        return any(publisher.fingerprint == wanted for publisher in self.publishers)

    def publisher(self, wanted: str) -> PublisherProfile:
        """Return the accepted publisher of that fingerprint.

        Raises:
            TrustError: it was not accepted.
        """
        for publisher in self.publishers:
            if publisher.fingerprint == wanted:
                return publisher
        raise TrustError(
            f"The publisher {wanted} has not been accepted here. Compare the fingerprint with the one that "
            f"`flare publisher show` prints for its owner, then pass --accept-publisher {wanted}."
        )

    def with_accepted(self, profile: PublisherProfile) -> TrustStore:
        """Return the store with one more publisher; one that is there already changes nothing.

        Raises:
            UsageError: another accepted publisher has that name.
        """
        check_public_key(profile.public_key)
        if self.accepts(profile.fingerprint):
            return self
        if any(publisher.name == profile.name for publisher in self.publishers):
            raise UsageError(
                f"Another accepted publisher is named {profile.name}. Rename one in the trust store first."
            )
        return TrustStore((*self.publishers, profile))

    def to_text(self) -> str:
        """Return the store as TOML."""
        return "\n".join(f"[[publisher]]\n{publisher.to_text()}" for publisher in self.publishers)

    @classmethod
    def from_text(cls, text: str, what: str = "The trust store") -> TrustStore:
        """Read a store.

        Raises:
            ConfigError: it is none; the message says where.
        """
        document = _toml(text, MAX_STORE, what, ConfigError)
        _only(document, {"publisher"}, what, ConfigError)
        entries = document.get("publisher", [])
        if not isinstance(entries, list):
            raise ConfigError(f"{what}: publisher must be written as [[publisher]].")
        store = cls()
        for number, entry in enumerate(entries, 1):
            profile = _profile(entry, f"{what}, publisher {number}", ConfigError)
            if store.accepts(profile.fingerprint):
                raise ConfigError(f"{what}: the key of {profile.name} is there twice. Remove one of them.")
            store = cls((*store.publishers, profile))
        return store


def _toml(text: str, limit: int, what: str, error: type[FlareError]) -> dict[str, Any]:
    if len(text) > limit:
        raise error(f"{what} has {len(text)} characters; at most {limit} are allowed.")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as problem:
        raise error(f"{what} is not TOML: {problem}.") from None


def _only(value: dict[str, Any], allowed: set[str], what: str, error: type[FlareError]) -> None:
    unknown = sorted(set(value) - allowed)
    if unknown:
        raise error(f'{what} has the unknown key "{unknown[0][:80]}".')


def _profile(value: object, what: str, error: type[FlareError]) -> PublisherProfile:
    if not isinstance(value, dict):
        raise error(f"{what} is not a table.")
    _only(value, {"name", "public_key", "fingerprint"}, what, error)
    for member in ("name", "public_key"):
        if not isinstance(value.get(member), str):
            raise error(f'{what}: "{member}" is missing or not a string.')
    try:
        name = check_name(value["name"], "publisher name")
        profile = PublisherProfile(name, public_key_from_hex(value["public_key"]))
    except FlareError as problem:
        raise error(f"{what}: {problem}") from None
    if value.get("fingerprint", profile.fingerprint) != profile.fingerprint:
        raise error(f"{what}: the fingerprint is not the public key's. One of them was changed.")
    return profile
