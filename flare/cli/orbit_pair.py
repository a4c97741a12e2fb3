"""`flare orbit pair`."""

from __future__ import annotations

import click

from flare.cli import output
from flare.cli.orbit_common import json_option, open_controller, run_async

CODE_PROMPT = "Join code that the host printed (empty when it accepts the first controller)"
MAX_CODE_LINE = 4096  # characters; a code has 39


@click.command(short_help="Pair nodes with this controller and record them.")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option("--code", metavar="CODE|-", help="The join code; `-` reads it from standard input.")
@click.option("--name", metavar="NAME", help="Call the node this instead of its own name (one HOST only).")
@json_option
def pair(hosts: tuple[str, ...], code: str | None, name: str | None, as_json: bool) -> None:
    """Pair nodes: this controller may then run groups on them.

    HOST is a name or address, with :PORT when it is not 29900. Compare each printed fingerprint with what
    `flare agent install` printed at the host. One code for several hosts lets those hosts stand in for each
    other.

    \b
    Example:  flare orbit pair maxwell hertz --code AAAA-BBBB-CCCC-DDDD-EEEE-FFFF-GGGG-HHHH
              echo $CODE | flare orbit pair 10.0.0.7:29901 --code -
    """
    pair_hosts(hosts, code, name, as_json)


def pair_hosts(hosts: tuple[str, ...], code: str | None, name: str | None, as_json: bool) -> None:
    """Pair and print the outcomes, for `flare agent pair` too. Ends with the first failure's exit code."""
    from flare.errors import UsageError
    from flare.orbit.pairing import pair as pair_nodes

    if name is not None and len(hosts) > 1:
        raise UsageError("--name names one node; give one HOST with it.")
    outcomes = run_async(pair_nodes(open_controller(quiet=as_json), hosts, code=read_code(code), name=name))
    if as_json:
        output.print_json(
            [
                {
                    "host": outcome.host,
                    "name": outcome.node and outcome.node.name,
                    "fingerprint": outcome.node and outcome.node.fingerprint,
                    "address": outcome.node and outcome.node.address,
                    "known": outcome.known,
                    "error": outcome.error and outcome.error.message,
                }
                for outcome in outcomes
            ]
        )
    for outcome in outcomes:
        if outcome.error is not None:
            output.fail(outcome.error.message)
        elif outcome.node is not None and not as_json:
            word = "Already paired" if outcome.known else "Paired"
            output.say(f"{word}: {outcome.node.name} at {outcome.node.address}")
            output.say(f"  fingerprint {outcome.node.fingerprint}")
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(failed) < len(outcomes) and not as_json:
        output.note(
            "Compare each fingerprint with what the host printed (`flare agent status` there prints it "
            "again)."
        )
    if failed:
        raise SystemExit(failed[0].exit_code)


def read_code(code: str | None) -> str | None:
    """Return the join code: as given, from standard input for "-", or asked for on a terminal; else None.

    Raises:
        UsageError: a code was promised, and it is empty.
    """
    import sys

    from flare.errors import UsageError

    if code == "-":
        code = sys.stdin.readline(MAX_CODE_LINE).strip()
    if code == "":
        # Whoever wanted a proof must not get a pairing without one because a variable was empty.
        raise UsageError(
            "The join code is empty. Leave --code out to pair with a node that accepts the first."
        )
    if code is not None:
        return code
    if sys.stdin.isatty() and sys.stderr.isatty():
        answer: str = click.prompt(CODE_PROMPT, default="", show_default=False, err=True)
        return answer.strip() or None
    return None
