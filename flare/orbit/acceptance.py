"""Accepting the publisher of a core: once, by a person who saw the fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flare.cores.publisher_keys import accept_publisher as store_accepted
from flare.cores.publisher_keys import load_trust_store
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

    An unknown publisher is shown with its fingerprint and asked about on a terminal; without one it has to be
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
    store = load_trust_store(controller.paths, trust_store)
    for known in (*store.publishers, *(read_profile(file) for file in profiles)):
        if known.fingerprint == fingerprint:
            return known
    if accepted is not None and accepted.lower() != fingerprint:
        raise TrustError(
            f"--accept-publisher names {accepted[:64]}, but the core is signed by {fingerprint}. Nothing was "
            "accepted."
        )
    profile = PublisherProfile(f"publisher-{fingerprint[:12]}", core.primary.publisher)
    if accepted is None:
        question = (
            f"The core {core.reference} is signed by a publisher that is not accepted here.\n"
            f"  fingerprint {fingerprint}\n"
            "Compare it with what `flare publisher show` prints where the core was made. Accept this "
            "publisher?"
        )
        answer = controller.reporter.confirm(question)
        if answer is None:
            raise TrustError(
                f"The core {core.reference} is signed by a publisher that is not accepted here, and nobody "
                "can be asked. Compare the fingerprint with its owner, then run the command again with\n"
                f"  --accept-publisher {fingerprint}"
            )
        if not answer:
            raise TrustError(f"The publisher {fingerprint} was not accepted, so nothing was started.")
    store_accepted(controller.paths, profile, trust_store)
    kept = trust_store or controller.paths.trust_store
    controller.reporter.note(f"Accepted the publisher {fingerprint} (kept in {kept}).")
    return profile


def read_profile(path: Path) -> PublisherProfile:
    """Read a publisher's public profile."""
    data = read_bounded(path, MAX_PROFILE, "The publisher profile", ConfigError)
    try:
        return PublisherProfile.from_text(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"The publisher profile {path} is not UTF-8 text.") from None
