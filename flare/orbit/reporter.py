"""How the controller speaks to whoever called it, without knowing whether that is a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Bar(Protocol):
    """One row of progress, in bytes."""

    def advance(self, count: int, /) -> None:
        """Add `count` bytes."""

    def to(self, done: int, /) -> None:
        """Set the bytes done so far."""

    def total(self, total: int | None, /) -> None:
        """Set the bytes in all, when they become known."""


class Reporter(Protocol):
    """What the controller tells while it works. Texts may hold a peer's words: implementations escape."""

    def say(self, text: str, /) -> None:
        """A line of the result."""

    def note(self, text: str, /) -> None:
        """A remark that is no part of the result."""

    def waiting(self, text: str, /) -> None:
        """What keeps the person waiting; nothing where nobody watches."""

    def warn(self, text: str, /) -> None:
        """Something that the person should know, though the command goes on."""

    def confirm(self, question: str, /) -> bool | None:
        """Ask yes or no; None where nobody can answer."""

    def progress(self) -> AbstractContextManager[Callable[[str, int | None], Bar]]:
        """Show bars: the context gives add(label, total bytes or None)."""
