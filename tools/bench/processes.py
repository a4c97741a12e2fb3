"""What trees of processes spend and hold, as the kernel tells it under /proc."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PARENT, _USER, _SYSTEM, _WAITED_USER, _WAITED_SYSTEM = 1, 11, 12, 13, 14  # in stat, after the name
_SAMPLE_INTERVAL = 0.05  # seconds; a worker's buffers live as long as its job


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def own_seconds(pid: int) -> float:
    """CPU-seconds of one process alone; 0 for one that is gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICK


def tree(roots: Iterable[int]) -> list[int]:
    """The processes of some trees, roots included, as they are now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[_PARENT]), []).append(int(entry.name))

    def walk(pid: int) -> Iterator[int]:
        yield pid
        for child in children.get(pid, ()):
            yield from walk(child)

    return [pid for root in roots for pid in walk(root)]


def tree_seconds(roots: Iterable[int]) -> float:
    """CPU-seconds of some trees: what runs now, and what has ended and was waited for."""
    ticks = 0
    for pid in tree(roots):
        if (fields := _stat(pid)) is not None:
            ticks += sum(int(fields[place]) for place in (_USER, _SYSTEM, _WAITED_USER, _WAITED_SYSTEM))
    return ticks / _TICK


def private_bytes(pid: int) -> int:
    """Memory that no other process shares; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def title(pid: int) -> str:
    """What the process list shows."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class MemoryWatch:
    """Samples the private memory of trees while something runs; looking costs CPU, so not while one measures.

    Args:
        roots: The trees.
        kind_of: A process's title -> what its peak is kept under; None leaves it out.

    Attributes:
        peaks: Bytes by kind: the largest process of that kind.
    """

    def __init__(self, roots: Iterable[int], kind_of: Callable[[int, str], str | None]) -> None:
        self._roots = tuple(roots)
        self._kind_of = kind_of
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.peaks: dict[str, int] = {}

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(_SAMPLE_INTERVAL):
            for pid in tree(self._roots):
                kind = self._kind_of(pid, title(pid))
                if kind is not None:
                    self.peaks[kind] = max(self.peaks.get(kind, 0), private_bytes(pid))
