"""Sessions from the controller to its nodes.

A node is always expected to have the key that pairing recorded. At the start of every session a node that
missed revisions of the controller set is brought along, so that a revocation reaches it as soon as anybody
talks to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from flare.errors import ClockSkewError, FlareError, ForbiddenError, UnreachableError
from flare.orbit.controller import Controller
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.reporter import Reporter
from flare.session import Session, connect, parse_address
from flare.values import dataclass
from flare.wire.handshake import PROTOCOL_VERSION
from flare.wire.messages import Controllers, Hello, Message, Request, Status, StatusReply

CONNECT_TIMEOUT = 10.0  # seconds for name, connection, handshake and HELLO of one node
WATCHED_TIMEOUT = 5.0  # seconds for the same while a person waits; an agent answers within milliseconds
WAITING_AFTER = 2.0  # seconds until a person is told whom the command waits for
REQUEST_TIMEOUT = 30.0  # seconds for one small reply; a node whose disk is busy answers within it
REFUSED_CLOCK_DIFFERENCE = 60.0  # seconds a grant may lie in a node's future (docs/protocol.md, RUN)
MAX_CLOCK_DIFFERENCE = 30.0  # seconds; grants tolerate 60, so a warning comes before refusals

Reply = TypeVar("Reply")
Body = TypeVar("Body", bound=Message)


@dataclass(frozen=True, slots=True)
class Answer(Generic[Reply]):
    """What one node said: a reply with its HELLO, or why there is none."""

    node: NodeEntry
    reply: Reply | None
    hello: Hello | None
    error: FlareError | None


class Client:
    """Opens sessions as one controller."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._told: set[tuple[str, str]] = set()
        self._clocks: dict[str, float] = {}  # node -> seconds that its clock was ahead at its last STATUS

    def hello(self) -> Hello:
        """The HELLO of this controller."""
        controllers = self.controller.controllers
        return Hello(
            protocol=PROTOCOL_VERSION,
            public_key=self.controller.identity.public_key,
            controllers_revision=controllers.revision if controllers else 0,
            transfer_progress=True,
        )

    @asynccontextmanager
    async def session(self, node: NodeEntry, *, timeout: float = CONNECT_TIMEOUT) -> AsyncIterator[Session]:
        """Open a session and close it when the block ends.

        Raises: as `open`.
        """
        session = await self.open(node, timeout=timeout)
        try:
            yield session
        finally:
            await session.close()

    async def open(self, node: NodeEntry, *, timeout: float = CONNECT_TIMEOUT) -> Session:
        """Connect to a paired node and bring its controller set up to date.

        Args:
            node: the recorded node; the session is refused when another key answers.
            timeout: seconds until HELLO is answered.

        Raises:
            UnreachableError: nobody answers at its address.
            IdentityError: somebody else answers there.
            VersionError: it speaks another protocol version.
            ForbiddenError: the node does not obey this controller.
        """
        host, port = parse_address(node.address)
        try:
            session = await connect(
                host,
                port,
                self.controller.identity,
                expected_key=node.public_key,
                hello=self.hello(),
                timeout=timeout,
                peer_name=node.name,
            )
        except UnreachableError as problem:
            raise type(problem)(
                f"{problem.message} If {node.name} has another address now, `flare orbit pair ADDRESS` "
                "records it."
            ) from None
        try:
            await self._agree(node, session)
        except BaseException:
            await session.close()
            raise
        return session

    async def _agree(self, node: NodeEntry, session: Session) -> None:
        hello = session.hello
        if hello.node is None:
            raise ForbiddenError(
                f"Node {node.name} does not accept this controller: it was reset, or another controller "
                f"removed this one. Run `flare orbit forget {node.name}` here and pair it again, or ask a "
                "controller that it accepts to run `flare orbit controllers add`."
            )
        controllers = self.controller.controllers
        if controllers is None:
            return
        revision = hello.controllers_revision or 0
        if revision < controllers.revision:
            await session.request(Controllers(controllers.after(revision)), timeout=REQUEST_TIMEOUT)
        elif revision > controllers.revision:
            self._warn_once(
                node.name,
                "revision",
                f"Node {node.name} holds revision {revision} of the controller set, newer than revision "
                f"{controllers.revision} in {self.controller.orbit.path}. Copy [controllers] from the "
                "controller that wrote it.",
            )

    async def ask(
        self,
        node: NodeEntry,
        message: Request[Body],
        *,
        timeout: float = REQUEST_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
    ) -> tuple[Hello, Body]:
        """Send one request on a session of its own.

        Args:
            timeout: seconds until it is answered.
            connect_timeout: seconds until HELLO is answered.

        Returns:
            The node's HELLO and the reply.

        Raises: as `open`, and what the node's ERROR says.
        """
        async with self.session(node, timeout=connect_timeout) as session:
            reply = await session.request(message, timeout=timeout)
            return session.hello, reply

    async def ask_all(
        self,
        nodes: Sequence[NodeEntry],
        message: Request[Body],
        *,
        timeout: float = REQUEST_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
    ) -> list[Answer[Body]]:
        """Ask every node the same at the same time; a node that fails is an answer with its error."""
        return await self.for_all(
            nodes,
            lambda node: self.ask(node, message, timeout=timeout, connect_timeout=connect_timeout),
        )

    async def for_all(
        self, nodes: Sequence[NodeEntry], ask: Callable[[NodeEntry], Awaitable[tuple[Hello, Reply]]]
    ) -> list[Answer[Reply]]:
        """Run `ask` for every node at the same time and gather replies and errors, in the nodes' order."""

        waiting = {node.name for node in nodes}

        async def one(node: NodeEntry) -> Answer[Reply]:
            try:
                hello, reply = await ask(node)
            except FlareError as problem:
                return Answer(node, None, None, problem)
            finally:
                waiting.discard(node.name)
            return Answer(node, reply, hello, None)

        async with telling_who_waits(self.controller.reporter, waiting):
            return list(await asyncio.gather(*(one(node) for node in nodes)))

    async def statuses(
        self, nodes: Sequence[NodeEntry], *, connect_timeout: float = WATCHED_TIMEOUT
    ) -> list[Answer[StatusReply]]:
        """Ask every node for its STATUS; clocks that differ are told once."""
        import time

        answers: list[Answer[StatusReply]] = await self.ask_all(
            nodes, Status(), connect_timeout=connect_timeout
        )
        for answer in answers:
            if answer.reply is None:
                continue
            difference = answer.reply.time - time.time()
            self._clocks[answer.node.name] = difference
            if abs(difference) > MAX_CLOCK_DIFFERENCE:
                direction = "ahead of" if difference > 0 else "behind"
                self._warn_once(
                    answer.node.name,
                    "clock",
                    f"The clock of node {answer.node.name} is {abs(difference):.0f} s {direction} this "
                    "host's. Launches are refused beyond 60 s: set both clocks (timedatectl status).",
                )
        return answers

    def check_clocks(self, nodes: Iterable[NodeEntry]) -> None:
        """Refuse nodes that would refuse every grant: before anything is sent, not after an upload.

        Raises:
            ClockSkewError: a node's clock differed at its last STATUS by more than grants tolerate.
        """
        for node in nodes:
            difference = self._clocks.get(node.name, 0.0)
            if abs(difference) > REFUSED_CLOCK_DIFFERENCE:
                direction = "ahead of" if difference > 0 else "behind"
                raise ClockSkewError(
                    f"The clock of node {node.name} is {abs(difference):.0f} s {direction} this host's, so "
                    "it would refuse the grant. Set both clocks (timedatectl status), then try again."
                )

    def _warn_once(self, node: str, what: str, sentence: str) -> None:
        if (node, what) not in self._told:
            self._told.add((node, what))
            self.controller.reporter.warn(sentence)


