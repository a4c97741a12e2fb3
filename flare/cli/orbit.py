"""`flare orbit`: the controller's commands, each imported when it is called."""

from __future__ import annotations

import click

from flare.cli.main import LazyGroup


class OrbitGroup(LazyGroup):
    """The table of orbit commands."""

    table = {  # noqa: RUF012 - a constant that click's class gives us no better place for
        "pair": ("flare.cli.orbit_pair", "pair", "Pair nodes with this controller and record them."),
        "status": ("flare.cli.orbit_status", "status", "Show nodes, devices, groups and caches."),
        "run": ("flare.cli.orbit_run", "run", "Place a core on nodes, start its group and follow it."),
        "push": ("flare.cli.orbit_push", "push", "Place a core on nodes ahead of any launch."),
        "ls": ("flare.cli.orbit_ls", "ls", "List saved groups and runs."),
        "attach": ("flare.cli.orbit_attach", "attach", "Follow a group's output; Ctrl-C detaches."),
        "stop": ("flare.cli.orbit_stop", "stop", "Stop groups, rank zero first."),
        "rm": ("flare.cli.orbit_rm", "rm", "Remove a stopped group's definition and history."),
        "cores": ("flare.cli.orbit_cores", "cores", "List the cores in the nodes' caches."),
        "controllers": ("flare.cli.orbit_controllers", "controllers", "Say who else controls these nodes."),
        "forget": ("flare.cli.orbit_forget", "forget", "Remove a node from the orbit file."),
    }


@click.group(cls=OrbitGroup, short_help="Control paired nodes.")
def orbit() -> None:
    """Control paired nodes: this host is the controller.

    \b
    First:  flare orbit pair HOST...            once for each serving host
    Then:   flare orbit run CORE                place it, start it, follow it
    Watch:  flare orbit status, ls, attach
    """
