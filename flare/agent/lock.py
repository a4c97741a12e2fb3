"""One agent an account: a lock that the kernel drops when its holder dies, and where that agent listens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Self

from flare.errors import BusyError, FlareError
from flare.files import ensure_private_folder, read_bounded
from flare.session import SocketAddress, format_address
from flare.strict_json import Reader, loads
from flare.values import dataclass

MAX_LOCK = 64 * 1024  # a handful of addresses
LOCK_WAIT = 0.5  # seconds: whoever only looks whether an agent runs holds the lock for microseconds
LOCK_POLL = 0.02  # seconds between two tries


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """What a running agent wrote about itself: process number, node name, "host:port" addresses."""

    pid: int
    name: str
    listen: tuple[str, ...]


class AgentLock:
    """Held for an agent's whole life.

    Args:
        path: the lock file; stays when the agent ends, the lock does not.

    Raises:
        BusyError: on entering, when another agent holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> Self:
        ensure_private_folder(self._path.parent)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not self._take():
            os.close(self._descriptor)
            running = running_agent(self._path)
            where = f" (process {running.pid}, on {', '.join(running.listen)})" if running else ""
            raise BusyError(
                f"Another agent runs for this account{where}. Stop it first; the installed one with "
                "`systemctl --user stop flare-agent`."
            )
        os.ftruncate(self._descriptor, 0)
        return self

    def _take(self) -> bool:
        """Take the lock; tell whether that succeeded: `running_agent` holds it for a moment too."""
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(LOCK_POLL)

    def tell(self, name: str, addresses: tuple[SocketAddress, ...]) -> None:
        """Write down where this agent listens, for `flare agent join-code`."""
        listen = [format_address(*address) for address in addresses]
        text = json.dumps({"pid": os.getpid(), "name": name, "listen": listen})
        os.pwrite(self._descriptor, text.encode(), 0)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def running_agent(path: Path) -> RunningAgent | None:
    """Return what the agent that holds the lock wrote, or None when none runs or it has not said yet."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None  # nobody holds it
            except BlockingIOError:
                pass
        what = "The agent's lock"
        reader = Reader(loads(read_bounded(path, MAX_LOCK, what), limit=MAX_LOCK, what=what), what)
        return RunningAgent(reader.count("pid"), reader.text("name"), reader.texts("listen", limit=64))
    except (OSError, FlareError):
        return None
