"""`flare orbit stop`."""

from __future__ import annotations

import click

from flare.cli import output
from flare.cli.orbit_common import cluster_option, complete_runs, json_option, open_controller, run_async


@click.command(short_help="Stop groups, rank zero first.")
@click.argument("group", required=False, shell_complete=complete_runs)
@cluster_option
@click.option("--now", is_flag=True, help="End running requests at once instead of finishing them.")
@json_option
def stop(group: str | None, cluster: str | None, now: bool, as_json: bool) -> None:
    """Stop a running group: rank zero finishes its requests, then all ranks end.

    GROUP is a name or a launch identifier; without it every running group of the cluster is stopped. Peers
    that are still there 30 seconds after rank zero ended are told to stop too. Ctrl-C takes nothing back: the
    nodes go on with it.

    \b
    Example:  flare orbit stop glm53
              flare orbit stop --cluster sparks --now
    """
    from flare.orbit.client import Client
    from flare.orbit.groups import stop as stop_groups

    controller = open_controller(quiet=as_json)
    nodes = controller.orbit.scope(cluster)
    stopped = run_async(stop_groups(Client(controller), nodes, group, now=now))
    if as_json:
        output.print_json({"stopped": [rank.to_json() for rank in stopped]})
