"""The root of the command line: finds the command, and turns errors into sentences and exit codes.

Commands are imported when they are called: `flare --version` must not pay for cryptography.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from flare.version import VERSION

if TYPE_CHECKING:
    from flare.errors import FlareError

# 128 + SIGPIPE, as shells report `yes | head`: Python ignores that signal, and a write fails instead. Whoever
# read our output has what it wants, so nothing is printed; `set -o pipefail` still tells that it was cut off.
EXIT_NOBODY_READS = 141
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_STORAGE = 9  # flare.errors.StorageError, for what the system refused
EXIT_UNSUPPORTED = 14  # flare.errors.UnsupportedError, not imported here: see the module's docstring

# command -> (module, attribute, one line for `flare --help`)
COMMANDS = {
    "agent": ("flare.cli.agent", "agent", "Run and manage this node's agent."),
    "orbit": ("flare.cli.orbit", "orbit", "Control paired nodes: pair, run, status, attach, stop."),
    "run": ("flare.cli.run", "run", "Serve a core on this machine, alone or as one rank of a group."),
    "engine": ("flare.cli.engine", "engine", "Install and list inference engines."),
    "ignition": ("flare.cli.ignition", "ignition", "Prepare a model as a signed core."),
    "core": ("flare.cli.core", "core", "Show and verify cores."),
    "publisher": ("flare.cli.publisher", "publisher", "Make and accept the keys that sign cores."),
    "completion": ("flare.cli.completion", "completion", "Print the shell completion script."),
}
RUNS_EVERYWHERE = ("completion",)  # all others lock and own files as only Unix does


class HelpfulGroup(click.Group):
    """A group that names the nearest command where there is none of that name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest one."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            near = self.nearest(args[0], names)
            path = ctx.command_path
            hint = f" Did you mean `{path} {near}`?" if near else f" `{path} --help` lists them."
            raise click.UsageError(f"There is no command `{args[0]}`.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def nearest(self, word: str, names: list[str]) -> str | None:
        """Return the command that is likely meant."""
        import difflib

        return next(iter(difflib.get_close_matches(word, names, 1)), None)


class LazyGroup(HelpfulGroup):
    """A group whose commands are imported when they are needed; a subclass brings its own table."""

    table: Mapping[str, tuple[str, str, str]] = COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None where there is none of that name."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        module, attribute, _ = entry
        if sys.platform == "win32" and cmd_name not in RUNS_EVERYWHERE:
            refuse_windows(cmd_name)
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table without importing a single command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in self.table.items()])


class _CarriedError(Exception):
    """Carries a BrokenPipeError past click, which would end the program with the exit code 1."""

    def __init__(self, problem: BrokenPipeError) -> None:
        super().__init__(problem)
        self.problem = problem


class RootGroup(LazyGroup):
    """The root: what ends the program is decided in `main` and nowhere else."""

    def nearest(self, word: str, names: list[str]) -> str | None:
        """Return the command that is likely meant; those of `flare orbit` are often typed without it."""
        from flare.cli.orbit import OrbitGroup

        return f"orbit {word}" if word in OrbitGroup.table else super().nearest(word, names)

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        """Parse the words; help is printed in here."""
        try:
            return super().make_context(*arguments, **extra)
        except BrokenPipeError as problem:
            raise _CarriedError(problem) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as problem:
            raise _CarriedError(problem) from None


