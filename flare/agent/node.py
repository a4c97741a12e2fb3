"""Everything that answers to a request share: the node's parts, and what it says of itself."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flare.agent.arriving import Arrivals, Digest
from flare.agent.authority import Authority
from flare.agent.cache import Cache
from flare.agent.looking import CacheLook
from flare.agent.pairing import Pairing
from flare.agent.ranks import Ranks
from flare.agent.sampler import Sampler
from flare.agent.transfers.running import Transfers
from flare.agent.uploads import Uploads
from flare.engines.discovery import installed_engines, records_stamp
from flare.errors import TransferError
from flare.identity import Identity
from flare.paths import Paths
from flare.settings import Settings
from flare.trust.grants import Grant
from flare.version import VERSION
from flare.wire.handshake import PROTOCOL_VERSION
from flare.wire.messages import Hello, NodeFacts
from flare_workers.jobs import Channel, Job, Result

# Seconds that what PATH and the settings give is believed; what `flare engine install` puts shows at once.
ENGINES_FRESH = 30.0
GRANT_LIFE = 24 * 3600  # seconds that a transfer grant lets its members fetch


class Pool(Protocol):
    """What the handlers need of flare_workers.pool.WorkerPool."""

    @property
    def usable(self) -> bool:
        """Whether there are workers, or can be."""

    def still_writes(self, descriptor: int) -> bool:
        """Tell whether a worker that could not be killed may still complete a write to this file."""

    def run(
        self,
        job: Job,
        sockets: Sequence[tuple[Any, Channel]] = (),
        files: Sequence[int] = (),
        on_progress: Callable[[int], None] | None = None,
    ) -> Awaitable[Result]:
        """Run a job in a worker."""


@dataclass(slots=True)
class Node:
    """The parts of one agent.

    Args:
        name: as pairing records it.
        digest: digests a file in a worker.
        executable: the words that start the installed flare.
        executable_path: what HELLO tells of it; None where there is none to tell.
    """

    identity: Identity
    name: str
    paths: Paths
    settings: Settings
    authority: Authority
    pairing: Pairing
    cache: Cache
    arrivals: Arrivals
    ranks: Ranks
    sampler: Sampler
    pool: Pool
    digest: Digest
    executable: tuple[str, ...]
    executable_path: str | None
    wall_clock: Callable[[], float] = time.time
    transfers: Transfers = field(default_factory=Transfers)
    uploads: Uploads = field(default_factory=Uploads)
    cache_look: CacheLook = field(init=False)
    _engines: dict[str, str] = field(default_factory=dict)
    _engines_at: float = -ENGINES_FRESH
    _engines_stamp: object = None
    _kept: set[asyncio.Task[None]] = field(default_factory=set)
    _granted: dict[str, tuple[frozenset[bytes], bytes, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache_look = CacheLook(self.cache)

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold on to work that goes on without the session that asked for it."""
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def refresh_engines(self) -> dict[str, str]:
        """Look for engines where that may have changed; return name to version."""
        if time.monotonic() - self._engines_at >= ENGINES_FRESH:
            stamp = records_stamp(self.paths)
            self._engines = await asyncio.to_thread(installed_engines, self.settings, self.paths)
            self._engines_at, self._engines_stamp = time.monotonic(), stamp
        return self.engines()

    def engines(self) -> dict[str, str]:
        """Return the engines that are here, name to version; one that was just installed is among them."""
        stamp = records_stamp(self.paths)
        if stamp != self._engines_stamp:
            self._engines = installed_engines(self.settings, self.paths)
            self._engines_stamp = stamp
        return dict(self._engines)

    def check_workers(self) -> None:
        """Refuse what workers do, before anything is promised.

        Raises:
            TransferError: there are no workers any more.
        """
        if not self.pool.usable:
            raise TransferError(
                f"Node {self.name} moves no bytes any more: the process that starts its workers ended. "
                "Restart its agent; the installed one with `systemctl --user restart flare-agent`."
            )

    def facts(self) -> NodeFacts:
        """Return what the node says of itself to those who may know."""
        return NodeFacts(
            name=self.name,
            flare_version=VERSION,
            arch=platform.machine(),
            os=platform.system().lower(),
            engines=self.engines(),
        )

    def remember_grant(self, grant: Grant, signer: bytes) -> None:
        """Know a grant's members, so that their sessions are no strangers' while it lives.

        Args:
            signer: the controller that signed it; when that one is removed, so is what it granted.
        """
        now = self.wall_clock()
        self._granted = {launch: entry for launch, entry in self._granted.items() if entry[2] > now}
        keys = frozenset(member.public_key for member in grant.members)
        self._granted[grant.launch] = (keys, signer, grant.issued + GRANT_LIFE)

    def is_known(self, key: bytes) -> bool:
        """Tell whether a key is a controller's, or a member's of a grant that lives here."""
        if self.authority.is_controller(key):
            return True
        now = self.wall_clock()
        return any(
            key in keys and until > now and self.authority.is_controller(signer)
            for keys, signer, until in self._granted.values()
        )

    def controller_name(self, key: bytes) -> str | None:
        """Return what the controller set calls a key; None where it does not list it."""
        known = self.authority.controllers
        named = known.controllers if known is not None else ()
        return next((each.name for each in named if each.public_key == key), None)

    def hello_for(self, key: bytes) -> Hello:
        """Return the node's HELLO towards a key; a stranger hears the protocol and the node's key alone."""
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            public_key=self.identity.public_key,
            controllers_revision=self.authority.revision,
            node=self.facts(),
            executable=self.executable_path,
            transfer_progress=True,
        )
        return hello if self.is_known(key) else hello.minimal()
