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

    The directory "resuming" is what failed transfers with --resume left, and "blobs" what no core links any
    more: both go when room is needed.

    \b
    Example:  flare orbit cores --cluster sparks
    """
    from flare.orbit.client import Client
    from flare.orbit.groups import warn_unreachable
    from flare.orbit.status import cached, core_names, cores_document

    controller = open_controller(quiet=as_json)
    client = Client(controller)
    nodes = controller.orbit.scope(cluster)
    answers = run_async(client.statuses(nodes))
    warn_unreachable(client, answers)
    if as_json:
        output.print_json(cores_document(answers))
        return
    found = cached(answers)
    if found:
        print_cores(found, core_names(answers))
    else:
        output.say("No node has a core in its cache.")


def print_cores(cores_of_nodes: Sequence[tuple[str, CoreReport]], names: Mapping[str, str]) -> None:
    """Print one row a cache directory.

    Args:
        names: what the cores are called, by export.
    """
    from flare.orbit.status import BLOBS, RESUMING

    beside = {RESUMING: "unfinished transfers", BLOBS: "unused blobs"}
    output.table(
        ("node", "core", "files", "on disk", "verified", "directory"),
        [
            (
                node,
                beside.get(core.name) or names.get(core.export or ""),
                None if core.name in beside else len(core.files),
                output.human_bytes(core.bytes),
                None if core.name in beside else "yes" if core.verified else "not yet",
                core.name,
            )
            for node, core in cores_of_nodes
        ],
    )
