from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from flare.errors import BusyError, FlareError, RankError, RemoteProtocolError, UnreachableError
from flare.rank import join as joining
from flare.rank import rendezvous as meeting
from flare.rank.hello import PeerFacts, parse_hello
from flare.rank.join import join
from flare.rank.link import Link
from flare.rank.proof import Purpose
from flare.rank.rendezvous import Member, Rendezvous
from flare.rank.routes import Route, connector
from flare.strict_json import Reader
from tests.rank.lab import FACTS, INDEX, KEY, Meeting, never_loses_a_cancellation, run, tcp_pair, until


def joined(
    lab: Meeting, rank: int = 1, key: bytes = KEY, facts: PeerFacts = FACTS
) -> asyncio.Task[tuple[Link, Reader]]:
    return asyncio.create_task(
        join(lab.host, lab.port, rank=rank, key=key, facts=facts, remark=lambda _: None, seconds=3)
    )


def test_all_ranks_meet_and_talk() -> None:
    async def work() -> None:
        async with Meeting(ranks=3) as lab:
            tasks = [joined(lab, rank) for rank in (1, 2)]
            await lab.rendezvous.meet(5)
            links = [(await task)[0] for task in tasks]
            welcome = tasks[0].result()[1]
            assert welcome.hex("index_sha256", 32) == INDEX
            await lab.rendezvous.tell({"type": "agreed", "slots": 2})
            for link in links:
                assert await link.receive() == {"type": "agreed", "slots": 2}
            await links[1].send({"type": "ready", "capacity": 5})
            reader = await lab.rendezvous.members[2].expect("ready", 3, "its bytes")
            assert reader.count("capacity") == 5
            assert lab.rendezvous.members[1].facts.engines == {"llama.cpp": "b1"}
            for link in links:
                link.close()
            await lab.rendezvous.all_gone()
            assert sorted(rank for rank, _ in lab.lost) == [1, 2]

    run(work())


@pytest.mark.parametrize(
    ("rank", "facts", "message"),
    [
        (1, PeerFacts(None, 5, "0.1.0", {}), "for a group of 5 ranks; this core has 2"),
        (1, PeerFacts(b"\x01" * 32, 2, "0.1.0", {}), "another core than rank zero serves"),
    ],
)
def test_who_belongs_to_another_group_is_refused_on_both_sides(
    rank: int, facts: PeerFacts, message: str
) -> None:
    async def work() -> None:
        async with Meeting() as lab:
            with pytest.raises(RankError, match=message):
                await joined(lab, rank, facts=facts)
            assert any(message in line for line in lab.said)

    run(work())


def test_a_rank_that_does_not_exist_is_refused() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            with pytest.raises(RankError, match="there is no peer 2"):
                await joined(lab, 2)

    run(work())


def test_a_second_one_of_a_rank_is_refused_and_the_first_stays() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            first, _ = await joined(lab)
            with pytest.raises(RankError, match=r"rank 1 has joined already, from 127\.0\.0\.1"):
                await joined(lab)
            await lab.rendezvous.tell({"type": "still"})
            assert (await first.receive())["type"] == "still"
            first.close()

    run(work())


def test_another_launch_key_ends_the_proof_and_both_sides_say_so() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            with pytest.raises(UnreachableError, match="another launch key"):
                await joined(lab, key=b"other" + bytes(27))
            await until(lambda: any("does not know the launch key" in line for line in lab.said))
            assert not lab.rendezvous.members

    run(work())


@pytest.mark.parametrize(
    ("launched", "words"),
    [
        (True, "is not this launch's rank zero.* took the port meanwhile\\? Run the command again"),
        (False, "does not know the launch key.* Compare the two sides' --rendezvous-key-file"),
    ],
)
def test_a_rank_zero_that_does_not_know_the_key_is_refused(launched: bool, words: str) -> None:
    async def work() -> None:
        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(44)
            writer.write((2).to_bytes(2, "big") + bytes(32))
            await reader.readexactly(32)
            writer.write(bytes(32))
            await writer.drain()
            await reader.read()
            writer.close()
            await writer.wait_closed()
            ended.set()

        ended = asyncio.Event()
        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((UnreachableError, RemoteProtocolError), match=words) as failed:
            await join(
                "127.0.0.1",
                port,
                rank=1,
                key=KEY,
                facts=FACTS,
                remark=lambda _: None,
                launched=launched,
            )
        assert ("--rendezvous" in failed.value.message) is not launched
        await ended.wait()
        server.close()

    run(work())


