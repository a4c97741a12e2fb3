"""`flare orbit cores`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flare.cli import output
from flare.cli.orbit_common import cluster_option, json_option, open_controller, run_async

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flare.wire.messages import CoreReport


@click.command(short_help="List the cores in the nodes' caches.")
@cluster_option
@json_option
def cores(cluster: str | None, as_json: bool) -> None:
    """List every cache directory of the cluster's nodes: which core, files, bytes on disk, verified or not.

    VERIFIED is "yes" once all that lies there was held against the core's signed digests. Nodes do that with
    what they fetch from each other; what a controller uploaded says "not yet" until a rank has digested it,
    which every rank does before it loads unverified data. Nothing is wrong with it.

    \b
    Example:  flare orbit cores --cluster sparks
    """
    from flare.orbit.client import Client
    from flare.orbit.groups import warn_unreachable
    from flare.orbit.status import core_names, cores_document

    controller = open_controller(quiet=as_json)
    client = Client(controller)
    nodes = controller.orbit.scope(cluster)
    answers = run_async(client.statuses(nodes))
    warn_unreachable(client, answers)
    if as_json:
        output.print_json(cores_document(answers))
        return
    found = [
        (answer.node.name, core)
        for answer in answers
        if answer.reply is not None
        for core in answer.reply.cores
    ]
    if found:
        print_cores(found, core_names(answers))
    else:
        output.say("No node has a core in its cache.")


def print_cores(cores_of_nodes: Sequence[tuple[str, CoreReport]], names: Mapping[str, str]) -> None:
    """Print one row a cache directory.

    Args:
        names: what the cores are called, by export.
    """
    output.table(
        ("node", "core", "files", "on disk", "verified", "directory"),
        [
            (
                node,
                names.get(core.export or ""),
                len(core.files),
                output.human_bytes(core.bytes),
                "yes" if core.verified else "not yet",
                core.name,
            )
            for node, core in cores_of_nodes
        ],
    )
