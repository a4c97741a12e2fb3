"""A planned push, carried out: the first node's copy, then everybody else from it, all at the same time.

A node that fails does not end the others: they are independent, and what arrived complete stays. Cancelling
closes every session, which ends the transfers at their nodes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from flare.errors import FlareError, IntegrityError, LocalProtocolError, RemoteProtocolError
from flare.orbit.checking import check_files
from flare.orbit.client import Client
from flare.orbit.pins import Pins
from flare.orbit.push import Delivery, PushPlan
from flare.orbit.reporter import Bar
from flare.orbit.staging import check_room
from flare.orbit.transfers import package_of, transfer
from flare.orbit.upload import core_uploads, upload_files
from flare.trust.grants import GRANT_LIFETIME, Grant, Member, new_launch_id, sign_grant
from flare.trust.signed import KIND_TRANSFER_GRANT, SignedRecord
from flare.values import dataclass
from flare.wire.messages import Transfer, TransferSource
from flare_workers.spawner import SpawnerHandle


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of a delivery.

    Attributes:
        moved: bytes that came over the network.
        seconds: from the request to the last byte on the disk.
        verified: whether everything there was held against the signed digests.
        error: why it failed; None when it did not.
    """

    delivery: Delivery
    moved: int = 0
    seconds: float = 0.0
    verified: bool = False
    error: FlareError | None = None

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.moved / max(self.seconds, 0.001)

    def to_json(self) -> dict[str, Any]:
        """The outcome for scripts."""
        error = None if self.error is None else {"code": self.error.code, "message": self.error.message}
        return {
            **self.delivery.to_json(),
            "moved": self.moved,
            "seconds": round(self.seconds, 3),
            "verified": self.verified,
            "error": error,
        }


async def distribute(client: Client, plan: PushPlan, spawner: SpawnerHandle | None) -> list[Delivered]:
    """Carry a push out.

    Args:
        spawner: forks the workers of an upload; None when the core is not on this host.

    Returns:
        One outcome a node, in the list's order, failures included; `raise_failures` makes an error of them.
        The first one's alone when all others were to be made from its copy, and it did not get one.
    """
    async with Pins(client) as pins:
        return await _Push(client, plan, spawner, pins).run()


def report_delivered(client: Client, outcomes: Sequence[Delivered]) -> None:
    """Print the last line of every node that got something."""
    for outcome in outcomes:
        if outcome.error is None and outcome.delivery.skipped is None:
            client.controller.reporter.say(_last_line(outcome))


def raise_failures(outcomes: Sequence[Delivered]) -> None:
    """Raise the failures of a push as one error, of the first one's kind.

    Raises:
        FlareError: a line for each node that failed.
    """
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    if failed:
        raise type(failed[0])("\n".join(problem.message for problem in failed))


def _last_line(outcome: Delivered) -> str:
    delivery = outcome.delivery
    name = delivery.node.name
    if delivery.source is None:
        if not outcome.moved:
            return f"{name} has the complete core in its cache already."
        return (
            f"{name} got {outcome.moved:,} bytes in {outcome.seconds:.1f} s ({outcome.rate / 1e9:.3f} GB/s) "
            "from this controller; its ranks verify them before they load them."
        )
    state = "verified" if outcome.verified else "stored, not verified,"
    held = f"{name}: {delivery.what}, {delivery.size:,} bytes {state}"
    if not outcome.moved:
        return f"{held} in its cache already."
    return f"{held} in {outcome.seconds:.1f} s ({outcome.rate / 1e9:.3f} GB/s)."


