"""`flare orbit pair`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from flare.cli import output
from flare.cli.orbit_common import json_option, open_controller, run_async

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flare.errors import FlareError
    from flare.orbit.controller import Controller

MAX_CODE_LINE = 4096  # characters; a code has 39


@click.command(short_help="Pair nodes with this controller and record them.")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option(
    "--code",
    metavar="CODE|-",
    help="The join code, for all HOSTs; `-` reads a line for each HOST, or one for all, from stdin.",
)
@click.option("--name", metavar="NAME", help="Call the node this instead of its own name (one HOST only).")
@json_option
def pair(hosts: tuple[str, ...], code: str | None, name: str | None, as_json: bool) -> None:
    """Pair nodes: this controller may then run groups on them.

    HOST is a name or address, with :PORT when it is not 29900. Every host has a one-time code of its own,
    which `flare agent install` or `flare agent join-code` printed there; without --code you are asked in
    a terminal for those that are needed. Compare each printed fingerprint with what the host printed.

    One code for several hosts works where they were installed with it (`--join-code`), and lets those hosts
    stand in for each other. A node that has another address now is paired again under that address; no code
    is needed.

    \b
    Example:  flare orbit pair maxwell hertz                        asks for both codes
              echo $CODE | flare orbit pair 10.0.0.7:29901 --code -
              flare orbit pair maxwell hertz --code - < codes       one line each
    """
    pair_hosts(hosts, code, name, as_json)


def pair_hosts(hosts: tuple[str, ...], code: str | None, name: str | None, as_json: bool) -> None:
    """Pair and print the outcomes, for `flare agent pair` too. Ends with the first failure's exit code."""
    from flare.errors import UsageError
    from flare.orbit.pairing import Pairing
    from flare.orbit.pairing import pair as pair_nodes

    if name is not None and len(hosts) > 1:
        raise UsageError("--name names one node; give one HOST with it.")
    controller = open_controller(quiet=as_json)
    codes = read_codes(code, hosts)
    failures: dict[int, FlareError] = {}
    if codes is None:
        codes, failures = ask_for_codes(controller, hosts)
    left = [number for number in range(len(hosts)) if number not in failures]
    paired = run_async(
        pair_nodes(
            controller,
            [hosts[number] for number in left],
            codes=[codes[number] for number in left],
            name=name,
        )
    )
    found = dict(zip(left, paired, strict=True))
    outcomes = [
        found[number] if number in found else Pairing(host, error=failures[number])
        for number, host in enumerate(hosts)
    ]
    if as_json:
        output.print_json(
            [
                {
                    "host": outcome.host,
                    "name": outcome.node and outcome.node.name,
                    "fingerprint": outcome.node and outcome.node.fingerprint,
                    "address": outcome.node and outcome.node.address,
                    "known": outcome.known,
                    "moved": outcome.moved,
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
            if outcome.moved:
                output.say(f"Address updated: {outcome.node.name} is now at {outcome.node.address}")
            else:
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


def read_codes(code: str | None, hosts: Sequence[str]) -> list[str | None] | None:
    """Return a join code for each host: as given, or from standard input for "-".

    Returns:
        None for a host that is to be paired without a code; None alone where a person can be asked.

    Raises:
        UsageError: a code was promised, and it is empty; or there are not as many as hosts.
    """
    import sys

    from flare.errors import UsageError

    if code == "-":
        lines = [line.strip() for line in islice(iter(_read_line, ""), len(hosts))]
        while lines and not lines[-1]:
            lines.pop()
        if len(lines) > 1 and len(lines) != len(hosts):
            raise UsageError(
                f"Standard input has {len(lines)} join codes for {len(hosts)} hosts. Write one line for each "
                "host, in their order, or one line for all."
            )
    else:
        lines = [] if code is None else [code]
    if (code is not None and not lines) or not all(lines):
        # Whoever wanted a proof must not get a pairing without one because a variable was empty.
        raise UsageError(
            "The join code is empty. Leave --code out to pair with a node that accepts the first."
        )
    if lines:
        return [lines[0] if len(lines) == 1 else lines[number] for number in range(len(hosts))]
    return None if sys.stdin.isatty() and sys.stderr.isatty() else [None] * len(hosts)


def ask_for_codes(
    controller: Controller, hosts: Sequence[str]
) -> tuple[list[str | None], dict[int, FlareError]]:
    """Ask for the codes that are needed, once every host was tried.

    Returns:
        A code for each host, or None; and by their number the hosts that cannot be paired, and why.
    """
    from flare.errors import FlareError
    from flare.orbit.pairing import need_codes

    needs = run_async(need_codes(controller, hosts))
    failures = {number: need for number, need in enumerate(needs) if isinstance(need, FlareError)}
    pairs = zip(hosts, needs, strict=True)
    return [_ask_for_code(host) if need is True else None for host, need in pairs], failures


def _read_line() -> str:
    import sys

    return sys.stdin.readline(MAX_CODE_LINE)


def _ask_for_code(host: str) -> str | None:
    """Ask until what is typed is a code, or nothing."""
    from flare.errors import UsageError
    from flare.printable import printable
    from flare.trust.join_code import decode

    question = f"Code for {printable(host)} (flare agent join-code prints it there; empty: it needs none)"
    while True:
        with output.asking():
            answer: str = click.prompt(question, default="", show_default=False, err=True).strip()
        try:
            if answer:
                decode(answer)
        except UsageError as problem:
            output.note(problem.message)
        else:
            return answer or None
