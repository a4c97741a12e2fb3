"""`flare orbit push`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flare.cli import output
from flare.cli.orbit_common import NodeListCommand, complete_nodes, json_option, open_controller, run_async

if TYPE_CHECKING:
    from flare.orbit.controller import Controller
    from flare.orbit.push import PushRequest
    from flare_workers.spawner import SpawnerHandle


@click.command(cls=NodeListCommand, short_help="Place a core on nodes ahead of any launch.")
@click.argument("core")
@click.option(
    "--to",
    metavar="NODE,...",
    required=True,
    shell_complete=complete_nodes,
    help="Who receives; with one node for each rank, in rank order.",
)
@click.option("--roce-ring", is_flag=True, help="The nodes are cabled as a ring, in this order.")
@click.option("--roce-chain", is_flag=True, help="The nodes are cabled as a chain, in this order.")
@click.option("--transfer-streams", type=int, metavar="N", help="Parallel connections a file (default 8).")
@click.option(
    "--resume",
    is_flag=True,
    help="Keep verified blocks when a transfer between nodes fails, and go on from them. What this host "
    "uploads goes on with the files that did not arrive whole, with this option or without it.",
)
@click.option("--accept-publisher", metavar="FINGERPRINT", help="Accept this publisher without a question.")
@click.option("--dry-run", is_flag=True, help="Print who would receive what, and stop there.")
@json_option
def push(
    core: str, to: str, roce_ring: bool, roce_chain: bool, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Place a core on nodes, without starting anything.

    CORE is a primary .safetensors file here, or NODE:/absolute/path on a paired node. With one node for each
    rank of a multi-host core the first one receives the complete core and each other one its rank's data;
    with any other number of nodes everybody receives the complete core. Bytes between nodes take the fabric
    interfaces that the nodes report, and are verified as they arrive. Ctrl-C ends the transfers at the nodes.

    The plan comes first, without what the nodes' caches are known to have already; with --json, to_send is
    what is still to come of a node's bytes.

    \b
    Example:  flare orbit push ./glm53-tp2.safetensors --to maxwell,hertz
              flare orbit push maxwell:/data/glm53-tp4.safetensors \\
                  --to maxwell,hertz,volta,tesla --roce-ring
    """
    from flare.orbit.push import plan_request
    from flare.orbit.request import parse_names

    controller = open_controller(quiet=as_json)
    request = plan_request(
        controller.orbit,
        core,
        parse_names(to, "--to"),
        ring=roce_ring,
        chain=roce_chain,
        streams=options["transfer_streams"],
        resume=options["resume"],
        accept_publisher=options["accept_publisher"],
    )
    _push(controller, request, dry_run, as_json)


def _push(controller: Controller, request: PushRequest, dry_run: bool, as_json: bool) -> None:
    from flare.cores.reference import LocalReference

    spawner = None
    if isinstance(request.reference, LocalReference) and not dry_run:
        from flare_workers.spawner import start

        # Upload workers are forked from a process that has neither an event loop nor a thread.
        spawner = start()
    try:
        run_async(_run(controller, request, spawner, dry_run, as_json))
    finally:
        if spawner is not None:
            spawner.close()


async def _run(
    controller: Controller,
    request: PushRequest,
    spawner: SpawnerHandle | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    from flare.orbit.client import Client
    from flare.orbit.distribution import distribute, raise_failures, report_delivered
    from flare.orbit.push import plan_push, report_plan

    client = Client(controller)
    plan = await plan_push(client, request, dry_run=dry_run)
    report_plan(client, plan)
    outcomes = [] if dry_run else await distribute(client, plan, spawner)
    report_delivered(client, outcomes)
    if as_json:
        nodes = plan.deliveries if dry_run else outcomes
        output.print_json(
            {
                "core": str(plan.core.reference),
                "export": plan.core.export,
                "publisher": plan.core.primary.fingerprint,
                "fabric": plan.fabric is not None,
                "nodes": [node.to_json() for node in nodes],
            }
        )
    raise_failures(outcomes)
