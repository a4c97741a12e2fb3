"""Pairing: this controller's key goes into a node's controller set, the node's key into orbit.toml."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import replace

from flare.errors import BusyError, FlareError, IdentityError, PairingError
from flare.identity import fingerprint
from flare.orbit.client import WATCHED_TIMEOUT, Client, telling_who_waits
from flare.orbit.controller import Controller, own_name, read_controllers
from flare.orbit.orbit_file import edit_orbit_file
from flare.orbit.orbit_records import NodeEntry, OrbitFile
from flare.paths import check_name
from flare.printable import printable
from flare.session import Session, connect, format_address, parse_address
from flare.trust.controllers import ControllerSet
from flare.trust.join_code import controller_proof, decode, hmac_key, node_proof
from flare.values import dataclass
from flare.wire.messages import NodeFacts, Pair

PAIR_TIMEOUT = 20.0  # seconds; a wrong proof costs the node one second, a slow disk some more


@dataclass(frozen=True, slots=True)
class Pairing:
    """What became of one host.

    Attributes:
        node: the recorded node, or None when it failed.
        known: it had been paired before, and nothing changed but its address perhaps.
        moved: its recorded address is another one now.
        error: why it failed.
    """

    host: str
    node: NodeEntry | None = None
    known: bool = False
    moved: bool = False
    error: FlareError | None = None


async def need_codes(controller: Controller, hosts: Sequence[str]) -> list[bool | FlareError]:
    """Look which hosts want a code before a person is asked for any.

    A recorded node that obeys this controller proves its key and needs none. What another says is no reason
    to leave the code out: it may have answered in the host's place.

    Returns:
        For each host whether it needs a code, or why it cannot be paired at all.

    Raises:
        ForbiddenError: this controller is not in its own orbit file's controller set.
    """
    controller = ensure_controller_set(controller)
    waiting = list(hosts)

    async def one(host: str) -> bool | FlareError:
        try:
            address, port = parse_address(host)
            identity, hello = controller.identity, Client(controller).hello()
            session = await connect(address, port, identity, hello=hello, timeout=WATCHED_TIMEOUT)
            await session.close()
            check_key_change(controller.orbit, format_address(address, port), session.peer_key)
        except FlareError as problem:
            return problem
        finally:
            waiting.remove(host)
        return session.hello.node is None or controller.orbit.node_of_key(session.peer_key) is None

    async with telling_who_waits(controller.reporter, waiting):
        return list(await asyncio.gather(*map(one, hosts)))


async def pair(
    controller: Controller, hosts: Sequence[str], *, codes: Sequence[str | None], name: str | None = None
) -> list[Pairing]:
    """Pair nodes, all at the same time.

    Args:
        controller: this controller; its set is made by the first pairing.
        hosts: "host" or "host:port", as the operator wrote them.
        codes: a join code for each host; None pairs with a node that accepts the first controller.
        name: another name for the one host instead of the node's own.

    Returns:
        One outcome a host, in their order; a host that failed does not stop the others.

    Raises:
        UsageError: a code is not one.
        ForbiddenError: this controller is not in its own orbit file's controller set.
    """
    keys = [hmac_key(decode(code)) if code is not None else None for code in codes]
    if name is not None:
        check_name(name, "node name")
    controller = ensure_controller_set(controller)
    waiting = list(hosts)

    async def one(host: str, key: bytes | None) -> Pairing:
        try:
            return await _Pairer(controller, key, name).pair(host)
        except FlareError as problem:
            return Pairing(host, error=problem)
        finally:
            waiting.remove(host)

    async with telling_who_waits(controller.reporter, waiting):
        pairings = (one(host, key) for host, key in zip(hosts, keys, strict=True))
        return list(await asyncio.gather(*pairings))


def ensure_controller_set(controller: Controller) -> Controller:
    """Return the controller with a set that lists it; before the first pairing revision 1 is written.

    It is on disk before any node takes it: a node must never hold a set that this controller forgot.

    Raises:
        ForbiddenError: there is a set, and it does not list this controller.
    """
    if controller.controllers is None:
        with edit_orbit_file(controller.paths.orbit_file) as edit:
            found = read_controllers(edit.before)
            if found is None:
                found = ControllerSet.first(controller.identity, own_name())
                edit.set_controllers(found.chain)
            orbit = edit.now
        controller = replace(controller, orbit=orbit, controllers=found)
    controller.member_set()
    return controller


class _Pairer:
    def __init__(self, controller: Controller, key: bytes | None, name: str | None) -> None:
        self.controller = controller
        self.key = key
        self.name = name

    async def pair(self, host: str) -> Pairing:
        address, port = parse_address(host)
        written = format_address(address, port)
        session = await connect(
            address,
            port,
            self.controller.identity,
            hello=Client(self.controller).hello(),
            timeout=WATCHED_TIMEOUT,
        )
        try:
            check_key_change(self.controller.orbit, written, session.peer_key)
            known = self.controller.orbit.node_of_key(session.peer_key)
            # A name that cannot be recorded must not cost a code.
            self.check_name(self.controller.orbit, host, session.peer_key, self.name, "was not paired")
            accepted = session.hello.node
            if accepted is not None and (known is not None or self.key is None):
                # The node obeys this controller already; given a code, it must still prove who it is.
                facts = accepted
            else:
                facts = await self.exchange(host, session)
            return self.record(host, written, session.peer_key, facts, paired_before=accepted is not None)
        finally:
            await session.close()

    async def exchange(self, host: str, session: Session) -> NodeFacts:
        own_proof = controller_proof(self.key, session.handshake_hash) if self.key is not None else None
        request = Pair(
            proof=own_proof, controllers=self.controller.member_set().chain, name=self.controller_name()
        )
        try:
            reply = await session.request(request, timeout=PAIR_TIMEOUT)
        except PairingError:
            # The node never says why; its log does.
            raise PairingError(f"{printable(host)} refused to pair. {self.remedy()}") from None
        if self.key is not None:
            expected = node_proof(self.key, session.handshake_hash)
            if reply.proof is None or not hmac.compare_digest(reply.proof, expected):
                raise PairingError(
                    f"{printable(host)} did not prove that it knows the code, so it was not recorded: "
                    "something between here and the host may have answered in its place. Check the address, "
                    "then run `flare agent reset` and `flare agent join-code` on the host and pair again."
                )
        node: NodeFacts = reply.node
        return node

    def controller_name(self) -> str:
        for entry in self.controller.member_set().controllers:
            if entry.public_key == self.controller.identity.public_key:
                return entry.name
        return own_name()

    def remedy(self) -> str:
        if self.key is None:
            return (
                "Without a code only a node that accepts the first controller can be paired. On the host, "
                "`flare agent join-code` prints a code, which `flare orbit pair` asks for in a terminal and "
                "with --code - reads from standard input; a node that another controller holds needs `flare "
                "orbit controllers add` there, or `flare agent reset` on the host."
            )
        return (
            "The code is wrong (every host has its own), used or older than 24 hours, or the node is paired "
            "already. On the host, `flare agent join-code` prints a new code, `flare agent reset` makes it "
            "unpaired, and the agent's log (journalctl --user -u flare-agent, or the terminal that runs "
            "`flare agent`) says which it was."
        )

    def record(
        self, host: str, address: str, public_key: bytes, facts: NodeFacts, *, paired_before: bool
    ) -> Pairing:
        with edit_orbit_file(self.controller.paths.orbit_file) as edit:
            orbit = edit.before
            check_key_change(orbit, address, public_key)
            name = self.name if self.name is not None else facts.name
            paired = (
                "was paired but not recorded: it obeys this controller now and needs no code any more, so "
                "leave the code out or empty"
            )
            self.check_name(orbit, host, public_key, name, paired)
            known = orbit.node_of_key(public_key)
            if known is not None:
                moved = known.address != address
                if moved:
                    edit.replace_address(known.name, address)
                    known = NodeEntry(known.name, public_key, address)
                return Pairing(host, known, known=paired_before, moved=moved)
            node = NodeEntry(name, public_key, address)
            edit.add_node(node)
            return Pairing(host, node)

    def check_name(
        self, orbit: OrbitFile, host: str, public_key: bytes, name: str | None, outcome: str
    ) -> None:
        """Refuse a name under which a node cannot be recorded.

        Args:
            name: None: not known yet.
            outcome: what became of the host, for the message.

        Raises:
            BusyError: the node has another name already, or another node has this one.
        """
        known = orbit.node_of_key(public_key)
        if known is not None:
            if self.name is not None and self.name != known.name:
                raise BusyError(
                    f"{printable(host)} is recorded as {known.name}. To call it {self.name}, run `flare "
                    f"orbit forget {known.name}`, then pair again with --name {self.name}."
                )
            return
        if any(node.name == name for node in orbit.nodes):
            assert name is not None, "nodes have names"
            raise BusyError(
                f"The name {name} belongs to another node (fingerprint "
                f"{orbit.node(name).fingerprint[:16]}…), so {printable(host)} (fingerprint "
                f"{fingerprint(public_key)[:16]}…) {outcome}. If they are two hosts, run `flare orbit pair "
                f"{printable(host)} --name OTHER`; if that host was "
                f"reinstalled, run `flare orbit forget {name}` and pair it again."
            )


def check_key_change(orbit: OrbitFile, address: str, public_key: bytes) -> None:
    """Refuse another key at an address that is recorded.

    Raises:
        IdentityError: the recorded node had another key.
    """
    for node in orbit.nodes:
        if node.address == address and node.public_key != public_key:
            raise IdentityError(
                f"{address} answers with the key {fingerprint(public_key)[:16]}…, but {node.name} is "
                f"recorded there with {node.fingerprint[:16]}…. If the host was reinstalled, run `flare "
                f"orbit forget {node.name}` and pair it again; if not, somebody else answers in its place."
            )