@asynccontextmanager
async def telling_who_waits(reporter: Reporter, waiting: Collection[str]) -> AsyncIterator[None]:
    """Tell a person who watches what the block waits for, once, when it takes longer than a moment.

    Args:
        waiting: names of what did not answer yet; shrinks while the block runs.
    """

    def tell() -> None:
        if waiting:
            reporter.waiting(f"waiting for {', '.join(sorted(waiting))} …")

    timer = asyncio.get_running_loop().call_later(WAITING_AFTER, tell)
    try:
        yield
    finally:
        timer.cancel()


def common_kind(errors: Sequence[FlareError], otherwise: type[FlareError]) -> type[FlareError]:
    """Return the class for several nodes' failures in one error, and with it the exit code.

    Args:
        errors: one a node that failed; at least one.
        otherwise: the class when they have different exit codes.
    """
    codes = {error.exit_code for error in errors}
    return type(errors[0]) if len(codes) == 1 else otherwise


def required(answers: Sequence[Answer[Reply]], doing: str) -> list[Reply]:
    """Return every reply, for a command that needs all nodes.

    Args:
        answers: one a node.
        doing: what needs them, such as "Removing a group", for the message.

    Raises:
        FlareError: names each node that did not answer and why; of the kind that they share, else
            UnreachableError.
    """
    errors = [answer.error for answer in answers if answer.reply is None and answer.error is not None]
    if errors:
        lines = "\n".join(f"  {error.message}" for error in errors)
        kind = common_kind(errors, UnreachableError)
        raise kind(f"{doing} needs every node, but these did not answer:\n{lines}")
    return [answer.reply for answer in answers if answer.reply is not None]
