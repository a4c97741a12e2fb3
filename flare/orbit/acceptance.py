"""Accepting the publisher of a core: once, by a person who saw the fingerprint, or as the operator's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flare.cores.publisher_keys import accept_publisher as store_accepted
from flare.cores.publisher_keys import ask_acceptance, load_trust_store, own_publishers
from flare.errors import ConfigError, TrustError
from flare.files import read_bounded
from flare.orbit.controller import Controller
from flare.orbit.resolve import Core
from flare.trust.publishers import MAX_PROFILE, PublisherProfile


def accept_publisher(
    controller: Controller,
    core: Core,
    *,
    trust_store: Path | None,
    profiles: Sequence[Path] = (),
    accepted: str | None = None,
) -> PublisherProfile:
    """Return the profile of the core's publisher, which must be accepted here.

    A publisher whose private key lies in this account is the operator's own, and accepted without a question.
    Another unknown one is shown with its fingerprint and asked about on a terminal; without one it has to be
    named by `accepted`. What was accepted is kept in the trust store.

    Args:
        trust_store: another file than the controller's own.
        profiles: public profile files that were passed for this launch; they count as accepted for it alone.
        accepted: a fingerprint that the command line accepts.

    Raises:
        TrustError: the publisher is not accepted; the message has the command that accepts it.
        ConfigError: the trust store or a profile is damaged.
    """
    fingerprint = core.primary.fingerprint
    known, own = _known(controller, fingerprint, trust_store, profiles)
    if known is not None:
        if own and store_accepted(controller.paths, known, trust_store):
            keys = controller.paths.publisher_keys
            controller.reporter.note(f"Accepted your own publisher {known.name}: its key lies in {keys}.")
        return known
    _check_named(accepted, fingerprint)
    profile = _unnamed(core)
    if accepted is None:
        ask_acceptance(core.reference, fingerprint, controller.reporter.confirm)
    store_accepted(controller.paths, profile, trust_store)
    kept = trust_store or controller.paths.trust_store
    controller.reporter.note(f"Accepted the publisher {fingerprint} (kept in {kept}).")
    return profile


def preview_publisher(
    controller: Controller,
    core: Core,
    *,
    trust_store: Path | None,
    profiles: Sequence[Path] = (),
    accepted: str | None = None,
) -> tuple[PublisherProfile, bool]:
    """Look at the core's publisher for a dry run: nobody is asked, and nothing is recorded.

    Args: as `accept_publisher`.

    Returns:
        Its profile, and whether a run takes it without a question; if not, that was told.

    Raises:
        TrustError: `accepted` names another publisher.
        ConfigError: as `accept_publisher`.
    """
    fingerprint = core.primary.fingerprint
    known, _ = _known(controller, fingerprint, trust_store, profiles)
    if known is not None:
        return known, True
    _check_named(accepted, fingerprint)
    if accepted is not None:
        controller.reporter.note(f"A run accepts the publisher {fingerprint}; a dry run records nothing.")
        return _unnamed(core), True
    controller.reporter.note(
        f"The publisher of {core.reference} is not accepted here yet: a run shows its fingerprint and asks, "
        f"or takes\n  --accept-publisher {fingerprint}"
    )
    return _unnamed(core), False


def _check_named(accepted: str | None, fingerprint: str) -> None:
    if accepted is not None and accepted.lower() != fingerprint:
        raise TrustError(
            f"--accept-publisher names {accepted[:64]}, but the core is signed by {fingerprint}. Nothing was "
            "accepted."
        )


def _known(
    controller: Controller, fingerprint: str, trust_store: Path | None, profiles: Sequence[Path]
) -> tuple[PublisherProfile | None, bool]:
    """Find the publisher under its own name where that is known; tell whether its key lies here."""
    for profile in map(read_profile, profiles):
        if profile.fingerprint == fingerprint:
            return profile, False
    store = load_trust_store(controller.paths, trust_store)
    problems: list[str] = []
    own = own_publishers(controller.paths, problems.append).get(fingerprint)
    known = own or store.find(fingerprint)
    for problem in problems if known is None else ():  # it may be the key that signed
        controller.reporter.warn(f"A publisher's key of this account does not count. {problem}")
    return known, own is not None


def _unnamed(core: Core) -> PublisherProfile:
    """A profile for a publisher of whom nothing but the key is known."""
    return PublisherProfile(f"publisher-{core.primary.fingerprint[:12]}", core.primary.publisher)


def read_profile(path: Path) -> PublisherProfile:
    """Read a publisher's public profile."""
    data = read_bounded(path, MAX_PROFILE, "The publisher profile", ConfigError)
    try:
        return PublisherProfile.from_text(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"The publisher profile {path} is not UTF-8 text.") from None
