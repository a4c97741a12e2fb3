from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orbit.lab import Lab, lab


@pytest.fixture
def orbit(tmp_path: Path) -> Iterator[Lab]:
    """A controller and, once a test starts them, real agents."""
    with lab(tmp_path) as made:
        yield made