@pytest.mark.parametrize(
    ("launched", "listens_on", "connections", "words"),
    [
        (True, False, 1, r"does not listen at .* \(Connection refused\)"),  # as when the group was stopped
        (True, True, joining.TRIES, "is not this launch's rank zero"),
        (False, True, 1, "it has another launch key"),
    ],
)
def test_a_connection_that_ends_is_tried_again_where_an_agent_started_the_rank(
    monkeypatch: pytest.MonkeyPatch, launched: bool, listens_on: bool, connections: int, words: str
) -> None:
    monkeypatch.setattr(joining, "LAST_PAUSE", 0.05)
    came = []

    async def work() -> None:
        async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(await reader.readexactly(44))
            if not listens_on:
                server.close()
            writer.close()

        server = await asyncio.start_server(end, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        said: list[str] = []
        with pytest.raises(UnreachableError, match=words):
            await join(
                "127.0.0.1",
                port,
                rank=1,
                key=KEY,
                facts=FACTS,
                remark=said.append,
                seconds=0.3,
                launched=launched,
            )
        assert any("does not listen" in line for line in said) is not listens_on
        server.close()

    run(work())
    assert len(came) == connections


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(30), b"FLARE"])
def test_strangers_are_shown_and_dropped(greeting: bytes) -> None:
    async def work() -> None:
        async with Meeting() as lab:
            with socket.create_connection((lab.host, lab.port)) as stranger:
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
                await until(lambda: lab.said)
                assert lab.said[0].startswith("refused: 127.0.0.1:")

    run(work())


def test_an_unfinished_proof_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PROOF_LIMIT", 0.1)

    async def work() -> None:
        async with Meeting() as lab:
            with socket.create_connection((lab.host, lab.port)):
                await until(lambda: lab.said)
                assert "did not finish the proof" in lab.said[0]

    run(work())


def test_a_proof_without_a_hello_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "HELLO_LIMIT", 0.1)

    async def work() -> None:
        async with Meeting() as lab:
            connect = connector([Route("", lab.host, lab.port)], Purpose.RENDEZVOUS, 1, KEY)
            with await asyncio.to_thread(connect):
                await until(lambda: lab.said)
            assert "did not say hello" in lab.said[0]

    run(work())


def test_idlers_cannot_lock_a_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MAX_PENDING", 3)

    async def work() -> None:
        async with Meeting() as lab:
            idlers = [socket.create_connection((lab.host, lab.port)) for _ in range(8)]
            link, _ = await joined(lab)
            link.close()
            for idler in idlers:
                idler.close()

    run(work())


def test_the_wait_ends_and_names_the_missing_ranks() -> None:
    async def work() -> None:
        async with Meeting(ranks=4) as lab:
            link, _ = await joined(lab, 2)
            with pytest.raises(RankError, match="the ranks 1, 3 had not joined"):
                await lab.rendezvous.meet(0.05)
            link.close()
        async with Meeting() as lab:
            with pytest.raises(UnreachableError):
                await joined(lab, key=bytes(32))
            with pytest.raises(RankError, match=r"rank 1 had not joined.*Refused meanwhile: .*launch key"):
                await lab.rendezvous.meet(0.05)

    run(work())


def test_a_failing_peers_own_words_are_the_reason() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            link, _ = await joined(lab)
            await link.send({"type": "failed", "message": "its \x1b engine died"})
            link.close()
            await until(lambda: lab.lost)
            assert lab.lost[0][1].message == "Rank 1 (127.0.0.1) failed: its \\x1b engine died"

    run(work())


