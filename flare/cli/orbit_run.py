"""`flare orbit run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flare.cli import output
from flare.cli.orbit_common import (
    NodeListCommand,
    complete_clusters,
    complete_groups,
    complete_nodes,
    open_controller,
    run_async,
)
from flare.cli.serving import serving_options, serving_words

if TYPE_CHECKING:
    from flare.orbit.controller import Controller
    from flare.orbit.request import LaunchRequest
    from flare_workers.spawner import SpawnerHandle


@click.command(cls=NodeListCommand, short_help="Place a core on nodes, start its group and follow it.")
@click.argument("core", required=False)
@click.option(
    "--cluster",
    metavar="NAME",
    shell_complete=complete_clusters,
    help="Candidate nodes: a cluster's, in its order.",
)
@click.option(
    "--nodes", metavar="NODE,...", shell_complete=complete_nodes, help="Candidate nodes in rank order."
)
@click.option(
    "--name",
    metavar="GROUP",
    shell_complete=complete_groups,
    help="The group's name; without CORE the saved group to start.",
)
@click.option("--gpus", metavar="N,...", help="Device indices that every member uses on its node.")
@click.option("--persistent", is_flag=True, help="Save this launch under --name in the orbit file.")
@click.option("--dry-run", is_flag=True, help="Print the placement and stop there.")
@click.option("--detach", is_flag=True, help="Return once the ranks run instead of following them.")
@click.option(
    "--transfer-streams", type=int, metavar="N", help="Parallel connections for core data (default 8)."
)
@click.option("--roce-ring", is_flag=True, help="The ranks' nodes are cabled as a ring, in rank order.")
@click.option("--roce-chain", is_flag=True, help="The ranks' nodes are cabled as a chain, in rank order.")
@click.option("--accept-publisher", metavar="FINGERPRINT", help="Accept this publisher without a question.")
@click.option("--executable", metavar="FILE", help="Upload this Flare build and run it on every node.")
@click.option(
    "--publisher-key", "publisher_keys", multiple=True, metavar="FILE", help="Also trust this profile."
)
@click.option("--trust-store", metavar="FILE", help="Use this trust store instead of the controller's own.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run or --detach: print one JSON document.")
@serving_options
def run(core: str | None, dry_run: bool, detach: bool, as_json: bool, **arguments: Any) -> None:
    """Place a core's ranks on nodes, start them under their agents, and follow their output.

    CORE is a primary .safetensors file here, or NODE:/absolute/path on a paired node. Ctrl-C stops the
    group, a second Ctrl-C leaves at once. Ends with exit code 15 when a rank failed, and with 0 when the
    group stopped cleanly, also after Ctrl-C.

    \b
    Example:  flare orbit run ./smollm2-tp2.safetensors --dry-run
              flare orbit run maxwell:/data/glm53-tp2.safetensors --cluster sparks \\
                  --name glm53 --persistent --detach --host 0.0.0.0 --max-concurrency 16
              flare orbit run --name glm53 --detach
    """
    from flare.errors import UsageError
    from flare.orbit.request import RunOptions, parse_indices, parse_names, plan_request

    if as_json and not (dry_run or detach):
        raise UsageError("--json needs --dry-run or --detach: a followed group prints lines as they come.")
    words = serving_words(arguments)
    gpus, nodes = arguments.pop("gpus"), arguments.pop("nodes")
    controller = open_controller(quiet=as_json)
    request = plan_request(
        controller.orbit,
        RunOptions(
            core=core,
            nodes=parse_names(nodes, "--nodes") if nodes is not None else (),
            gpus=parse_indices(gpus) if gpus is not None else None,
            serving=words,
            **arguments,
        ),
    )
    document = _launch(controller, request, arguments["persistent"], dry_run=dry_run, detach=detach)
    if as_json:
        output.print_json(document)


def _launch(
    controller: Controller, request: LaunchRequest, persistent: bool, *, dry_run: bool, detach: bool
) -> dict[str, Any]:
    from flare.cores.reference import LocalReference
    from flare.orbit.attended import OperatorLeftError

    spawner = None
    uploads = isinstance(request.reference, LocalReference) or request.executable is not None
    if uploads and not dry_run:
        from flare_workers.spawner import start

        # Upload workers are forked from a process that has neither an event loop nor a thread.
        spawner = start()
    try:
        work = _run(controller, request, spawner, persistent=persistent, dry_run=dry_run, detach=detach)
        return run_async(work)
    except OperatorLeftError as left:
        raise SystemExit(left.exit_code) from None
    finally:
        if spawner is not None:
            spawner.close()


async def _run(
    controller: Controller,
    request: LaunchRequest,
    spawner: SpawnerHandle | None,
    *,
    persistent: bool,
    dry_run: bool,
    detach: bool,
) -> dict[str, Any]:
    from flare.orbit.attended import run_attended
    from flare.orbit.client import Client
    from flare.orbit.launch import plan_launch, report_plan, save_definition

    client = Client(controller)
    plan = await plan_launch(client, request, dry_run=dry_run)
    report_plan(client, plan)
    if dry_run:
        return plan.to_json()
    if persistent:
        save_definition(client, plan)
    return (await run_attended(client, plan, spawner, detach=detach)).to_json()
