from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flare_workers.spawner import SpawnerHandle, start
from tests.orbit.lab import Lab, lab


@pytest.fixture
def orbit(tmp_path: Path) -> Iterator[Lab]:
    """A controller and, once a test starts them, real agents."""
    with lab(tmp_path) as made:
        yield made


@pytest.fixture
def spawner() -> Iterator[SpawnerHandle]:
    """What forks the workers of an upload."""
    handle = start()
    try:
        yield handle
    finally:
        handle.close()
