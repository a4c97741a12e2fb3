"""Stopping a group: rank zero first, so that running requests drain with all their peers still there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flare.errors import FlareError, NotFoundError, UnreachableError
from flare.orbit.client import Answer, Client, common_kind
from flare.orbit.follow import describe_exit
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.runs import RUNNING, report_of
from flare.session import Session
from flare.values import dataclass
from flare.wire.messages import Exit, Status, StatusReply, Stop

PEER_GRACE = 30.0  # seconds; the specification's time for peers to leave with rank zero
PEER_POLL = 0.5  # seconds between looks at peers that are about to leave
BEFORE_THE_MEETING = ("", "resolving", "rendezvous")  # phases of a peer that rank zero has not met
UNKNOWN = "unknown"  # the phase of a peer whose node does not answer
FIRST_NOTE = 1.0  # seconds after which a rank that does not end at once is draining
NOTE_EVERY = 10.0  # seconds between remarks while rank zero drains


@dataclass(frozen=True, slots=True)
class Stopped:
    """How one rank of a stopped group ended; `exit` is None where its node knows nothing of it any more."""

    group: str
    launch: str
    rank: int
    node: str
    exit: Exit | None

    def to_json(self) -> dict[str, Any]:
        """The rank for scripts."""
        end = self.exit
        return {
            "group": self.group,
            "launch": self.launch,
            "rank": self.rank,
            "node": self.node,
            "status": None if end is None else end.status,
            "signal": None if end is None else end.signal,
            "reason": None if end is None else end.reason,
            "remark": None if end is None else end.remark,
        }


async def stop_group(
    client: Client,
    name: str,
    launch: str,
    members: Sequence[tuple[int, NodeEntry]],
    *,
    now: bool = False,
    announce: bool = True,
    peer_grace: float = PEER_GRACE,
) -> list[Stopped]:
    """Stop one launch: STOP to rank zero, wait for its EXIT, then STOP to peers that stayed.

    When it is cancelled (Ctrl-C), the nodes go on with what they were asked.

    Args:
        name, launch: the group's name and the launch's identifier.
        members: (rank, node) of every rank that is to stop.
        now: do not drain: end requests at once, and do not wait for peers.
        announce: tell how each rank ended, and what goes on when this is cancelled; not wanted where the
            output is followed anyway.
        peer_grace: seconds that peers get to leave by themselves.

    Returns:
        Every rank that has ended, by rank.

    Raises:
        FlareError: some ranks could not be stopped; the message names them and what to do. Of the kind that
            their nodes' answers share, else UnreachableError.
    """
    zero = [(rank, node) for rank, node in members if rank == 0]
    peers = [(rank, node) for rank, node in members if rank != 0]
    stopper = _Stopper(client, name, launch, now=now, announce=announce)
    try:
        for rank, node in zero:
            await stopper.stop(rank, node)
        if peers and not now and not stopper.problems:
            peers = await stopper.left_behind(peers, peer_grace if zero else 0.0)
            # Requests live at rank zero: once it has ended, a peer that stays has nothing to finish.
            stopper.now = bool(zero)
        await asyncio.gather(*(stopper.stop(rank, node) for rank, node in peers))
    except asyncio.CancelledError:
        if announce:
            stopper.tell_what_goes_on()
        raise
    if stopper.problems:
        raise _not_all(name, stopper.problems)
    client.controller.reporter.say(f"Stopped {name} ({launch}).")
    return sorted(stopper.stopped, key=lambda stopped: stopped.rank)


def _not_all(name: str, problems: Mapping[str, FlareError]) -> FlareError:
    """Return the error of a group that may still run; problems are by rank and node, as a person reads it."""
    kind = common_kind(list(problems.values()), UnreachableError)
    again = f"Run `flare orbit stop {name}` again when they answer; on"
    return kind(
        f"Not all of {name} could be stopped:\n"
        + "\n".join(f"  {where}: {problem.message}" for where, problem in problems.items())
        + f"\n{again if issubclass(kind, UnreachableError) else 'On'} a host itself, "
        "`systemctl --user restart flare-agent` ends all its ranks."
    )


class _Stopper:
    def __init__(self, client: Client, name: str, launch: str, *, now: bool, announce: bool) -> None:
        self.client = client
        self.reporter = client.controller.reporter
        self.name = name
        self.launch = launch
        self.now = now
        self.announce = announce
        self.problems: dict[str, FlareError] = {}  # by rank and node, as a person reads it
        self.asked: list[str] = []
        self.stopped: list[Stopped] = []

    def tell_what_goes_on(self) -> None:
        """Say what a person who left will find."""
        if not self.asked:
            self.reporter.warn(f"Left before {self.name} was asked to stop: it runs on.")
            return
        self.reporter.warn(
            f"Left while {self.name} stops. Its nodes go on with it: {', '.join(self.asked)}"
            f"{'' if self.now else ' to finish running requests and end'}. Look with `flare orbit ls`, hurry "
            f"it with `flare orbit stop {self.name} --now`."
        )

    async def stop(self, rank: int, node: NodeEntry) -> None:
        where = f"rank {rank} on {node.name}"
        try:
            async with self.client.session(node) as session:
                self.asked.append(f"{where} was asked{' to end at once' if self.now else ''}")
                await session.request(Stop(group=self.launch, now=self.now))
                self.reporter.note(f"{self.name}: asked {where} to stop{' at once' if self.now else ''}.")
                message = await self._wait_for_exit(session, where)
        except NotFoundError:
            self._ended(rank, node, None)  # by itself meanwhile, and its history went with it
            return
        except FlareError as problem:
            self.problems[where] = problem
            return
        self._ended(rank, node, message)

    def _ended(self, rank: int, node: NodeEntry, message: Exit | None) -> None:
        self.stopped.append(Stopped(self.name, self.launch, rank, node.name, message))
        if self.announce and message is not None:
            self.reporter.note(f"{self.name}: rank {rank} on {node.name} {describe_exit(message)}")

    async def _wait_for_exit(self, session: Session, where: str) -> Exit:
        began = time.monotonic()
        waiting = asyncio.ensure_future(session.receive(Exit))
        try:
            await asyncio.wait([waiting], timeout=FIRST_NOTE)
            if not waiting.done() and not self.now:
                self.reporter.note(
                    f"{self.name}: {where} finishes running requests, for as long as its --drain-timeout "
                    f"allows (120 s unless given). `flare orbit stop {self.name} --now` ends them."
                )
            while not waiting.done():
                await asyncio.wait([waiting], timeout=NOTE_EVERY)
                if not waiting.done():
                    seconds = time.monotonic() - began
                    self.reporter.note(
                        f"{self.name}: {where} finishes running requests ({seconds:.0f} s so far; `flare "
                        f"orbit stop {self.name} --now` ends them)."
                    )
            message = await waiting
        finally:
            waiting.cancel()
        return message

    def _phase(self, rank: int, answer: Answer[StatusReply]) -> str | None:
        """What the peer does now; None when it has left, empty when it does not say."""
        if answer.reply is None:
            return UNKNOWN
        report = report_of(self.launch, rank, answer)
        return (report.phase or "") if report is not None and report.state == RUNNING else None

    def _end_of(self, rank: int, answer: Answer[StatusReply]) -> Exit | None:
        """How a peer ended that left by itself, as far as its node still knows."""
        report = report_of(self.launch, rank, answer)
        if report is None or (report.status is None) == (report.signal is None):
            return None
        return Exit(report.status, report.signal, report.reason, report.remark)

    async def left_behind(
        self, peers: list[tuple[int, NodeEntry]], grace: float
    ) -> list[tuple[int, NodeEntry]]:
        """Wait until the peers have left; return those that are still there after `grace` seconds.

        Peers that rank zero never met cannot notice its end, so they are not waited for.
        """
        deadline = time.monotonic() + grace
        told = False
        while True:
            nodes = [node for _, node in peers]
            answers = await self.client.ask_all(nodes, Status())
            phases = {
                (rank, node): self._phase(rank, answer)
                for (rank, node), answer in zip(peers, answers, strict=True)
            }
            for (rank, node), answer in zip(peers, answers, strict=True):
                if phases[rank, node] is None:
                    self._ended(rank, node, self._end_of(rank, answer))
            peers = [peer for peer, phase in phases.items() if phase is not None]
            if all(phases[peer] in BEFORE_THE_MEETING for peer in peers) or time.monotonic() >= deadline:
                return peers
            if not told:
                where = ", ".join(f"rank {rank} on {node.name}" for rank, node in peers)
                self.reporter.note(f"{self.name}: waiting up to {grace:.0f} s for {where} to leave.")
                told = True
            await asyncio.sleep(PEER_POLL)