class _Push:
    def __init__(self, client: Client, plan: PushPlan, spawner: SpawnerHandle | None, pins: Pins) -> None:
        self.client = client
        self.plan = plan
        self.spawner = spawner
        self.pins = pins  # the first node's copy stays until everybody has theirs
        self.launch = new_launch_id(plan.name, time.time(), secrets.token_bytes(2))

    async def run(self) -> list[Delivered]:
        first, *others = self.plan.deliveries
        if any(delivery.source is not None and delivery.skipped is None for delivery in self.plan.deliveries):
            self.grant()  # one that is too large is refused before a byte moves
        try:
            if first.skipped is None and first.source_rank is None:
                # The first node's copy is what all others are made from.
                if first.source is None:
                    begun = [await self.upload(first)]
                else:
                    await self.pins.keep(self.plan.core, first.node)
                    begun = await self.fetch([first])
                if begun[0].error is not None:
                    return begun
                return [*begun, *await self.fetch(others)]
            return await self.fetch(self.plan.deliveries)
        except asyncio.CancelledError:
            self.client.controller.reporter.warn(
                f"Interrupted: the nodes were told to end the transfers of {self.plan.name}. What is "
                "complete stays in their caches."
            )
            raise

    async def upload(self, delivery: Delivery) -> Delivered:
        """Send the core from here to the first node."""
        if self.spawner is None:
            raise LocalProtocolError("A core on this host needs upload workers, and none were started.")
        client, node = self.client, delivery.node
        streams = self.plan.request.streams
        began = time.monotonic()
        moved = 0
        try:
            missing = await self.pins.missing(core_uploads(self.plan.core), node)
            if missing:
                check_room(node, missing, self.plan.cache_free)
                await check_files(client, self.plan.core, missing)
                began = time.monotonic()
                moved = await upload_files(client, node, missing, self.spawner, streams=streams)
        except FlareError as problem:
            return Delivered(delivery, error=_explained(delivery, problem))
        return Delivered(delivery, moved=moved, seconds=time.monotonic() - began)

    async def fetch(self, deliveries: Sequence[Delivery]) -> list[Delivered]:
        """Have nodes fetch, all at the same time; each has a row on the terminal."""
        with self.client.controller.reporter.progress() as add:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self.fetch_one(
                            delivery, None if delivery.skipped else add(_label(delivery), delivery.size)
                        )
                    )
                    for delivery in deliveries
                ]
        return [task.result() for task in tasks]

    async def fetch_one(self, delivery: Delivery, bar: Bar | None) -> Delivered:
        """Have one node fetch what it is to receive."""
        if bar is None:
            return Delivered(delivery)
        source, way = delivery.source, delivery.way
        assert source is not None, "uploads do not come here"
        assert way is not None, "a planned transfer has a way"
        request = Transfer(
            grant=self.grant(),
            publisher=self.plan.publisher.to_text(),
            source=TransferSource(source.name, source.public_key, source.address, delivery.source_rank),
            directory=delivery.directory,
            streams=way.streams,
            files=delivery.files,
            resume=self.plan.request.resume,
        )
        try:
            reply = await transfer(self.client, delivery.node, request, bar)
        except FlareError as problem:
            error = _explained(delivery, problem)
            if isinstance(problem, IntegrityError) and self.plan.core.source is None:
                # Nothing else replaces that copy: its files have the right sizes, so they are not sent again.
                error.message += (
                    f" {source.name} got its copy from this controller: remove "
                    f"~/.cache/flare/cores/{self.plan.core.entry} there, so that a push sends it again."
                )
            return Delivered(delivery, error=error)
        return Delivered(delivery, reply.bytes, reply.seconds, reply.verified)

    def grant(self) -> SignedRecord:
        """Sign what allows the transfers, with a window that begins now: an earlier stage may take hours."""
        issued = int(time.time())
        plan = self.plan
        members = tuple(
            Member(rank, node.name, node.public_key, node.address)
            for rank, node in enumerate(plan.request.nodes)
        )
        grant = Grant(
            kind=KIND_TRANSFER_GRANT,
            launch=self.launch,
            name=plan.name,
            members=members,
            package=package_of(plan.core),
            rendezvous=None,
            serving=(),
            rank_zero=(),
            roce_ring=plan.request.ring,
            roce_chain=plan.request.chain,
            transfer_fabric=plan.fabric,
            single_host=len(members) == 1,
            issued=issued,
            expires=issued + GRANT_LIFETIME,
        )
        return sign_grant(self.client.controller.identity, grant)


def _label(delivery: Delivery) -> str:
    """What a row says: who receives, and over what."""
    assert delivery.way is not None
    return f"{delivery.node.name} ({delivery.way.short})"


def _explained(delivery: Delivery, problem: FlareError) -> FlareError:
    """Say whose delivery failed; the node's own sentence names file, block and stream."""
    source = "this controller" if delivery.source is None else delivery.source.name
    what = delivery.what[0].upper() + delivery.what[1:]
    sentence = f"{what} did not get from {source} to {delivery.node.name}: {problem.message}"
    if isinstance(problem, RemoteProtocolError):
        return RemoteProtocolError(sentence)
    return FlareError.from_wire(problem.code, sentence)
