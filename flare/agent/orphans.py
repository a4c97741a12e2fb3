"""What a killed keeper leaves: the processes of its launch, told by their mark, and ended here.

Only for a keeper that was itself killed: its orphans become children of this process, a subreaper, which
then has to collect them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from flare import keeper

LAUNCH_VARIABLE = "FLARE_LAUNCH"  # marks every process of a launch, so that orphans can be told apart
SWEEP_INTERVAL = 0.05  # seconds between two looks for orphans of a killed keeper
SWEEP_LIMIT = 30.0  # seconds of looks that fail, for want of descriptors; then orphans are left to the log
RETRY_INTERVAL = 0.25  # seconds from a look that failed to the next one


async def sweep(launch: str, leader: int | None) -> None:
    """Kill every descendant that carries the launch's mark, until none is left.

    Args:
        leader: the rank's own process, where it ever was.

    Raises:
        OSError: for SWEEP_LIMIT no look at the processes was possible.
    """
    mark = f"{LAUNCH_VARIABLE}={launch}".encode()
    orphans = set() if leader is None else {leader}
    give_up = time.monotonic() + SWEEP_LIMIT
    while True:
        try:
            alive = [process for process in keeper.descendants(os.getpid()) if _has_mark(process, mark)]
        except OSError:  # out of descriptors: some come back
            if time.monotonic() >= give_up:
                raise
            await asyncio.sleep(RETRY_INTERVAL)
            continue
        for process in alive:
            orphans.add(process)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not _collect(orphans) and not alive:
            return
        await asyncio.sleep(SWEEP_INTERVAL)


def _collect(orphans: set[int]) -> bool:
    """Collect those that ended; tell whether a child of ours among them still ends.

    One whose memory is gone already carries no mark that could be read, and is there all the same.
    """
    ending = False
    for process in tuple(orphans):
        with contextlib.suppress(ChildProcessError):  # not ours, or not yet
            if os.waitpid(process, os.WNOHANG)[0]:
                orphans.discard(process)
            else:
                ending = True
    return ending


def _has_mark(process: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended, or is somebody else's
        return False
