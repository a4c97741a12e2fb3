"""Who controls the nodes, and which nodes this controller remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flare.errors import ConflictError, IdentityError, UsageError
from flare.identity import public_key_from_hex
from flare.orbit.client import Answer, Client
from flare.orbit.controller import Controller, read_controllers
from flare.orbit.orbit_file import edit_orbit_file
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.pairing import ensure_controller_set
from flare.paths import check_name
from flare.trust.controllers import ControllerSet
from flare.values import dataclass
from flare.wire.messages import Hello


@dataclass(frozen=True, slots=True)
class Distribution:
    """A new controller set, and which nodes have it; `answers` has an error where a node missed it."""

    controllers: ControllerSet
    answers: list[Answer[int]]


async def add_controller(controller: Controller, name: str, public_key: str) -> Distribution:
    """Authorize another controller on every node.

    Args:
        name: what it is called in the set.
        public_key: its public key as 64 hex digits.

    Raises:
        UsageError: that is no public key, the name or key is in the set, or the set is full.
        ConflictError: another controller changed the set first.
        ForbiddenError: this controller is not in the set itself.
    """
    check_name(name, "controller name")
    try:
        key = public_key_from_hex(public_key)
    except IdentityError as problem:
        raise UsageError(f"{problem.message} `flare orbit controllers list` there prints its own.") from None
    return await _change(controller, lambda old: old.with_added(controller.identity, name, key))


async def remove_controller(controller: Controller, selector: str) -> Distribution:
    """Revoke a controller on every node.

    Args:
        selector: its name, public key or fingerprint.

    Raises:
        NotFoundError: it is not in the set.
        UsageError: several match, or it is the last one.
        ConflictError: another controller changed the set first.
        ForbiddenError: this controller is not in the set itself.
    """
    return await _change(controller, lambda old: old.with_removed(controller.identity, selector))


async def _change(controller: Controller, step: Callable[[ControllerSet], ControllerSet]) -> Distribution:
    """Sign the next revision, write it, then bring it to every node."""
    controller = ensure_controller_set(controller)
    await _refuse_when_behind(controller)
    with edit_orbit_file(controller.paths.orbit_file) as edit:
        old = read_controllers(edit.before)
        assert old is not None, "ensure_controller_set wrote one"
        new = step(old)
        edit.set_controllers(new.chain)
        orbit = edit.now
    # The key that signs is still in the nodes' older set, even when it removes itself with this revision.
    client = Client(replace(controller, orbit=orbit, controllers=new))

    async def bring(node: NodeEntry) -> tuple[Hello, int]:
        async with client.session(node) as session:
            return session.hello, new.revision

    return Distribution(new, await client.for_all(orbit.nodes, bring))


async def _refuse_when_behind(controller: Controller) -> None:
    """Two controllers that both sign the next revision would split the nodes between them."""
    client = Client(controller)
    revision = controller.member_set().revision

    async def ask(node: NodeEntry) -> tuple[Hello, int]:
        async with client.session(node) as session:
            return session.hello, session.hello.controllers_revision or 0

    for answer in await client.for_all(controller.orbit.nodes, ask):
        if answer.reply is not None and answer.reply > revision:
            raise ConflictError(
                f"Node {answer.node.name} holds revision {answer.reply} of the controller set, newer than "
                f"revision {revision} in {controller.orbit.path}: another controller changed it. Copy "
                "[controllers] with its history from that controller's orbit.toml, then run this again."
            )


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A node that was removed from orbit.toml, and what still names it there."""

    node: NodeEntry
    clusters: tuple[str, ...]
    groups: tuple[str, ...]


def forget_node(controller: Controller, name: str) -> Forgotten:
    """Remove a node from orbit.toml; nothing changes on the node.

    Raises:
        NotFoundError: there is no such node.
    """
    node = controller.orbit.node(name)
    with edit_orbit_file(controller.paths.orbit_file) as edit:
        edit.remove_node(name)
        orbit = edit.now
    clusters = tuple(cluster for cluster, nodes in orbit.clusters.items() if name in nodes)
    groups = tuple(group.name for group in orbit.groups.values() if name in group.nodes)
    return Forgotten(node, clusters, groups)
