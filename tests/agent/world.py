"""A real agent in a HOME of its own, and controllers and strangers that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flare.identity import Identity
from flare.paths import Paths
from flare.session import Session, connect
from flare.trust.controllers import ControllerSet
from flare.trust.grants import Grant, Member, Package, Source, sign_grant
from flare.trust.join_code import controller_proof, decode, hmac_key
from flare.trust.publishers import PublisherProfile
from flare.trust.signed import KIND_RUN_GRANT, SignedRecord
from flare.wire import messages
from flare.wire.handshake import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_KEY = bytes(range(32))
PUBLISHER = Identity.from_seed(b"p" * 32)
PROFILE = PublisherProfile("tester", PUBLISHER.public_key)
EXPORT = "ab" * 16
INDEX_SHA256 = "cd" * 32
STARTED = re.compile(r"flare agent (\S+) listens on (\S+:\d+)(?: and (\S+:\d+))?, fingerprint ([0-9a-f]{64})")

LAUNCHER = """#!{python}
import sys
sys.path[:0] = [{root!r}, {workers!r}]
if sys.argv[1:2] == ["run"]:
    from tests.agent.fake_flare import main
else:
    from flare.cli.main import main
main()
"""


class Agent:
    """One `flare agent` process with fake ranks, or with `real` set, `python -m flare` with real ones."""

    def __init__(self, home: Path, *, real: bool = False, environment: dict[str, str] | None = None) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("XDG_")},
            "HOME": str(home),
            **(environment or {}),
        }
        self.paths = Paths.from_environment({"HOME": str(home)})
        self.launcher = home / "flare"
        self.words = [str(self.launcher)]
        if real:
            self.words = [sys.executable, "-m", "flare"]
        else:
            text = LAUNCHER.format(python=sys.executable, root=str(ROOT), workers=str(ROOT / "workers"))
            self.launcher.write_text(text)
            self.launcher.chmod(0o755)
        self.process: subprocess.Popen[str] | None = None
        self.host, self.port, self.fingerprint = "", 0, ""

    def command(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a `flare` command in the agent's HOME."""
        return subprocess.run(
            [*self.words, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )

    def start(self, *words: str, listen: str = "127.0.0.1:0") -> Agent:
        """Start the agent and wait until it listens."""
        with (self.home / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.words, "agent", "--listen", listen, *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = STARTED.match(line)
        assert match is not None, f"{line!r}\n{self.log()}"
        host, _, port = match[2].rpartition(":")
        self.host, self.port, self.fingerprint = host, int(port), match[4]
        return self

    def log(self) -> str:
        """Return what it logged so far."""
        return (self.home / "agent.log").read_text()

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Send a signal and wait for the end; return the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.ended(seconds)

    def ended(self, seconds: float = 60) -> int:
        """Wait for the end of an agent that was asked to; return the exit status."""
        assert self.process is not None
        status = self.process.wait(seconds)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return status

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.stop()

    @property
    def identity(self) -> Identity:
        """The node's own identity, for tests that need to know its public key."""
        return Identity.load(self.paths.node_key)

    def join_code(self) -> str:
        """Make a join code as the operator does."""
        import json

        done = self.command("agent", "join-code", "--json")
        assert done.returncode == 0, done.stderr
        code: str = json.loads(done.stdout)["code"]
        return code


class Peer:
    """Somebody with a key: a controller, another node, or a stranger."""

    def __init__(self, seed: int = 1, name: str = "tester") -> None:
        self.identity = Identity.from_seed(bytes([seed]) * 32)
        self.name = name
        self.controllers = ControllerSet.first(self.identity, name)

    @property
    def key(self) -> bytes:
        """The public key."""
        return self.identity.public_key

    @contextlib.asynccontextmanager
    async def session(self, agent: Agent, **changes: Any) -> AsyncIterator[Session]:
        """Open a session and close it after the block."""
        hello = messages.Hello(protocol=PROTOCOL_VERSION, public_key=self.key, controllers_revision=1)
        session = await connect(agent.host, agent.port, self.identity, hello=replace(hello, **changes))
        try:
            yield session
        finally:
            await session.close()

    async def ask(self, agent: Agent, request: messages.Message) -> Any:
        """Send one request on a session of its own and return its reply."""
        async with self.session(agent) as session:
            return await session.request(request)

    async def pair(self, agent: Agent, code: str | None, **changes: Any) -> messages.PairReply:
        """Pair, with a code or without one."""
        async with self.session(agent) as session:
            proof = None if code is None else controller_proof(hmac_key(decode(code)), session.handshake_hash)
            request = messages.Pair(name=self.name, controllers=self.controllers.chain, proof=proof)
            reply: messages.PairReply = await session.request(replace(request, **changes))
            return reply

    def grant(self, agent: Agent, **changes: Any) -> Grant:
        """Return a run grant whose rank 1 is the agent: a peer, which needs no core beforehand."""
        now = int(time.time())
        grant = Grant(
            kind=KIND_RUN_GRANT,
            launch="glm-20261130T120000Z-0001",
            name="glm",
            members=(
                Member(0, "zero", Identity.from_seed(b"z" * 32).public_key, "127.0.0.1:1", ()),
                Member(1, "one", agent.identity.public_key, "127.0.0.1:2", (cpu_of(agent),)),
            ),
            package=Package(EXPORT, 1000, ("core.safetensors",), None, INDEX_SHA256, PUBLISHER.fingerprint),
            rendezvous="127.0.0.1:29800",
            serving=(),
            rank_zero=(),
            roce_ring=False,
            roce_chain=False,
            transfer_fabric=None,
            single_host=False,
            issued=now,
            expires=now + 600,
            launch_key_sha256=hashlib.sha256(LAUNCH_KEY).hexdigest(),
        )
        return replace(grant, **changes)

    def run_request(
        self, agent: Agent, *behaviours: str, rank: int = 1, executable: Any = None, **changes: Any
    ) -> messages.Run:
        """Return a RUN for the agent's rank; `behaviours` tell the fake rank what to do."""
        serving = tuple(f"--engine-arg={behaviour}" for behaviour in behaviours)
        if serving:
            serving += ("--allow-unsafe-engine-args",)
        grant = self.grant(agent, **{"serving": serving, **changes})
        return self.signed_run(sign_grant(self.identity, grant), rank=rank, executable=executable)

    def signed_run(self, record: SignedRecord, *, rank: int = 1, executable: Any = None) -> messages.Run:
        """Return a RUN that carries a signed record."""
        return messages.Run(
            grant=record,
            rank=rank,
            publisher=PROFILE.to_text(),
            launch_key=LAUNCH_KEY,
            executable=executable,
        )


def cpu_of(agent: Agent) -> str:
    """Return the UUID of the agent's one device, on hosts without GPUs."""
    return f"CPU-{agent.identity.fingerprint[:16]}"


def local_source(agent: Agent, path: Path) -> Source:
    """Return a grant's source that the agent itself holds."""
    return Source(agent.identity.public_key, str(path))


async def lines_until(session: Session, text: str) -> list[str]:
    """Read LOG frames until one contains `text`; return their lines."""
    lines = []
    while True:
        log = await session.receive(messages.Log, timeout=60)
        lines.append(log.line)
        if text in log.line:
            return lines


async def lines_to_exit(session: Session) -> tuple[list[str], messages.Exit]:
    """Read LOG frames up to EXIT."""
    lines = []
    while True:
        frame: Any = await session.receive(messages.Log, messages.Exit, timeout=60)
        if isinstance(frame, messages.Exit):
            return lines, frame
        lines.append(frame.line)


def is_alive(process: int) -> bool:
    """Tell whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60, what: str = "it") -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


def drive(work: Any, seconds: float = 180) -> Any:
    """Run a coroutine with a time-out."""
    return asyncio.run(asyncio.wait_for(work, seconds))


def descendants_of(process: int) -> Sequence[int]:
    """Return the living processes below one."""
    from flare.keeper import descendants

    return [found for found in descendants(process) if is_alive(found)]