@pytest.mark.parametrize(
    ("first", "error", "text"),
    [
        (
            {"type": "stop", "failed": True, "message": "rank 2 died"},
            RankError,
            "ended the group: rank 2 died",
        ),
        ({"type": "odd"}, RemoteProtocolError, "sent odd instead of a welcome"),
    ],
)
def test_what_comes_instead_of_a_welcome_is_understood(
    monkeypatch: pytest.MonkeyPatch, first: dict[str, object], error: type[FlareError], text: str
) -> None:
    async def work() -> None:
        async with Meeting() as lab:

            async def speak_first(member: Member) -> None:
                await member.link.send(first)

            monkeypatch.setattr(lab.rendezvous, "_read", speak_first)
            with pytest.raises(error, match=text):
                await joined(lab)

    run(work())


def test_a_peer_that_is_asked_to_stop_tells_rank_zero() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            link, _ = await joined(lab)
            await link.send({"type": "leave"})
            await until(lambda: lab.left == [1])
            link.close()

    run(work())


def test_a_peer_that_vanishes_is_noticed_at_once() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            link, _ = await joined(lab)
            link.connection.close()
            await until(lambda: lab.lost, 1.0)
            assert "Rank 1 (127.0.0.1) is gone" in lab.lost[0][1].message

    run(work())


def test_silence_and_wrong_answers_name_the_rank() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            link, _ = await joined(lab)
            member = lab.rendezvous.members[1]
            with pytest.raises(RankError, match=r"Rank 1 .* said nothing .* waited for its bytes"):
                await member.next_message(0.05, "its bytes")
            await link.send({"type": "odd"})
            with pytest.raises(RemoteProtocolError, match="Rank 1 sent odd where ready was due"):
                await member.expect("ready", 3, "its bytes")
            link.close()

    run(work())


def test_other_purposes_are_handed_on_only_for_ranks_that_joined() -> None:
    async def work() -> None:
        async with Meeting(ranks=3) as lab:
            link, _ = await joined(lab, 1)
            route = [Route("", lab.host, lab.port)]
            with await asyncio.to_thread(connector(route, Purpose.RANGES, 1, KEY)):
                await until(lambda: lab.taken)
            assert lab.taken[0][:2] == (Purpose.RANGES, 1)
            with await asyncio.to_thread(connector(route, Purpose.ENGINE, 2, KEY)):
                await until(lambda: any("which has not joined" in line for line in lab.said))
            assert len(lab.taken) == 1
            link.close()

    run(work())


def test_without_a_key_only_this_machine_can_join() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            said: list[str] = []
            for insecure, expected in ((False, "127.0.0.1"), (True, "0.0.0.0")):
                other = Rendezvous(
                    ranks=2,
                    key=KEY,
                    index_sha256=INDEX,
                    remark=said.append,
                    on_connection=lambda *_: None,
                    on_lost=lambda *_: None,
                    on_leave=lambda *_: None,
                    welcome={},
                )
                assert other.listen("0.0.0.0", 0, keyed=False, insecure=insecure)[0] == expected
                await other.close()
            assert len(said) == 1
            assert "--rendezvous-key-file" in said[0]
            assert "--insecure-rendezvous" in said[0]
            with pytest.raises(BusyError, match=f"127.0.0.1:{lab.port}.*--rendezvous"):
                lab.rendezvous.listen(lab.host, lab.port, keyed=True, insecure=False)

    run(work())


def test_a_port_that_was_taken_meanwhile_is_nobodys_choice() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            with pytest.raises(BusyError) as taken:
                lab.rendezvous.listen(lab.host, lab.port, keyed=True, insecure=False, launched=True)
            assert taken.value.message == (
                f"The rendezvous cannot listen on 127.0.0.1:{lab.port}: Address already in use. "
                "Another program took the port meanwhile: run the command again."
            )
            with pytest.raises(BusyError, match=r"192\.0\.2\.1:1: .*[a-z]\. Run the command again\.$"):
                lab.rendezvous.listen("192.0.2.1", 1, keyed=True, insecure=False, launched=True)

    run(work())


