"""`flare orbit ls`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flare.cli import output
from flare.cli.orbit_common import cluster_option, json_option, open_controller, run_async

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flare.orbit.groups import Listing
    from flare.orbit.runs import Run


@click.command(short_help="List saved groups and runs.")
@cluster_option
@json_option
def ls(cluster: str | None, as_json: bool) -> None:
    """List saved groups and every run that the cluster's nodes keep, with devices and state.

    A saved group that runs nowhere is "unknown" while a node that may run it does not answer. When no node
    answered, the exit code is 4, or that of the reason that all share.

    \b
    Example:  flare orbit ls
              flare orbit ls --json | jq '.runs[] | select(.state == "running") | .url'
    """
    from flare.orbit.client import Client
    from flare.orbit.groups import list_groups, warn_unreachable

    controller = open_controller(quiet=as_json)
    client = Client(controller)
    nodes = controller.orbit.scope(cluster)
    listing = run_async(list_groups(client, nodes))
    if as_json:
        output.print_json(listing.to_json())
    else:
        _print(listing)
    warn_unreachable(client, listing.answers)


def _print(listing: Listing) -> None:
    if listing.runs:
        print_runs(listing.runs)
    stopped = [entry for entry in listing.saved if entry.state != "running"]
    if listing.runs and stopped:
        output.say()
    if stopped:
        output.table(
            ("saved group", "state", "core"),
            [(entry.definition.name, entry.state, entry.definition.core) for entry in stopped],
        )
    if not listing.runs and not stopped and any(answer.reply is not None for answer in listing.answers):
        output.say(
            "No group runs, none is retained and none is saved. Start one with `flare orbit run CORE`."
        )


def print_runs(runs: Sequence[Run]) -> None:
    """Print one row a run."""
    from flare.orbit.follow import describe_end

    output.table(
        ("group", "state", "phase", "up", "rank node:device", "url", "launch"),
        [
            (
                run.name,
                run.state,
                run.phase,
                output.human_duration(run.uptime),
                _ranks(run),
                run.url,
                run.launch,
            )
            for run in runs
        ],
    )
    for run in runs:
        # Earlier launches of a name stay listed: what is said of one must not be taken for another's.
        name = run.name if sum(other.name == run.name for other in runs) == 1 else run.launch
        for rank in run.ranks:
            report = rank.report
            if report.state == "failed" or report.remark:
                end = describe_end(report.status, report.signal, report.reason, report.remark)
                output.say(f"  {name} rank {report.rank} on {rank.node.name} {end or 'failed.'}")
        if run.missing and run.running:
            output.warn(f"{name}: no node that answered knows rank {', '.join(map(str, run.missing))}.")


def _ranks(run: Run) -> str:
    """Such as "0 maxwell:0, 1 hertz:2": each rank, its node and devices; "1 missing" if no node knows it.

    Of a run that has ended none is: a node forgets a rank that ended well sooner than one that failed.
    """
    cells = dict.fromkeys(run.missing if run.running else (), "missing")
    for rank in run.ranks:
        devices = ":" + "+".join(map(str, rank.devices)) if rank.devices else ""
        cells[rank.report.rank] = rank.node.name + devices
    return ", ".join(f"{rank} {cells[rank]}" for rank in sorted(cells))
