"""What removes a lab: its processes, its namespaces and its folder.

A lab starts this file as a process of its own and holds the other end of its standard input. When that end
closes, because the lab is done or because its process was killed, the guard cleans up. A guard that was
killed too leaves its work to `remove_stale`, which the next lab calls first.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMESPACES = Path("/run/netns")

_STALE = re.compile(r"netlab-(\d+)-(\d+)-")

KILL_SECONDS = 5.0
"""How long killed processes may take to leave a namespace; one that hangs in the kernel may never do."""


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid it names a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def remove(prefix: str) -> None:
    """Remove every namespace whose name starts with `prefix`, and the processes in it."""
    for name in _names(NAMESPACES):
        if name.startswith(prefix):
            _kill_all(name)
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return []  # nobody has made a namespace yet


def _kill_all(namespace: str) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        pids = listed.stdout.split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def clean_up(prefix: str, folder: str) -> None:
    """Remove a lab; an empty `folder` is left to its owner."""
    remove(prefix)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> None:
    """Remove what labs left behind whose process is gone."""
    folder = Path(tempfile.gettempdir())
    for name in _names(NAMESPACES):
        if _is_stale(name):
            remove(name)
    for name in _names(folder):
        if _is_stale(name):
            shutil.rmtree(folder / name, ignore_errors=True)


def _is_stale(name: str) -> bool:
    owner = _STALE.match(name)
    return owner is not None and start_time(int(owner[1])) != int(owner[2])


def main(prefix: str, folder: str) -> None:
    """Wait until standard input closes, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read(1)
    clean_up(prefix, folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
