"""`flare orbit status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flare.cli import output
from flare.cli.orbit_common import cluster_option, json_option, open_controller, run_async

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flare.orbit.client import Answer
    from flare.wire.messages import StatusReply


@click.command(short_help="Show nodes, devices, groups and caches.")
@cluster_option
@json_option
def status(cluster: str | None, as_json: bool) -> None:
    """Show every node of a cluster: reachable or not, its devices, its groups, its cache.

    A cached core that was uploaded is verified "not yet": each rank digests it when it loads it.

    When no node answered, the exit code is 4, or that of the reason that all share.

    \b
    Example:  flare orbit status
              flare orbit status --cluster sparks --json
    """
    from flare.errors import UnreachableError
    from flare.orbit.client import Client, common_kind
    from flare.orbit.status import status_document

    controller = open_controller(quiet=as_json)
    nodes = controller.orbit.scope(cluster)
    answers = run_async(Client(controller).statuses(nodes))
    if as_json:
        output.print_json(status_document(answers))
    else:
        _print(answers)
    errors = [answer.error for answer in answers if answer.error is not None]
    if len(errors) == len(answers):
        raise SystemExit(common_kind(errors, UnreachableError).exit_code)


def _print(answers: Sequence[Answer[StatusReply]]) -> None:
    from flare.cli.orbit_ls import print_runs
    from flare.orbit.runs import collect_runs
    from flare.orbit.status import cached, core_names, state_of

    output.table(
        ("node", "address", "state", "flare", "system", "engines", "cache free"),
        [_node_row(answer, state_of(answer)) for answer in answers],
    )
    replies = [(answer.node.name, answer.reply) for answer in answers if answer.reply is not None]
    devices = [
        (
            node,
            gpu.index,
            gpu.name,
            gpu.revision,
            f"{output.human_bytes(gpu.memory_free)} of {output.human_bytes(gpu.memory_total)}",
            gpu.group,
        )
        for node, reply in replies
        for gpu in reply.gpus
    ]
    if devices:
        output.say()
        output.table(("node", "device", "name", "revision", "memory free", "held by"), devices)
    for node, reply in replies:
        for problem in dict.fromkeys(gpu.problem for gpu in reply.gpus if gpu.problem is not None):
            output.warn(f"{node}: {problem}.")
    runs = collect_runs(answers)
    if runs:
        output.say()
        print_runs(runs)
    cores = cached(answers)
    if cores:
        from flare.cli.orbit_cores import print_cores

        output.say()
        print_cores(cores, core_names(answers))
    for answer in answers:
        if answer.error is not None:
            output.warn(answer.error.message)


def _node_row(answer: Answer[StatusReply], state: str) -> tuple[object, ...]:
    node = answer.node
    if answer.reply is None:
        return (node.name, node.address, state, None, None, None, None)
    facts = answer.hello.node if answer.hello is not None else None
    engines = ", ".join(f"{name} {version}" for name, version in answer.reply.engines.items()) or "none"
    return (
        node.name,
        node.address,
        state,
        facts and facts.flare_version,
        facts and f"{facts.os} {facts.arch}",
        engines,
        output.human_bytes(answer.reply.cache_free),
    )
