"""The start of a rank: one event loop, the signals, and whichever kind of rank was asked for."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from flare.errors import FlareError, UnsupportedError
from flare.files import describe_os_error
from flare.rank.launch import RunRequest, StopSignals
from flare.rank.lifecycle import Lifecycle

if TYPE_CHECKING:
    from flare.rank.peer import PeerRank
    from flare.rank.zero import ZeroRank


SWITCH_INTERVAL = 0.0005
"""Seconds that a thread may keep the others of a rank waiting: a tenth of what Python allows. Every token
passes the tunnel's threads, and every wait of theirs would be a wait of the engines'."""


def serve(request: RunRequest, say: Callable[[str], None], status: int | None) -> int:
    """Run one rank to its end and return the exit status.

    Args:
        request: what was asked for.
        say: prints one line.
        status: descriptor of the agent's pipe, or None.

    Raises:
        UnsupportedError: this is no Linux.
        StorageError: the disk failed in a way that nothing else explains.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            "A rank runs on Linux: it owns its engine's processes and moves bytes with calls that other "
            "systems lack. From here, `flare orbit run` starts it on a node."
        )
    if status is not None:
        os.set_inheritable(status, False)  # the engine must not hold the agent's pipe open
    sys.setswitchinterval(SWITCH_INTERVAL)
    return asyncio.run(_serve(request, Lifecycle(say, status)))


def _rank(request: RunRequest, lifecycle: Lifecycle, signals: StopSignals) -> ZeroRank | PeerRank:
    """Import the one kind that is wanted: a peer has no HTTP front to load."""
    if request.rank == 0:
        # aiohttp reads the system's certificates when it is imported, 40 ms of a launch; the front and the
        # engine speak plain HTTP, and the engine's environment is an allow-list without this variable.
        os.environ.setdefault("SSL_CERT_FILE", os.devnull)
        from flare.rank.zero import ZeroRank

        return ZeroRank(request, lifecycle, signals)
    from flare.rank.peer import PeerRank

    return PeerRank(request, lifecycle, signals)


async def _serve(request: RunRequest, lifecycle: Lifecycle) -> int:
    signals = StopSignals()
    signals.install()
    try:
        return await _rank(request, lifecycle, signals).run()
    except FlareError as problem:
        # Its last line said why; saying it once more would be the only thing that a second line adds.
        return problem.exit_code
    except BrokenPipeError:
        raise  # whoever read our output has gone: the command line knows how to end then
    except OSError as problem:
        raise describe_os_error(problem, "The rank failed at") from problem
