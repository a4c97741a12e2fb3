"""What the cache removes, and what it leaves to those who use it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flare.agent.cache import PART_MARKER, Cache, Entry
from flare.agent.file_requests import have
from flare.cores.marker import Marker
from flare.errors import BusyError, StorageError
from flare.paths import Paths
from flare.wire.messages import Have, HaveReply
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
        cache.take_damaged(folder, None, own_pins=1)
    assert sorted(path.name for path in folder.iterdir()) == ["file"]


def test_ones_own_pin_keeps_nothing(cache: Cache) -> None:
    folder = cache.entry_folder(ENTRY)
    with cache.pins.pinned(str(ENTRY)):
        assert not cache.in_use(folder, own_pins=1)
        doomed = cache.take_damaged(folder, None, own_pins=1)
    assert doomed is not None
    assert (doomed.parent, folder.exists()) == (cache.arriving, False)


def test_a_cache_that_cannot_link_says_what_it_needs(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    arrived = cache.new_arrival()
    arrived.write_bytes(b"x")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="without hard links, which it needs"):
        cache.publish(arrived, cache.place("core", f"{ENTRY}/core.safetensors"))


def test_markers_are_read_beside_the_loop() -> None:
    threads = []
    told: list[HaveReply] = []

    async def send(reply: HaveReply) -> None:
        told.append(reply)

    def marker(_: Entry) -> Marker:
        threads.append(threading.current_thread())
        return Marker(INDEX_SHA256, {}, "ef" * 32)

    node: Any = SimpleNamespace(
        authority=SimpleNamespace(is_controller=lambda _: True),
        cache=SimpleNamespace(
            place=lambda *_: SimpleNamespace(entry=ENTRY, pin=str(ENTRY)),
            have=lambda *_: (True, True),
            marker=marker,
            pins=SimpleNamespace(pin_for=lambda *_, in_use: None),
        ),
    )
    session: Any = SimpleNamespace(peer_key=b"", send=send)
    asyncio.run(have(node, session, Have(kind="core", name="x", size=1, publisher="ef" * 32)))
    assert told == [HaveReply(have=True, verified=True)]
    assert threads
    assert threading.main_thread() not in threads
