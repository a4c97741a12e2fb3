"""What the cache removes, and what it leaves to those who use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.agent.cache import Cache
from flare.agent.places import PART_MARKER, Entry
from flare.agent.removing import is_in_use, take_damaged
from flare.cores.marker import Marker
from flare.errors import BusyError
from flare.paths import Paths
from tests.agent.world import EXPORT, INDEX_SHA256

ENTRY = Entry(EXPORT, 1000)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(Paths.from_environment({"HOME": str(tmp_path)}))
    cache.prepare()
    folder = cache.entry_folder(ENTRY)
    folder.mkdir()
    (folder / "file").write_bytes(b"x")
    cache.mark(ENTRY, Marker(INDEX_SHA256, {}))
    cache.mark(ENTRY, Marker(INDEX_SHA256, {}), PART_MARKER)
    return cache


def test_a_directory_that_somebody_else_uses_stays_unverified(cache: Cache) -> None:
    folder = cache.entry_folder(ENTRY)
    own, other = cache.pins.pinned(str(ENTRY)), cache.pins.pinned(str(ENTRY))
    with own, other, pytest.raises(BusyError, match="used by another group or transfer"):
        take_damaged(cache, folder, None, own_pins=1)
    assert sorted(path.name for path in folder.iterdir()) == ["file"]


def test_ones_own_pin_keeps_nothing(cache: Cache) -> None:
    folder = cache.entry_folder(ENTRY)
    with cache.pins.pinned(str(ENTRY)):
        assert not is_in_use(cache, folder, own_pins=1)
        doomed = take_damaged(cache, folder, None, own_pins=1)
    assert doomed is not None
    assert (doomed.parent, folder.exists()) == (cache.arriving, False)
