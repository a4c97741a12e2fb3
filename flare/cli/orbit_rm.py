"""`flare orbit rm`."""

from __future__ import annotations

import click

from flare.cli.orbit_common import complete_runs, open_controller, run_async


@click.command(short_help="Remove a stopped group's definition and history.")
@click.argument("group", shell_complete=complete_runs)
def rm(group: str) -> None:
    """Remove a saved group and the history of all its runs; with a launch identifier only that run's history.

    Every paired node must answer. Cached cores stay where they are.

    \b
    Example:  flare orbit rm glm53
              flare orbit rm glm53-20261019T153000Z-3f9c
    """
    from flare.orbit.client import Client
    from flare.orbit.groups import remove

    run_async(remove(Client(open_controller()), group))
