"""The publishers of this account on disk: their private keys, and whom this controller has accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flare.errors import ConfigError, FlareError, NotFoundError, StorageError, TrustError, UsageError
from flare.files import ensure_private_folder, locked, read_trusted, write_atomic, write_new
from flare.identity import Identity
from flare.paths import Paths, check_name
from flare.trust.publishers import PublisherProfile, TrustStore

KEY_SUFFIX = ".key"
MAX_TRUST_STORE = 1 << 20  # bytes: thousands of publishers
CREATE_HINT = "Make one with `flare publisher create NAME`; its key signs every core that you export."


def create_publisher(paths: Paths, name: str) -> Identity:
    """Make the key of a new publisher, owner-only.

    Raises:
        UsageError: the name cannot be one.
        StorageError: there is one of that name already.
    """
    path = paths.publisher_keys / f"{check_name(name, 'publisher name')}{KEY_SUFFIX}"
    ensure_private_folder(paths.publisher_keys)
    identity = Identity.generate()
    try:
        write_new(path, identity.private_pem())
    except FileExistsError:
        raise StorageError(
            f"There is a publisher {name} already, {path}. `flare publisher show {name}` prints its profile."
        ) from None
    return identity


def publisher_names(paths: Paths) -> list[str]:
    """Return the names of this account's own publishers."""
    return sorted(path.name.removesuffix(KEY_SUFFIX) for path in paths.publisher_keys.glob(f"*{KEY_SUFFIX}"))


def load_publisher(paths: Paths, name: str | None, *, word: str = "--publisher NAME") -> tuple[str, Identity]:
    """Return (name, identity) of one of this account's publishers; without a name of the only one.

    Args:
        word: how the command takes a name, for the message.

    Raises:
        NotFoundError: there is none (of that name); the message says how to make one.
        UsageError: there are several, and no name was given.
        IdentityError: its key file is damaged or open to others.
    """
    names = publisher_names(paths)
    if name is None:
        if not names:
            raise NotFoundError(f"There is no publisher yet. {CREATE_HINT}")
        if len(names) > 1:
            raise UsageError(f"There are several publishers: {', '.join(names)}. Name one with {word}.")
        name = names[0]
    elif name not in names:
        have = f"There are {', '.join(names)}." if names else CREATE_HINT
        raise NotFoundError(f"There is no publisher {name[:80]}. {have}")
    return name, Identity.load(paths.publisher_keys / f"{name}{KEY_SUFFIX}", "The publisher's key")


def own_publishers(
    paths: Paths, passed_over: Callable[[str], None] = lambda problem: None
) -> dict[str, PublisherProfile]:
    """Return fingerprint -> profile of every publisher whose key lies in this account: who holds it may sign.

    Args:
        passed_over: told why a key file says nothing about who signed: damaged, or open to others.
    """
    found = {}
    for name in publisher_names(paths):
        try:
            _, identity = load_publisher(paths, name)
        except FlareError as problem:
            passed_over(problem.message)
        else:
            found[identity.fingerprint] = PublisherProfile(name, identity.public_key)
    return found


def load_trust_store(paths: Paths, file: Path | None = None) -> TrustStore:
    """Return the publishers that were accepted here; none where there is no trust store yet.

    Args:
        file: another trust store than this account's own.

    Raises:
        ConfigError: the file is damaged, or others can change it.
    """
    file = file or paths.trust_store
    try:
        data = read_trusted(file, MAX_TRUST_STORE, "The trust store", ConfigError)
    except NotFoundError:
        return TrustStore()
    try:
        return TrustStore.from_text(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"The trust store {file} is not UTF-8 text.") from None
    except ConfigError as problem:
        raise ConfigError(f"{file}: {problem.message}") from None


def accept_publisher(paths: Paths, profile: PublisherProfile, file: Path | None = None) -> bool:
    """Record that cores of this publisher are accepted here; tell whether that is new.

    Args:
        file: another trust store than this account's own.

    Raises:
        ConfigError: the trust store is damaged.
        StorageError: it cannot be written.
        BusyError: another command changes it and does not finish.
    """
    file = file or paths.trust_store
    if load_trust_store(paths, file).accepts(profile.fingerprint):
        return False
    ensure_private_folder(file.parent)
    with locked(file):
        store = load_trust_store(paths, file)  # as it is under the lock
        if store.accepts(profile.fingerprint):
            return False
        write_atomic(file, store.with_accepted(profile).to_text().encode("utf-8"))
    return True


def ask_acceptance(core: object, fingerprint: str, confirm: Callable[[str], bool | None]) -> None:
    """Show a person the publisher of a core that is not accepted here, and ask.

    Args:
        core: how the core is named, for the sentences.
        confirm: asks a question; None where nobody can answer.

    Raises:
        TrustError: the answer is no; or nobody can be asked, with the word that accepts the publisher.
    """
    answer = confirm(
        f"The core {core} is signed by a publisher that is not accepted here.\n"
        f"  fingerprint {fingerprint}\n"
        "Compare it with what `flare publisher show` prints where the core was made. Accept this publisher?"
    )
    if answer is None:
        raise TrustError(
            f"The core {core} is signed by a publisher that is not accepted here, and nobody can be asked. "
            "Compare the fingerprint with its owner, then run the command again with\n"
            f"  --accept-publisher {fingerprint}"
        )
    if not answer:
        raise TrustError(f"The publisher {fingerprint} was not accepted, so nothing was started.")
