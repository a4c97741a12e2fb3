"""What the cache needs of its disk, and what it does beside the loop."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flare.agent.cache import Cache
from flare.agent.file_requests import have
from flare.agent.places import Entry
from flare.cores.marker import Marker
from flare.errors import StorageError
from flare.paths import Paths
from flare.wire.messages import Have, HaveReply
from tests.agent.world import EXPORT, INDEX_SHA256

ENTRY = Entry(EXPORT, 1000)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(Paths.from_environment({"HOME": str(tmp_path)}))
    cache.prepare()
    return cache


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
