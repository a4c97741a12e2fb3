"""`flare orbit attach`."""

from __future__ import annotations

import click

from flare.cli import output
from flare.cli.orbit_common import cluster_option, complete_runs, open_controller, run_async


@click.command(short_help="Follow a group's output; Ctrl-C detaches.")
@click.argument("group", required=False, shell_complete=complete_runs)
@cluster_option
def attach(group: str | None, cluster: str | None) -> None:
    """Follow what a group's ranks print: what their agents kept, then live.

    GROUP is a name or a launch identifier; a name means what runs under it, else its newest launch. Without
    GROUP every run of the cluster is followed. Ctrl-C detaches and stops nothing. Ends with exit code 15 when
    the group failed.

    \b
    Example:  flare orbit attach glm53
              flare orbit attach glm53-20261019T153000Z-3f9c
    """
    from flare.orbit.client import Client
    from flare.orbit.groups import attach as attach_to

    controller = open_controller()
    nodes = controller.orbit.scope(cluster)
    try:
        run_async(attach_to(Client(controller), nodes, group))
    except KeyboardInterrupt:
        output.note("Detached; the group goes on.")
