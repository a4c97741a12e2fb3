"""Where the ranks of a group meet: rank zero listens, every peer proves the launch key and says hello.

One connection a peer carries messages for the life of the group; its end is the peer's end. Further
connections of the same peer fetch bytes or carry its engine's traffic; all come to the same port.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flare.errors import BusyError, FlareError, RankError, RemoteProtocolError
from flare.printable import printable
from flare.rank.hello import PeerFacts, parse_hello, words_of
from flare.rank.link import Link
from flare.rank.proof import (
    NONCE_LENGTH,
    PEER_HELLO_LENGTH,
    PROOF_LENGTH,
    Purpose,
    parse_peer_hello,
    peer_proof,
    record_ciphers,
    same,
    transcript,
    zero_hello,
    zero_proof,
)
from flare.rank.sockets import (
    PROOF_LIMIT,
    describe,
    listen,
    receive_exactly,
    set_up,
    show,
)
from flare.serving_options import is_loopback
from flare.strict_json import Reader

MAX_PENDING: Final = 64
"""Connections whose proof is not done; a peer opens about ten at once."""
MEETING_LIMIT: Final = 600.0
"""Seconds for all ranks to come: a person may start them by hand, one after the other."""
LAUNCH_LIMIT: Final = 60.0
"""Seconds when agents started them: all at once, and they go to rank zero before they do anything else.
One that ends before it met rank zero can tell nobody; so long the others hold their devices for it."""
MAX_UNREAD: Final = 64
"""Messages of a peer that nobody read yet; it says some ten while it comes up, and none while it serves."""
HELLO_LIMIT: Final = 10.0
"""Seconds from the proof to the hello."""


@dataclass(slots=True)
class Member:
    """A peer that has joined.

    Args:
        rank: 1 and up.
        link: its rendezvous connection.
        host: the address that it came from.
        facts: its hello.
        messages: what it said and nobody read yet.
    """

    rank: int
    link: Link
    host: str
    facts: PeerFacts
    messages: asyncio.Queue[dict[str, Any]] = field(default_factory=lambda: asyncio.Queue(MAX_UNREAD))

    async def next_message(self, seconds: float, waiting_for: str) -> dict[str, Any]:
        """Return the next message.

        Raises:
            RankError: the peer said nothing for `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):  # wait_for loses a cancellation when a message comes with it
                return await self.messages.get()
        except TimeoutError:
            raise RankError(
                f"Rank {self.rank} ({self.host}) said nothing for {seconds:.0f} s while the group waited for "
                f"{waiting_for}. Its own output says what it does."
            ) from None

    async def expect(self, wanted: str, seconds: float, waiting_for: str) -> Reader:
        """Return the next message as a reader; it must be of the type `wanted`.

        Raises:
            RankError: as next_message.
            RemoteProtocolError: it is of another type.
        """
        message = await self.next_message(seconds, waiting_for)
        if message["type"] != wanted:
            raise RemoteProtocolError(
                f"Rank {self.rank} sent {printable(message['type'][:40])} where {wanted} was due."
            )
        return Reader(message, f"A message of rank {self.rank}")


class Rendezvous:
    """Rank zero's side.

    Args:
        ranks: of the whole group, this one included.
        key: the launch key, 32 bytes.
        index_sha256: of the core that is served.
        remark: prints one line.
        on_connection: gets a proven connection for another purpose, blocking, and owns it from then on.
        on_lost: called once with a member whose connection ended, and why.
        on_leave: called with a member that was asked to stop on its own node.
        welcome: the message that a member gets first, without its type.
    """

    def __init__(
        self,
        *,
        ranks: int,
        key: bytes,
        index_sha256: bytes,
        remark: Callable[[str], None],
        on_connection: Callable[[Purpose, int, socket.socket], None],
        on_lost: Callable[[Member, FlareError], None],
        on_leave: Callable[[Member], None],
        welcome: Mapping[str, Any],
    ) -> None:
        self.ranks = ranks
        self.members: dict[int, Member] = {}
        self._key = key
        self._index_sha256 = index_sha256
        self._remark = remark
        self._on_connection = on_connection
        self._on_lost = on_lost
        self._on_leave = on_leave
        self._welcome = welcome
        self._pending: dict[asyncio.Task[bool], socket.socket] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._complete = asyncio.Event()
        self._refused = ""

    def listen(
        self, host: str, port: int, *, keyed: bool, insecure: bool, launched: bool = False
    ) -> tuple[str, int]:
        """Begin to listen; return the address.

        Args:
            host, port: where; port 0 lets the system choose.
            keyed: whether there is a real launch key.
            insecure: the operator allowed other machines without one.
            launched: an agent started this rank, so that nobody chose the port.

        Raises:
            BusyError: something else listens there, or the address is not this machine's.
        """
        if not keyed and not insecure and not is_loopback(host):
            self._remark(
                "no launch key: the rendezvous binds to 127.0.0.1, so that only ranks on this machine can "
                "join. Give all ranks the same --rendezvous-key-file, or --insecure-rendezvous."
            )
            host = "127.0.0.1"
        try:
            self._listener = listen(host, port)
        except OSError as problem:
            again = "Choose another address or port with --rendezvous."
            if launched:
                taken = problem.errno == errno.EADDRINUSE
                again = (
                    f"{'Another program took the port meanwhile: run' if taken else 'Run'} the command again."
                )
            raise BusyError(
                f"The rendezvous cannot listen on {show((host, port))}: {describe(problem)}. {again}"
            ) from None
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        name = self._listener.getsockname()
        return name[0], name[1]

    async def meet(self, seconds: float = MEETING_LIMIT) -> None:
        """Wait until every rank has joined.

        Args:
            seconds: the longest wait.

        Raises:
            RankError: names the ranks that did not come, and what was refused last.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._complete.wait()
        except TimeoutError:
            missing = [str(rank) for rank in range(1, self.ranks) if rank not in self.members]
            one = len(missing) == 1
            what = f"rank {missing[0]}" if one else f"the ranks {', '.join(missing)}"
            whose = "Its own output says why; it must" if one else "Their own output says why; they must"
            why = f" Refused meanwhile: {self._refused}" if self._refused else ""
            raise RankError(
                f"After {seconds:.0f} s {what} had not joined. {whose} reach this address and have the same "
                f"launch key.{why}"
            ) from None

    async def tell(self, message: dict[str, Any]) -> None:
        """Send one message to every member that is still there."""
        await asyncio.gather(
            *(member.link.send(message) for member in self.members.values()), return_exceptions=True
        )

    async def all_gone(self) -> None:
        """Wait until every member has ended its connection."""
        if self._readers:
            await asyncio.wait(self._readers)

    async def close(self) -> None:
        """End every connection and stop listening."""
        tasks: list[asyncio.Task[Any]] = [*self._pending, *self._readers]
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members.values():
            member.link.close()
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.1)  # out of descriptors: some will come back
                continue
            if len(self._pending) >= MAX_PENDING:
                # The oldest has had the longest chance; refusing the newest would let idlers lock us out.
                next(iter(self._pending)).cancel()
            task = asyncio.create_task(self._greet(connection, address))
            self._pending[task] = connection
            task.add_done_callback(self._greeted)

    def _greeted(self, task: asyncio.Task[bool]) -> None:
        """Close what nobody took over; a task that was cancelled before its first step cannot do so."""
        connection = self._pending.pop(task)
        if task.cancelled() or task.exception() is not None or not task.result():
            connection.close()

    async def _greet(self, connection: socket.socket, address: tuple[Any, ...]) -> bool:
        """Check one connection's proof and hand it to whoever it is for; tell whether somebody took it."""
        try:
            connection.setblocking(False)
            set_up(connection)
            async with asyncio.timeout(PROOF_LIMIT):
                purpose, rank, digest = await self._check_proof(connection)
            if purpose is Purpose.RENDEZVOUS:
                await self._join(connection, rank, digest, str(address[0]))
                return True
            if rank in self.members:
                connection.setblocking(True)
                self._on_connection(purpose, rank, connection)
                return True
            self._refuse(f"{show(address)} opened a connection for rank {rank}, which has not joined")
        except (EOFError, TimeoutError, OSError):
            self._refuse(f"{show(address)} did not finish the proof of the launch key")
        except RemoteProtocolError as problem:
            self._refuse(f"{show(address)}: {problem.message}")
        return False

    async def _check_proof(self, connection: socket.socket) -> tuple[Purpose, int, bytes]:
        loop = asyncio.get_running_loop()
        data = await receive_exactly(connection, PEER_HELLO_LENGTH)
        hello = parse_peer_hello(data)
        answer = zero_hello(self.ranks, secrets.token_bytes(NONCE_LENGTH))
        await loop.sock_sendall(connection, answer)
        digest = transcript(data, answer)
        proof = await receive_exactly(connection, PROOF_LENGTH)
        if not same(proof, peer_proof(self._key, digest)):
            raise RemoteProtocolError("It does not know the launch key.")
        await loop.sock_sendall(connection, zero_proof(self._key, digest))
        return hello.purpose, hello.rank, digest

    async def _join(self, connection: socket.socket, rank: int, digest: bytes, host: str) -> None:
        receive, send = record_ciphers(self._key, digest)
        link = Link(connection, send, receive, f"rank {rank} ({host})")
        try:
            async with asyncio.timeout(HELLO_LIMIT):
                facts = parse_hello(await link.receive())
            problem = self._objection(rank, facts)
            if problem:
                self._refuse(f"rank {rank} from {host}: {problem}")
                await link.send({"type": "refused", "message": problem})
                link.close()
                return
        except (FlareError, TimeoutError) as failure:
            link.close()
            self._refuse(f"rank {rank} from {host} did not say hello: {failure}")
            return
        except BaseException:
            link.close()
            raise
        member = Member(rank, link, host, facts)
        self.members[rank] = member
        reader = asyncio.create_task(self._read(member))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    def _objection(self, rank: int, facts: PeerFacts) -> str:
        """Return why a peer may not join; empty when it may."""
        if not 1 <= rank < self.ranks:
            return f"this core has {self.ranks} ranks, 0 to {self.ranks - 1}; there is no peer {rank}."
        if rank in self.members:
            return f"rank {rank} has joined already, from {self.members[rank].host}."
        if facts.ranks not in (None, self.ranks):
            return f"it was started for a group of {facts.ranks} ranks; this core has {self.ranks}."
        if facts.index_sha256 not in (None, self._index_sha256):
            return "it was started for another core than rank zero serves."
        return ""

    async def _read(self, member: Member) -> None:
        """Welcome a member, then queue what it says until its connection ends."""
        try:
            await member.link.send({"type": "welcome", **self._welcome})
            self._remark(
                f"rank {member.rank} joined from {member.host} (flare {printable(member.facts.version)})"
            )
            if len(self.members) == self.ranks - 1:
                self._complete.set()
            while True:
                message = await member.link.receive()
                if message["type"] == "failed":
                    # A peer that fails says why before it goes: better than "it is gone".
                    self._lose(member, f"failed: {words_of(message)}")
                    return
                if message["type"] == "leave":
                    self._on_leave(member)
                else:
                    member.messages.put_nowait(message)
        except asyncio.QueueFull:
            self._lose(member, "failed: it says more than anybody asked for.")
        except FlareError as ended:
            self._lose(member, f"is gone: {ended.message}")

    def _lose(self, member: Member, how: str) -> None:
        self._on_lost(member, RankError(f"Rank {member.rank} ({member.host}) {how}"))

    def _refuse(self, what: str) -> None:
        self._refused = printable(what)
        self._remark(f"refused: {self._refused}")
