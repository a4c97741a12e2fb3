"""What the orbit commands share: the reporter, the options, and the way into asyncio."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flare.cli import output

if TYPE_CHECKING:
    from flare.orbit.controller import Controller
    from flare.orbit.orbit_records import NodeEntry
    from flare.orbit.reporter import Bar
    from flare.wire.messages import Hello, StatusReply

Result = TypeVar("Result")

COMPLETION_SECONDS = 1.0  # a shell that hangs at Tab is worse than a name that is missing


def _names(kind: str, prefix: str) -> list[str]:
    """Names from orbit.toml for the shell; a file that cannot be read completes nothing."""
    from flare.errors import FlareError
    from flare.orbit.orbit_file import load_orbit_file
    from flare.paths import Paths

    try:
        orbit = load_orbit_file(Paths.from_environment().orbit_file)
    except FlareError:
        return []
    names = {
        "cluster": list(orbit.clusters),
        "group": list(orbit.groups),
        "node": [node.name for node in orbit.nodes],
    }
    return [name for name in names[kind] if name.startswith(prefix)]


def complete_clusters(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete a cluster's name."""
    return _names("cluster", incomplete)


def complete_groups(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete a saved group's name."""
    return _names("group", incomplete)


def complete_runs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a saved group or of a run; behind the whole name, launch identifiers."""
    runs = _runs()
    names = _names("group", incomplete) + [name for name, _ in runs if name.startswith(incomplete)]
    launches = [launch for _, launch in runs if launch.startswith(incomplete)]
    return list(dict.fromkeys(names or launches))


def _runs() -> list[tuple[str, str]]:
    """(name, launch) of what nodes run or keep; a node that does not answer in a moment completes nothing."""
    import asyncio

    from flare.errors import FlareError, UnreachableError
    from flare.orbit.client import Client
    from flare.orbit.controller import Controller
    from flare.paths import Paths
    from flare.wire.messages import Status

    paths = Paths.from_environment()
    if not paths.controller_key.exists():
        return []  # to complete a word is no reason to make a key

    async def ask(node: NodeEntry) -> tuple[Hello, StatusReply]:
        try:
            async with asyncio.timeout(COMPLETION_SECONDS):
                return await client.ask(node, Status())
        except TimeoutError:
            raise UnreachableError("Too slow for a person who pressed Tab.") from None

    try:
        client = Client(Controller.open(paths, SilentReporter()))
        answers = asyncio.run(client.for_all(client.controller.orbit.nodes, ask))
    except FlareError:
        return []
    replies = [answer.reply for answer in answers if answer.reply is not None]
    return [(group.name, group.launch) for reply in replies for group in reply.groups]


def complete_nodes(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the last name of a list of nodes."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _names("node", last)]


class NodeListCommand(click.Command):
    """A command with a list of nodes: `--to maxwell hertz` hears how names are joined."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words."""
        given = next((word for word in ("--to", "--nodes") if word in args), None)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as problem:
            if given is not None and "unexpected extra argument" in problem.message:
                joined = f"Names behind {given} are joined by commas: {given} maxwell,hertz."
                raise click.UsageError(f"{problem.message}. {joined}", ctx) from None
            raise


cluster_option = click.option(
    "--cluster",
    metavar="NAME",
    shell_complete=complete_clusters,
    help="The cluster of orbit.toml to work on; the only one is the default.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document for scripts.")


class SilentReporter:
    """Says nothing, for the shell's completion."""

    def say(self, text: str, /) -> None:
        """Drop a line of the result."""

    note = waiting = warn = say

    def confirm(self, question: str, /) -> bool | None:
        """Nobody can be asked."""
        return None

    def progress(self) -> AbstractContextManager[Callable[[str, int | None], Bar]]:
        """Show no bar."""
        return output.progress()


class TerminalReporter:
    """Says everything through flare.cli.output; `quiet` keeps standard output free for JSON."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def say(self, text: str, /) -> None:
        """Print a line of the result."""
        (output.note if self._quiet else output.say)(text)

    def note(self, text: str, /) -> None:
        """Print a remark on standard error."""
        output.note(text)

    def waiting(self, text: str, /) -> None:
        """Print what keeps a person waiting, on a terminal alone."""
        if sys.stderr.isatty():
            output.note(text)

    def warn(self, text: str, /) -> None:
        """Print a warning on standard error."""
        output.warn(text)

    def confirm(self, question: str, /) -> bool | None:
        """Ask on the terminal; None where there is none."""
        return output.confirm(question)

    def progress(self) -> AbstractContextManager[Callable[[str, int | None], Bar]]:
        """Show bars on a terminal."""
        return output.progress()


def open_controller(*, quiet: bool = False) -> Controller:
    """Read this controller's files."""
    from flare.orbit.controller import Controller
    from flare.paths import Paths

    return Controller.open(Paths.from_environment(), TerminalReporter(quiet=quiet))


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine of flare.orbit to its end."""
    import asyncio

    return asyncio.run(work)
