"""The phases of a rank: which may follow which, one line of output for each, and the agent's copy."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from flare.errors import CoreError, FlareError, IntegrityError, LocalProtocolError, TrustError
from flare.printable import printable

MAX_REASON: Final = 1000
"""Characters; the agent keeps 1024 of a reason, and adds what it knows itself."""
MAX_LINE: Final = 300
"""Characters of a further line of a reason."""


class Phase(StrEnum):
    """Where a rank is.

    | phase | comes after | on what |
    |---|---|---|
    | resolving | - | start |
    | rendezvous | resolving | the core (rank zero) or the command (a peer) is understood |
    | receiving | rendezvous | all ranks have met |
    | verifying | resolving, receiving | the bytes are there |
    | agreeing | verifying | the bytes are the signed ones |
    | loading | agreeing | all ranks know the capacity |
    | serving | loading | the engine answers |
    | draining | any before it | SIGTERM, or rank zero's word |
    | stopped | draining | nothing runs any more |
    | failed | any but stopped | an error, here or in another rank |
    """

    RESOLVING = "resolving"
    RENDEZVOUS = "rendezvous"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    AGREEING = "agreeing"
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_WORKING = (
    Phase.RESOLVING,
    Phase.RENDEZVOUS,
    Phase.RECEIVING,
    Phase.VERIFYING,
    Phase.AGREEING,
    Phase.LOADING,
    Phase.SERVING,
)

COMES_AFTER: Final[dict[Phase, frozenset[Phase | None]]] = {
    Phase.RESOLVING: frozenset({None}),
    Phase.RENDEZVOUS: frozenset({Phase.RESOLVING}),
    Phase.RECEIVING: frozenset({Phase.RENDEZVOUS}),
    Phase.VERIFYING: frozenset({Phase.RESOLVING, Phase.RECEIVING}),
    Phase.AGREEING: frozenset({Phase.VERIFYING}),
    Phase.LOADING: frozenset({Phase.AGREEING}),
    Phase.SERVING: frozenset({Phase.LOADING}),
    Phase.DRAINING: frozenset(_WORKING),
    Phase.STOPPED: frozenset({Phase.DRAINING}),
    Phase.FAILED: frozenset({None, *_WORKING, Phase.DRAINING}),
}
"""Phase -> the phases that it may follow; None is "not begun"."""


class Lifecycle:
    """Keeps the phase and tells everybody who listens.

    Args:
        say: prints one line; what it gets is safe for a terminal.
        status: descriptor of the agent's pipe, or None; one JSON line a change goes there.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        status: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._status = status
        self._clock = clock
        self._begun = clock()
        self._damaged: dict[str, str] | None = None
        self.phase: Phase | None = None
        self.reason = ""

    @property
    def uptime(self) -> float:
        """Seconds since the rank began."""
        return self._clock() - self._begun

    @property
    def ended(self) -> bool:
        """Whether nothing can follow any more."""
        return self.phase in (Phase.STOPPED, Phase.FAILED)

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """Remember that the bytes stored in `folder` are not the signed ones, when that ends the block.

        The last status line tells it: the agent removes such a copy from its cache, because nothing else
        would replace it.
        """
        try:
            yield
        except (CoreError, IntegrityError, TrustError) as problem:
            self._damaged = {"folder": str(folder)}
            file = problem.file if isinstance(problem, IntegrityError) else None
            if file is not None:
                self._damaged["file"] = file
            raise

    def fail(self, problem: FlareError) -> None:
        """Change to `failed` and say why; the agent hears the error's code too."""
        self.enter(Phase.FAILED, problem.message, code=problem.code)

    def enter(self, phase: Phase, reason: str, *, url: str | None = None, code: str | None = None) -> None:
        """Change to `phase` and say so.

        Args:
            phase: must be allowed after the current one.
            reason: why, as a clause for people; of several lines `reason` keeps the first and the last ones.
            url: where the front can be reached, with `serving`.
            code: of the error, with `failed`.

        Raises:
            LocalProtocolError: our own code skipped a phase.
        """
        if self.phase not in COMES_AFTER[phase]:
            raise LocalProtocolError(f"A rank cannot go from {self.phase} to {phase}.")
        self.phase = phase
        first, *more = reason.split("\n")
        self.reason = _in_one_line(first, more)
        self._say(f"{phase}: {printable(first)[:MAX_REASON]} ({self.uptime:.1f} s)")
        for line in more:
            self.remark(line)
        if self._status is None:
            return
        document: dict[str, object] = {"phase": str(phase), "reason": self.reason}
        if url is not None:
            document["url"] = url
        if code is not None:
            document["code"] = code
        if phase is Phase.FAILED and self._damaged is not None:
            document["damaged"] = self._damaged
        # An agent that is gone takes this rank along through its keeper; a full pipe costs one line.
        with contextlib.suppress(OSError):
            os.write(self._status, json.dumps(document).encode() + b"\n")

    def remark(self, text: str) -> None:
        """Print a line that changes nothing."""
        self._say(printable(text))


def _in_one_line(first: str, more: Sequence[str]) -> str:
    """Return a reason's lines as one; where they are too many, those at the end, which say most."""
    text = printable(first)[: MAX_REASON - len(" …")]
    room = MAX_REASON - len(" …") - len(text)
    told: list[str] = []
    for line in reversed([line for line in map(_clean, more) if line]):
        if room < len(line) + len(" / "):
            text += " …"
            break
        room -= len(line) + len(" / ")
        told.insert(0, line)
    return f"{text} {' / '.join(told)}" if told else text


def _clean(line: str) -> str:
    return printable(line.strip())[:MAX_LINE]
