"""`flare orbit controllers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flare.cli import output
from flare.cli.main import HelpfulGroup
from flare.cli.orbit_common import json_option, open_controller, run_async

if TYPE_CHECKING:
    from flare.orbit.administration import Distribution


@click.group(cls=HelpfulGroup, short_help="Say who else controls these nodes.")
def controllers() -> None:
    """Say who else controls these nodes: list, add or remove controllers.

    \b
    Example:  flare orbit controllers list                    on the new controller: prints its key
              flare orbit controllers add laptop d4e5...      on this one
    """


@controllers.command("list", short_help="List the controller set and this controller's key.")
@json_option
def list_(as_json: bool) -> None:
    """List the controllers that this orbit file authorizes, and this host's own key.

    \b
    Example:  flare orbit controllers list --json
    """
    from flare.identity import fingerprint

    controller = open_controller(quiet=as_json)
    known = controller.controllers
    entries = known.controllers if known is not None else ()
    own = controller.identity.public_key
    if as_json:
        output.print_json(
            {
                "revision": known.revision if known is not None else 0,
                "own_public_key": own.hex(),
                "controllers": [
                    {
                        "name": entry.name,
                        "public_key": entry.public_key.hex(),
                        "fingerprint": fingerprint(entry.public_key),
                    }
                    for entry in entries
                ],
            }
        )
        return
    if entries:
        output.table(
            ("controller", "public key", ""),
            [
                (entry.name, entry.public_key.hex(), "this one" if entry.public_key == own else "")
                for entry in entries
            ],
        )
    if not any(entry.public_key == own for entry in entries):
        output.say(f"This controller's public key: {own.hex()}")
        output.note(
            "It is in no controller set yet: pair a node, or have another controller add it and copy its "
            "orbit.toml."
        )


@controllers.command(short_help="Authorize another controller on every node.")
@click.argument("name")
@click.argument("public_key")
def add(name: str, public_key: str) -> None:
    """Authorize another controller: sign the next controller set and bring it to every node.

    PUBLIC_KEY is what `flare orbit controllers list` prints on the other controller.

    \b
    Example:  flare orbit controllers add laptop d4e5...
    """
    from flare.orbit.administration import add_controller

    report(run_async(add_controller(open_controller(), name, public_key)), f"Added {name}")
    output.note(
        "Copy this orbit.toml ([controllers] and [[node]]) to the new controller; never copy the private key."
    )


@controllers.command(short_help="Revoke a controller on every node.")
@click.argument("key")
def remove(key: str) -> None:
    """Revoke a controller: sign the next controller set without it and bring it to every node.

    KEY is a controller's name, public key or fingerprint. A node that does not answer trusts the removed key
    until any controller with the new set connects to it.

    \b
    Example:  flare orbit controllers remove laptop
    """
    from flare.orbit.administration import remove_controller

    report(run_async(remove_controller(open_controller(), key)), f"Removed {key}")


def report(distribution: Distribution, what: str) -> None:
    """Print which nodes have the new set; ends with the exit code of those that missed it, if any did."""
    from flare.errors import UnreachableError
    from flare.orbit.client import common_kind

    output.say(f"{what}: revision {distribution.controllers.revision} of the controller set.")
    for answer in distribution.answers:
        if answer.error is None:
            output.say(f"  {answer.node.name} has it")
    errors = [answer.error for answer in distribution.answers if answer.error is not None]
    for answer in distribution.answers:
        if answer.error is not None:
            output.warn(f"{answer.node.name} does not have it yet: {answer.error.message}")
    if errors:
        output.note(
            "Nodes that missed it receive it when a controller next talks to them (flare orbit status)."
        )
        raise SystemExit(common_kind(errors, UnreachableError).exit_code)
