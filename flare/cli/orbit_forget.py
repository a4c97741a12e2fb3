"""`flare orbit forget`."""

from __future__ import annotations

import click

from flare.cli import output
from flare.cli.orbit_common import complete_nodes, open_controller


@click.command(short_help="Remove a node from the orbit file.")
@click.argument("node", shell_complete=complete_nodes)
def forget(node: str) -> None:
    """Remove a node from this controller's orbit file. The node itself is not asked and changes nothing.

    \b
    Example:  flare orbit forget maxwell
    """
    from flare.orbit.administration import forget_node

    forgotten = forget_node(open_controller(), node)
    output.say(f"Forgot {node} ({forgotten.node.address}).")
    for kind, names in (("cluster", forgotten.clusters), ("saved group", forgotten.groups)):
        for name in names:
            output.warn(f"The {kind} {name} still names {node}: edit the orbit file.")
    output.note(f"The node still obeys this controller until `flare agent reset` is run on {node}.")
