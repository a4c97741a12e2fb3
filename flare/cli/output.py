"""Everything that commands print goes through here: one escape function, one table, one progress bar."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from flare.printable import printable

if TYPE_CHECKING:
    from rich.console import Console


def say(text: str = "") -> None:
    """Print one line, or several of our own, on standard output."""
    click.echo(printable(text, keep_newlines=True))


def note(text: str) -> None:
    """Print a remark on standard error, so that standard output stays for results."""
    click.echo(printable(text, keep_newlines=True), err=True)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    _marked("warning", "yellow", text)


def fail(text: str) -> None:
    """Print an error on standard error; the exit code is the caller's."""
    _marked("error", "red", text)


def _marked(word: str, colour: str, text: str) -> None:
    label = click.style(f"{word}:", fg=colour, bold=True) if colour_wanted(sys.stderr) else f"{word}:"
    click.echo(f"flare: {label} {printable(text, keep_newlines=True)}", err=True)


def colour_wanted(stream: TextIO) -> bool:
    """Tell whether colour may be used: a terminal, and neither NO_COLOR nor a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_json(value: object) -> None:
    """Print one JSON document, for scripts. ASCII only, so it needs no escaping of controls."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=True))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings. Columns that hold only numbers are set to the right.

    A plain aligned table, so that `awk` and `grep` see the same text as a person.
    """
    cells = [[printable("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [
        max([len(heading), *(len(row[number]) for row in cells)]) for number, heading in enumerate(columns)
    ]
    lines = [[heading.upper() for heading in columns], *cells]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def human_bytes(count: float) -> str:
    """Return a size as a person writes it: 98.4 MB (decimal units, as disks and links are sold)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def human_rate(bytes_a_second: float) -> str:
    """Return a rate such as 1.2 GB/s."""
    return f"{human_bytes(bytes_a_second)}/s"


def human_duration(seconds: float) -> str:
    """Return a duration such as 42 s, 3 min 05 s or 2 h 10 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


@dataclass(slots=True)
class Bar:
    """One row of a progress display. `advance(n)` and `to(n)` take bytes."""

    _update: Callable[..., Any]
    done: int = 0

    def advance(self, count: int) -> None:
        """Add `count` bytes."""
        self.to(self.done + count)

    def to(self, done: int) -> None:
        """Set the bytes done so far."""
        self.done = done
        self._update(completed=done)

    def total(self, total: int | None) -> None:
        """Set the bytes in all, when they become known."""
        self._update(total=total)


def console() -> Console:
    """Return a rich console on standard error."""
    from rich.console import Console

    return Console(stderr=True, no_color=not colour_wanted(sys.stderr), highlight=False)


@contextmanager
def progress() -> Iterator[Callable[[str, int | None], Bar]]:
    """Show bars with bytes, rate and time left on a terminal; nothing where there is none.

    Yields:
        add(label, total bytes or None) -> Bar
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _label, _total: Bar(lambda **_values: None)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(), transient=True) as display:

        def add(label: str, total: int | None) -> Bar:
            task = display.add_task(printable(label), total=total)
            return Bar(lambda **values: display.update(task, **values))

        yield add


def confirm(question: str) -> bool | None:
    """Ask a yes-or-no question on a terminal; None where nobody can answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    with asking():
        return click.confirm(printable(question, keep_newlines=True), default=False, err=True)


@contextmanager
def asking() -> Iterator[None]:
    """Let Ctrl-C end the question that the block asks at once, also inside a coroutine, on a line of its own.

    The handler of a running event loop only cancels the task, and that one waits for the answer.
    """
    import signal
    import threading

    before = signal.getsignal(signal.SIGINT)
    # In another thread no signal gets here, and one that whoever started us ignores stays ignored.
    changed = threading.current_thread() is threading.main_thread() and callable(before)
    if changed:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except click.Abort:
        click.echo(err=True)
        raise
    finally:
        if changed:
            signal.signal(signal.SIGINT, before)
