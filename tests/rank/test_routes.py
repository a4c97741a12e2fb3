from __future__ import annotations

import asyncio
import errno
import socket
import threading

import pytest

from flare.errors import RemoteProtocolError, UnreachableError
from flare.fabric.values import Endpoint
from flare.rank.proof import Purpose
from flare.rank.routes import Route, connector, endpoints_message, own_endpoints, plan, read_offered
from flare.rank.sockets import UNANSWERED_LIMIT
from flare.strict_json import Reader
from tests.rank.lab import KEY, Meeting, run

RENDEZVOUS = ("zero.example", 29800)


def endpoint(address: str, prefix: int = 24, pci: str = "") -> Endpoint:
    return Endpoint("", 0, "", address, prefix, "", pci)


@pytest.mark.parametrize(
    ("own", "offered", "expected"),
    [
        ([], [], [Route("", *RENDEZVOUS)]),
        (["10.0.1.2"], [], [Route("", *RENDEZVOUS)]),
        (["10.0.1.2"], ["10.0.9.1"], [Route("", *RENDEZVOUS)]),
        (["10.0.1.2"], ["10.0.1.1", "10.0.9.1"], [Route("10.0.1.2", "10.0.1.1", 29800)]),
        (
            ["10.0.2.2", "10.0.1.2"],
            ["10.0.1.1", "10.0.2.1"],
            [Route("10.0.1.2", "10.0.1.1", 29800), Route("10.0.2.2", "10.0.2.1", 29800)],
        ),
    ],
)
def test_bulk_bytes_take_the_subnets_that_both_have(
    own: list[str], offered: list[str], expected: list[Route]
) -> None:
    routes = plan(
        [endpoint(address) for address in own], [endpoint(address) for address in offered], RENDEZVOUS
    )
    assert sorted(routes, key=lambda route: route.local) == expected


def test_endpoints_survive_the_welcome() -> None:
    endpoints = (endpoint("10.0.1.1", pci="0000:01:00.0"), endpoint("10.0.2.1", 30))
    assert read_offered(Reader({"endpoints": endpoints_message(endpoints)}, "The welcome")) == endpoints
    assert read_offered(Reader({}, "The welcome")) == ()
    with pytest.raises(RemoteProtocolError, match="prefix"):
        read_offered(Reader({"endpoints": [{"address": "10.0.0.1", "prefix": 99, "pci": ""}]}, "The welcome"))


def test_an_address_that_is_none_reaches_nobody() -> None:
    assert plan([endpoint("10.0.1.2")], [endpoint("not an address")], RENDEZVOUS) == (Route("", *RENDEZVOUS),)


def test_this_machine_can_be_asked() -> None:
    assert all(isinstance(one, Endpoint) for one in own_endpoints([]))


def test_connections_take_the_routes_in_turn_and_bind_the_local_address() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            routes = [Route("127.0.0.2", lab.host, lab.port), Route("", lab.host, lab.port)]
            connect = connector(routes, Purpose.RANGES, 1, KEY)
            # The rank has not joined, so each is closed behind the proof; which address it had is all we ask.
            names = []
            for _ in range(3):
                with await asyncio.to_thread(connect) as connection:
                    names.append(connection.getsockname()[0])
            assert names == ["127.0.0.2", "127.0.0.1", "127.0.0.2"]

    run(work())


def test_the_side_that_asks_for_bytes_gives_up_what_is_not_acknowledged() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            for purpose, limit in ((Purpose.RANGES, UNANSWERED_LIMIT), (Purpose.ENGINE, 0)):
                connect = connector([Route("", lab.host, lab.port)], purpose, 1, KEY)
                with await asyncio.to_thread(connect) as connection:
                    got = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                    assert got == limit

    run(work())


def test_a_host_that_does_not_answer_is_told_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", wait)
    with pytest.raises(TimeoutError) as raised:
        connector([Route("", "192.0.2.1", 1)], Purpose.ENGINE, 1, KEY)()
    assert raised.value.errno == errno.ETIMEDOUT


def test_a_connection_that_fails_its_proof_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(UnreachableError, match="during the proof"):
            connector([Route("", host, port)], Purpose.ENGINE, 1, KEY)()
        thread.join()
