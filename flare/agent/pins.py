"""What keeps things in the cache: pins, by the name of a core directory, an executable or a blob.

What is *in use* is neither evicted nor replaced nor taken away: a rank reads it, or its bytes come or go.
What somebody is only *about to use* is not evicted, and that is all: a copy that proves damaged goes just the
same.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from flare.agent.waiting import disk_threads
from flare.session import Session


class Pins:
    """What is pinned; pins add up.

    Args:
        folders: where what is pinned may lie. A pin touches it, so that what was used last is evicted last.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._in_use: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self._of_sessions: dict[Session, set[tuple[str, bool]]] = {}
        self._touching: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """Everything that may not be evicted."""
        return frozenset((*self._in_use, *self._wanted))

    def in_use(self, name: str) -> int:
        """Return how many use it now."""
        return self._in_use[name]

    @contextlib.contextmanager
    def pinned(self, name: str) -> Iterator[None]:
        """Use something for the length of a block."""
        self.pin(name)
        try:
            yield
        finally:
            self.unpin(name)

    def pin(self, name: str, *, in_use: bool = True) -> None:
        """Keep something until `unpin`, whether it is there or comes yet.

        Nobody waits for the disk to note when it was used.

        Args:
            in_use: False: keep it from being evicted alone.
        """
        (self._in_use if in_use else self._wanted)[name] += 1
        if name not in self._touching:  # a disk that hangs holds one thread a name
            self._touching.add(name)
            disk_threads.submit(partial(self._touch, name))

    def _touch(self, name: str) -> None:
        try:
            for folder in self._folders:
                with contextlib.suppress(OSError):  # not there yet
                    os.utime(folder / name)
        finally:
            self._touching.discard(name)

    def unpin(self, name: str, *, in_use: bool = True) -> None:
        """Undo one `pin`."""
        pins = self._in_use if in_use else self._wanted
        pins[name] -= 1
        if pins[name] <= 0:
            del pins[name]

    def pin_for(self, session: Session, name: str, *, in_use: bool) -> None:
        """Keep something for as long as a session lasts; again changes nothing.

        Args:
            in_use: as for `pin`.
        """
        own = self._of_sessions.setdefault(session, set())
        if (name, in_use) not in own:
            own.add((name, in_use))
            self.pin(name, in_use=in_use)

    def let_go(self, session: Session) -> None:
        """Undo what was pinned for a session, which has ended."""
        for name, in_use in self._of_sessions.pop(session, ()):
            self.unpin(name, in_use=in_use)
