"""`flare publisher`: the keys that sign cores, and whom this controller accepts."""

from __future__ import annotations

import click

from flare.cli.main import HelpfulGroup


@click.group(cls=HelpfulGroup)
def publisher() -> None:
    """Make and accept the keys that sign cores."""


@publisher.command()
@click.argument("name")
def create(name: str) -> None:
    """Make a publisher's key on this machine, readable by its owner alone.

    Whoever holds it can sign cores that every controller which accepted it will load.
    """
    from flare.cli.output import note, say
    from flare.cores.publisher_keys import create_publisher
    from flare.paths import Paths

    paths = Paths.from_environment()
    identity = create_publisher(paths, name)
    say(f"Created the publisher {name}.")
    say(f"fingerprint  {identity.fingerprint}")
    note(
        f"Its key lies in {paths.publisher_keys}: keep a backup. Pass on what `flare publisher show {name}` "
        "prints; controllers accept it with `flare publisher accept`."
    )


@publisher.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str | None, as_json: bool) -> None:
    """Print a publisher's public profile, to pass on; without NAME that of the only one here."""
    from flare.cli.output import print_json, say
    from flare.cores.publisher_keys import load_publisher
    from flare.paths import Paths
    from flare.trust.publishers import PublisherProfile

    name, identity = load_publisher(Paths.from_environment(), name, word="`flare publisher show NAME`")
    profile = PublisherProfile(name, identity.public_key)
    if as_json:
        print_json(_described(profile))
    else:
        say(profile.to_text().rstrip("\n"))


@publisher.command()
@click.argument(
    "profile", required=False, type=click.Path(dir_okay=False, readable=False, allow_dash=True), default="-"
)
@click.option("--fingerprint", "expected", metavar="HEX", help="Accept only the key with this fingerprint.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def accept(profile: str, expected: str | None, yes: bool) -> None:
    """Accept a publisher's cores on this controller.

    PROFILE is a file that `flare publisher show` printed; `-` or nothing reads it from standard input.
    """
    import sys
    from pathlib import Path

    from flare.cli.output import confirm, note, say
    from flare.cores.publisher_keys import accept_publisher
    from flare.errors import ConfigError, TrustError, UsageError
    from flare.files import read_bounded
    from flare.paths import Paths
    from flare.trust.publishers import MAX_PROFILE, PublisherProfile

    if profile == "-":
        if sys.stdin.isatty():
            note("Paste the profile, then press Ctrl-D.")
        data = sys.stdin.buffer.read(MAX_PROFILE + 1)
    else:
        data = read_bounded(Path(profile), MAX_PROFILE, "The publisher profile", ConfigError)
    try:
        read = PublisherProfile.from_text(data[:MAX_PROFILE].decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError("The publisher profile is not UTF-8 text.") from None
    if expected is not None and expected.lower() != read.fingerprint:
        raise TrustError(
            f"The profile of {read.name} has the fingerprint {read.fingerprint}, not the one that you gave. "
            "It was not accepted."
        )
    if expected is None and not yes:
        answer = confirm(
            f"Publisher {read.name}\nfingerprint  {read.fingerprint}\n"
            "Every node of this controller will load cores that it signs. Accept it?"
        )
        if answer is None:
            raise UsageError(
                f"The profile of {read.name} has the fingerprint {read.fingerprint}, and nobody can be asked "
                f"here. If that is right, give --fingerprint {read.fingerprint}."
            )
        if not answer:
            raise TrustError(f"The publisher {read.name} was not accepted.")
    new = accept_publisher(Paths.from_environment(), read)
    say(f"Accepted the publisher {read.name}." if new else f"The publisher {read.name} was accepted already.")


@publisher.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_publishers(as_json: bool) -> None:
    """List the publishers of this account, and those that are accepted here."""
    from flare.cli.output import print_json, say, table
    from flare.cores.publisher_keys import load_publisher, load_trust_store, publisher_names
    from flare.paths import Paths
    from flare.trust.publishers import PublisherProfile

    paths = Paths.from_environment()
    own = [
        PublisherProfile(name, load_publisher(paths, name)[1].public_key) for name in publisher_names(paths)
    ]
    store = load_trust_store(paths)
    if as_json:
        print_json({"own": [*map(_described, own)], "accepted": [*map(_described, store.publishers)]})
        return
    rows = [(each.name, "own", "yes", each.fingerprint) for each in own]  # nobody is asked about them
    ours = {each.fingerprint for each in own}
    rows += [
        (each.name, "other", "yes", each.fingerprint)
        for each in store.publishers
        if each.fingerprint not in ours
    ]
    if rows:
        table(("name", "key", "accepted", "fingerprint"), rows)
    else:
        say(
            "No publishers yet. `flare publisher create NAME` makes one, "
            "`flare publisher accept PROFILE` takes another's."
        )


def _described(profile: object) -> dict[str, str]:
    from flare.trust.publishers import PublisherProfile

    assert isinstance(profile, PublisherProfile)
    return {
        "name": profile.name,
        "public_key": profile.public_key.hex(),
        "fingerprint": profile.fingerprint,
    }