def test_a_peer_waits_for_rank_zero_and_says_so() -> None:
    async def work() -> None:
        said: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with pytest.raises(UnreachableError, match=f"does not listen at 127.0.0.1:{port}"):
            await join("127.0.0.1", port, rank=1, key=KEY, facts=FACTS, remark=said.append, seconds=0.3)
        assert len(said) == 1
        assert "waiting" in said[0]
        with pytest.raises(UnreachableError, match="cannot be resolved"):
            await join("no.such.host.invalid", 1, rank=1, key=KEY, facts=FACTS, remark=said.append)

    run(work())


def test_a_welcome_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async def silent(self: Rendezvous, connection: socket.socket, *_: object) -> None:
            self.held = connection  # type: ignore[attr-defined]

        monkeypatch.setattr(Rendezvous, "_join", silent)
        async with Meeting() as lab:
            with pytest.raises(UnreachableError, match="did not welcome rank 1"):
                await join(
                    lab.host, lab.port, rank=1, key=KEY, facts=FACTS, remark=lambda _: None, seconds=0.2
                )
            lab.rendezvous.held.close()  # type: ignore[attr-defined]

    run(work())


def test_a_stop_that_comes_with_the_last_rank_is_not_lost() -> None:
    async def work() -> None:
        async with Meeting() as lab:

            def begin() -> Coroutine[Any, Any, None]:
                lab.rendezvous._complete.clear()
                return lab.rendezvous.meet()

            await never_loses_a_cancellation(begin, lab.rendezvous._complete.set)

    run(work())


def test_a_stop_that_comes_with_the_welcome_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    came: asyncio.Future[dict[str, Any]]

    async def receive(_link: Link) -> dict[str, Any]:
        nonlocal came
        came = asyncio.get_running_loop().create_future()
        return await came

    async def connected(*_: object) -> socket.socket:
        left, right = tcp_pair()
        others.append(right)
        return left

    async def proven(*_: object) -> bytes:
        return b"t" * 32

    others: list[socket.socket] = []
    monkeypatch.setattr(Link, "receive", receive)
    monkeypatch.setattr(joining, "_connect", connected)
    monkeypatch.setattr(joining, "_prove", proven)

    async def work() -> None:
        async def begin() -> None:
            (await join("zero", 1, rank=1, key=KEY, facts=FACTS, remark=lambda _: None))[0].close()

        await never_loses_a_cancellation(begin, lambda: came.set_result({"type": "welcome"}))

    run(work())
    for other in others:
        other.close()


def test_a_stop_that_comes_with_the_connection_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: asyncio.Future[None]

    async def connect(*_: object) -> None:
        nonlocal opened
        opened = asyncio.get_running_loop().create_future()
        await opened

    async def resolve(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))]

    async def work() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "sock_connect", connect)
        monkeypatch.setattr(loop, "getaddrinfo", resolve)

        async def begin() -> None:
            (await joining._connect("zero", 1, 5, lambda _: None)).close()

        await never_loses_a_cancellation(begin, lambda: opened.set_result(None))

    run(work())


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"type": "hullo"}, "is not hello"),
        ({"type": "hello"}, '"version" is missing'),
        ({"type": "hello", "version": "1", "index_sha256": "zz"}, "index_sha256"),
        ({"type": "hello", "version": "1", "engines": {"x": 1}}, "table of versions"),
    ],
)
def test_a_hello_that_is_none_is_refused(message: dict[str, object], error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        parse_hello(message)


def test_a_peer_that_says_too_much_is_lost() -> None:
    async def work() -> None:
        async with Meeting() as lab:
            link, _ = await joined(lab)
            for _ in range(meeting.MAX_UNREAD + 1):
                await link.send({"type": "progress", "bytes": 1})
            await until(lambda: lab.lost)
            assert "Rank 1 (127.0.0.1) failed: it says more than anybody asked for." in str(lab.lost[0][1])
            assert lab.rendezvous.members[1].messages.qsize() == meeting.MAX_UNREAD
            link.close()

    run(work())