def refuse_windows(command: str) -> NoReturn:
    """End the program with one sentence."""
    click.echo(
        f"flare: error: `flare {command}` does not run on Windows: a controller needs Linux or macOS, a node "
        "Linux.",
        err=True,
    )
    raise SystemExit(EXIT_UNSUPPORTED)


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=RootGroup, context_settings=CONTEXT)
@click.version_option(VERSION, prog_name="flare", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve models that are larger than one machine.

    \b
    On each node:       flare agent install           prints a one-time code
    On the controller:  flare orbit pair HOST...      asks for each host's code
                        flare orbit run CORE
    """


def main(arguments: list[str] | None = None, **extra: Any) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    keep_standard_streams()
    try:
        status = cli.main(args=arguments, prog_name="flare", standalone_mode=False, **extra)
        sys.stdout.flush()
    except click.ClickException as wrong:
        with _unread():
            _explain_usage(wrong)
        status = wrong.exit_code
    except (KeyboardInterrupt, click.Abort):
        with _unread():
            click.echo("flare: interrupted.", err=True)  # the line of ^C has ended
        status = EXIT_INTERRUPTED
    except Exception as raised:
        problem = raised.problem if isinstance(raised, _CarriedError) else raised
        if _nobody_reads(problem):
            status = EXIT_NOBODY_READS
        else:
            status = _exit_code(problem)
            with _unread():
                _explain(problem)
    _drop_unread()
    raise SystemExit(status if isinstance(status, int) else 0)


def keep_standard_streams() -> None:
    """Put /dev/null where the caller closed a standard stream (`>&-`).

    Otherwise the next socket or file gets its number, and is written to as if it were a terminal.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _nobody_reads(problem: BaseException) -> bool:
    """Tell whether this is about our output, and not about another pipe or a socket that broke."""
    if isinstance(problem, BaseExceptionGroup):
        return any(map(_nobody_reads, problem.exceptions))
    return isinstance(problem, BrokenPipeError) and any(map(_is_broken, (sys.stdout, sys.stderr)))


def _is_broken(stream: TextIO) -> bool:
    import select

    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # no descriptor at all; Windows has no poll
        return False


@contextmanager
def _unread() -> Iterator[None]:
    """Go on where an explanation cannot be printed: the exit code still tells."""
    with suppress(OSError):
        yield


def _drop_unread() -> None:
    """Let what a stream could not take go to /dev/null: Python would complain of it while it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _explain_usage(problem: click.ClickException) -> None:
    """Print what click found wrong in the words as every other error is printed, and where help is."""
    from flare.cli.output import fail, note

    context = problem.ctx if isinstance(problem, click.UsageError) else None
    if isinstance(problem, click.exceptions.NoArgsIsHelpError):
        problem.show()  # a group without a command: its help, and no complaint
        return
    fail(problem.format_message())
    if context is not None:
        note(f"{context.get_usage()}\n`{context.command_path} --help` explains it.")


def _exit_code(problem: Exception) -> int:
    """Return the exit code of what went wrong."""
    from flare.errors import FlareError

    if isinstance(problem, ExceptionGroup):
        problem = _first_flare_error(problem) or problem
    if isinstance(problem, FlareError):
        return problem.exit_code
    return EXIT_STORAGE if isinstance(problem, OSError) else 1


def _explain(problem: Exception) -> None:
    """Print what went wrong for a person; a bug of ours says so."""
    from flare.cli.output import fail
    from flare.errors import FlareError

    if os.environ.get("FLARE_TRACEBACK"):
        import traceback

        traceback.print_exception(problem)
    if isinstance(problem, ExceptionGroup):
        problem = _first_flare_error(problem) or problem
    if isinstance(problem, FlareError):
        fail(problem.message)
    elif isinstance(problem, OSError):
        from flare.files import describe_os_error

        fail(describe_os_error(problem, "Failed at" if problem.filename else "Failed").message)
    else:
        fail(
            f"This is a fault in flare itself: {type(problem).__name__}: {problem}. "
            "Run the command again with FLARE_TRACEBACK=1 and report what it prints."
        )


def _first_flare_error(group: BaseExceptionGroup[BaseException]) -> FlareError | None:
    from flare.errors import FlareError

    for member in group.exceptions:
        if isinstance(member, FlareError):
            return member
        if isinstance(member, BaseExceptionGroup) and (inner := _first_flare_error(member)):
            return inner
    return None
