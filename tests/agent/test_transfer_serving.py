"""Relays whose sessions cannot be handed over, and what makes two transfers one."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flare.agent.places import Entry
from flare.agent.transfers import serving
from flare.agent.transfers.intake import Order
from flare.agent.transfers.requests import wish_of
from flare.errors import LocalProtocolError
from flare.trust.grants import Package
from flare.wire.messages import FileRanges
from tests.agent.world import EXPORT, INDEX_SHA256


def test_a_relay_that_gives_up_keeps_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream_socket, far = socket.socketpair()
    ended: list[str] = []

    async def nothing(*_: object, **__: object) -> Any:
        return SimpleNamespace(ranges=(), length=0)

    async def connect(*_: object, **__: object) -> Any:
        return SimpleNamespace(request=nothing, detach=lambda: (upstream_socket, None), close=nothing)

    def refuse() -> None:
        raise LocalProtocolError("inside a frame")

    monkeypatch.setattr(serving, "connect", connect)
    monkeypatch.setattr(serving, "own_hello", lambda _: None)
    link = SimpleNamespace(from_socket=("127.0.0.1", 1), to_socket=("127.0.0.1", 2))
    member = SimpleNamespace(name="before", public_key=b"")
    links = (((), (link,), ()), ((), (), (link,)), ((), (), ()))
    grant = SimpleNamespace(
        members=[member] * 3, transfer_fabric=SimpleNamespace(ring=False, chain=True, links=links)
    )
    hop: Any = SimpleNamespace(
        grant=grant, own=member, upstream=member, upstream_link=link, requester=member, link=link
    )
    node: Any = SimpleNamespace(
        check_workers=lambda: None,
        identity=None,
        settings=SimpleNamespace(agent=SimpleNamespace(stall_timeout=1)),
    )
    session: Any = SimpleNamespace(send=nothing, detach=refuse, abort=ended.append)
    request: Any = SimpleNamespace(file="x", ranges=(), rail=0, source_rank=0, destination_rank=2)
    with far, pytest.raises(LocalProtocolError, match="inside a frame"):
        asyncio.run(serving._relay(node, session, hop, request))
    assert (upstream_socket.fileno(), ended) == (-1, ["its transfer failed"])


def test_a_core_of_another_publisher_is_another_wish() -> None:
    package = Package(EXPORT, 1000, ("core.safetensors",), None, INDEX_SHA256, "aa" * 32)
    route: Any = None
    order = Order(package, Entry(EXPORT, 1000), route, (FileRanges("core.safetensors", 1000, ()),), False)
    assert wish_of(order) == wish_of(replace(order, resume=True))
    assert wish_of(order) != wish_of(replace(order, package=replace(package, publisher="bb" * 32)))
    assert wish_of(order) != wish_of(replace(order, asked=()))
