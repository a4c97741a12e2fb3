"""A reporter that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flare.orbit.reporter import Bar


class RecordingBar:
    def __init__(self, label: str, total: int | None) -> None:
        self.label = label
        self.wanted = total
        self.done = 0

    def advance(self, count: int, /) -> None:
        self.done += count

    def to(self, done: int, /) -> None:
        self.done = done

    def total(self, total: int | None, /) -> None:
        self.wanted = total


class RecordingReporter:
    """Answers every question with `answer`."""

    def __init__(self, answer: bool | None = None) -> None:
        self.answer = answer
        self.said: list[str] = []
        self.notes: list[str] = []
        self.waits: list[str] = []
        self.warnings: list[str] = []
        self.questions: list[str] = []
        self.bars: list[RecordingBar] = []

    def say(self, text: str, /) -> None:
        self.said.append(text)

    def note(self, text: str, /) -> None:
        self.notes.append(text)

    def waiting(self, text: str, /) -> None:
        self.waits.append(text)

    def warn(self, text: str, /) -> None:
        self.warnings.append(text)

    def confirm(self, question: str, /) -> bool | None:
        self.questions.append(question)
        return self.answer

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, int | None], Bar]]:
        def add(label: str, total: int | None) -> Bar:
            bar = RecordingBar(label, total)
            self.bars.append(bar)
            return bar

        yield add
