"""The peers as rank zero sees them: they meet, take their bytes, load, and are told the end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from flare.cores.primary import Primary
from flare.engines.discovery import EngineInstall
from flare.errors import FlareError, RemoteProtocolError
from flare.rank.bootstrap import Offer, send_metadata
from flare.rank.capacity import Agreement
from flare.rank.launch import Failure, RunRequest
from flare.rank.lifecycle import Lifecycle, Phase
from flare.rank.proof import Purpose
from flare.rank.ranges import RangeServer
from flare.rank.rendezvous import Member, Rendezvous
from flare.rank.routes import endpoints_message, own_endpoints
from flare.rank.sockets import show
from flare.rank.tunnel import TunnelHead
from flare.serving_options import WILDCARDS

SILENCE_LIMIT: Final = 1800.0
"""Seconds without a word of a peer that receives or verifies: a slow disk may digest for long."""
LISTEN_LIMIT: Final = 120.0
"""Seconds for a peer's engine to start and listen."""
FAREWELL_LIMIT: Final = 5.0
"""Seconds for the peers to end after they were told."""


class PeerGroup:
    """Ranks 1 and up of one launch.

    Args:
        request: what rank zero was asked for; its rendezvous is set.
        primary: of the core.
        install: rank zero's engine.
        lifecycle: tells the phases.
        failure: gets what goes wrong with a peer.
        on_leave: called with (rank, host) of a peer that was asked to stop on its own node.
    """

    def __init__(
        self,
        request: RunRequest,
        primary: Primary,
        install: EngineInstall,
        lifecycle: Lifecycle,
        failure: Failure,
        on_leave: Callable[[int, str], None],
    ) -> None:
        self._request = request
        self._primary = primary
        self._install = install
        self._lifecycle = lifecycle
        self._failure = failure
        self._on_leave = on_leave
        self._loop = asyncio.get_running_loop()
        self._ranges = RangeServer(primary, self._remark_from_thread)
        self._tunnels = [TunnelHead(rank, self._broken) for rank in range(1, primary.index.ranks)]
        self._rendezvous: Rendezvous | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """The loopback ports at which the engine reaches the ranks 1, 2, …"""
        return tuple(tunnel.port for tunnel in self._tunnels)

    async def meet(self) -> None:
        """Listen, and wait until every rank has joined.

        Raises:
            BusyError, RankError: nothing can listen there, or a rank did not come.
        """
        request, ranks = self._request, self._primary.index.ranks
        assert request.rendezvous is not None, "a group has a rendezvous"
        endpoints = await asyncio.to_thread(own_endpoints, request.settings.fabric_interfaces)
        # A rendezvous on one address alone serves nothing on the others.
        everywhere = request.rendezvous[0] in WILDCARDS and (request.key is not None or request.insecure)
        self._rendezvous = Rendezvous(
            ranks=ranks,
            key=request.proof_key,
            index_sha256=self._primary.index_sha256,
            remark=self._lifecycle.remark,
            on_connection=self._take_connection,
            on_lost=lambda _member, problem: self._failure.report(problem),
            on_leave=lambda member: self._on_leave(member.rank, member.host),
            welcome={
                **Offer.from_primary(self._primary).to_message(),
                "engine_version": self._install.version,
                "endpoints": endpoints_message(endpoints) if everywhere else [],
            },
        )
        address = self._rendezvous.listen(
            *request.rendezvous,
            keyed=request.key is not None,
            insecure=request.insecure,
            launched=request.launched,
        )
        self._lifecycle.enter(Phase.RENDEZVOUS, f"waiting for {ranks - 1} peer(s) at {show(address)}")
        await self._rendezvous.meet(request.meeting_seconds)

    async def supply(self) -> dict[int, int]:
        """Give every peer what it asks for; return rank -> bytes that it can give beside its weights.

        Raises:
            FlareError: a peer failed or fell silent.
        """
        return await self._with_each(self._supply)

    async def load(self, agreement: Agreement) -> None:
        """Tell what was agreed, wait until every peer's engine listens, and open the way to them.

        Raises:
            FlareError: a peer failed or fell silent.
        """
        await self.tell(
            {
                "type": "agreed",
                "context_length": agreement.context_length,
                "slots": agreement.slots,
                "capacity": max(agreement.capacity, 0),
            }
        )
        await self._with_each(_listening)
        for tunnel in self._tunnels:
            tunnel.start()

    async def announce(self, holdings: Mapping[int, Sequence[str]]) -> None:
        """Tell every peer that the group serves, and what it holds.

        Args:
            holdings: rank -> what the engine says that it holds.
        """
        for rank, member in self._members.items():
            holds = ", ".join(holdings.get(rank, ())) or "nothing that the engine tells of"
            self._lifecycle.remark(f"rank {rank} ({member.host}) holds {holds}")
            await member.link.send({"type": "serving", "holds": holds})

    async def tell(self, message: dict[str, Any]) -> None:
        """Send one message to every peer that is still there."""
        if self._rendezvous is not None:
            await self._rendezvous.tell(message)

    async def end(self, failed: FlareError | None) -> None:
        """Tell the end, wait a little for the peers to go, and close everything.

        Args:
            failed: why; None for an orderly end.
        """
        message: dict[str, Any] = {"type": "stop", "failed": failed is not None}
        if failed is not None:
            message["message"] = failed.message[:2000]
        if self._rendezvous is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_LIMIT):
                    await self._rendezvous.tell(message)
                    await self._rendezvous.all_gone()
        for tunnel in self._tunnels:
            tunnel.close()
        self._ranges.close()
        if self._rendezvous is not None:
            await self._rendezvous.close()

    @property
    def _members(self) -> Mapping[int, Member]:
        assert self._rendezvous is not None, "the ranks have met"
        return self._rendezvous.members

    async def _with_each(self, step: Callable[[Member], Awaitable[int]]) -> dict[int, int]:
        """Take one step with every member at the same time."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    rank: group.create_task(_awaited(step(member))) for rank, member in self._members.items()
                }
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None
        return {rank: task.result() for rank, task in tasks.items()}

    async def _supply(self, member: Member) -> int:
        while True:
            message = await member.next_message(SILENCE_LIMIT, "its bytes to be there and verified")
            match message["type"]:
                case "want":
                    await send_metadata(member.link, self._primary)
                case "progress":
                    continue
                case "ready":
                    capacity = message.get("capacity")
                    if not isinstance(capacity, int) or isinstance(capacity, bool):
                        raise RemoteProtocolError(f"Rank {member.rank} did not say what it can hold.")
                    return capacity
                case _:
                    raise RemoteProtocolError(f"Rank {member.rank} sent a message that is not due here.")

    def _take_connection(self, purpose: Purpose, rank: int, connection: socket.socket) -> None:
        if purpose is Purpose.RANGES:
            self._ranges.serve(rank, connection)
        else:
            self._tunnels[rank - 1].offer(connection)

    def _broken(self, rank: int, problem: OSError) -> None:
        self._failure.report_broken(self._loop, f"rank {rank}", problem)

    def _remark_from_thread(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the rank with it
            self._loop.call_soon_threadsafe(self._lifecycle.remark, text)


async def _awaited(step: Awaitable[int]) -> int:
    return await step


async def _listening(member: Member) -> int:
    await member.expect("listening", LISTEN_LIMIT, "its engine to listen")
    return 0
