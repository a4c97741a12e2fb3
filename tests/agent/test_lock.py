"""One agent an account, and looking whether it runs does not keep one from starting."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from flare.agent.lock import AgentLock, running_agent
from flare.errors import BusyError


def test_a_second_agent_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with AgentLock(path) as lock:
        lock.tell("maxwell", (("127.0.0.1", 29900),))
        with (
            pytest.raises(BusyError, match=r"Another agent runs for this account .*127\.0\.0\.1:29900"),
            AgentLock(path),
        ):
            pass
    assert running_agent(path) is None


def test_a_look_at_the_lock_does_not_refuse_an_agent(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        later = threading.Timer(0.1, lambda: fcntl.flock(look, fcntl.LOCK_UN))
        later.start()
        with AgentLock(path):
            pass
        later.join()
