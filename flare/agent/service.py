"""The agent's composition root: builds every part, runs them, and leaves nothing behind.

Order matters at the start: the spawner is forked before the event loop, any thread, or NVML exists, so that
workers are forked from a clean process that holds no keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

from flare.agent.arriving import Arrivals, Digest
from flare.agent.authority import Authority
from flare.agent.cache import Cache
from flare.agent.driver import ask_driver
from flare.agent.file_requests import worker_failure
from flare.agent.gpus import Devices
from flare.agent.handlers import Conversations
from flare.agent.lock import AgentLock
from flare.agent.node import Node, Pool
from flare.agent.pairing import Pairing, accepts_first, allow_first, end_run_permission
from flare.agent.ranks import Ranks
from flare.agent.sampler import Sampler
from flare.agent.uploads import Uploads
from flare.agent.waiting import give_up_after
from flare.errors import ConfigError, UnreachableError, UsageError
from flare.identity import Identity
from flare.paths import Paths, check_name, safe_component
from flare.printable import printable
from flare.session import Listener, SocketAddress, format_address, parse_address
from flare.settings import DEFAULT_PORT, Settings
from flare.system import become_subreaper, take_signals
from flare.values import dataclass
from flare_workers.jobs import Hash, WorkerError
from flare_workers.pool import WorkerPool
from flare_workers.ranges import Ranges
from flare_workers.spawner import SpawnerHandle, start

CLOSE_WITHIN = 2.0  # seconds for NVML to shut down, which takes milliseconds; the process ends anyway
DISK_WITHIN = 5.0  # seconds that calls to the cache's disk have to end, too; a disk that hangs takes for ever
WILDCARDS = ("", "::", "0.0.0.0", "*")  # noqa: S104 - recognised here, not bound

logger = logging.getLogger("flare.agent")


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What the command line says.

    Args:
        listen: "HOST:PORT"; None for the settings' address. Port 0 lets the system choose.
        name: the node's name; None for the host name.
        accept_first: accept the first controller that connects to this run, for 24 hours.
    """

    listen: str | None = None
    name: str | None = None
    accept_first: bool = False


def run_agent(paths: Paths, options: AgentOptions) -> None:
    """Run the agent until a signal ends it.

    Raises:
        BusyError: another agent runs for this account, or the port is in use.
        FlareError: what is wrong with the settings, the key, or the cache.
    """
    settings = Settings.load(paths)
    host, port = listen_address(paths, settings, options.listen)
    name = check_name(options.name, "node name") if options.name is not None else default_name()
    become_subreaper()
    with contextlib.closing(start()) as spawner, AgentLock(paths.agent_folder / "lock") as lock:
        log_to_stderr()
        asyncio.run(_serve(paths, settings, options, name, (host, port), spawner, lock))


def listen_address(paths: Paths, settings: Settings, given: str | None) -> SocketAddress:
    """Return where to listen: as the command line says, else as config.toml does.

    Raises:
        UsageError: the command line's is no address.
        ConfigError: that of config.toml is none.
    """
    if given is not None:
        return parse_listen(given)
    try:
        return parse_listen(settings.agent.listen)
    except UsageError as problem:
        raise ConfigError(f'{paths.settings_file}: "agent.listen": {problem.message}') from None


def parse_listen(text: str) -> SocketAddress:
    """Return host and port of a listening address; with the port 0 the system chooses one.

    A number alone is a port, on every address.

    Raises:
        UsageError: it is no address.
    """
    if text.isascii() and text.isdigit():
        text = f":{text}"
    if text.startswith(":") and text.count(":") == 1:
        text = f"[::]{text}"
    return parse_address(text, DEFAULT_PORT, bound=True)


def default_name() -> str:
    """Return the host's name as a node name."""
    name = safe_component(socket.gethostname().split(".")[0])[:63].strip("._-")
    return name if name and name[0].isalnum() else f"node-{name or 'unnamed'}"


def installed_executable(argv0: str = sys.argv[0]) -> tuple[tuple[str, ...], str | None]:
    """Return the words that start the flare that runs now, and the path that HELLO tells.

    Args:
        argv0: how this process was started: the `flare` script, or `python -m flare`.
    """
    found = shutil.which(argv0) if "/" not in argv0 else argv0
    path = Path(found).resolve() if found else None
    if path is not None and path.name != "__main__.py" and os.access(path, os.X_OK) and path.is_file():
        return (str(path),), str(path)
    module = Path(__file__).resolve().parent.parent / "__main__.py"
    return (sys.executable, "-m", "flare"), str(module)


def log_to_stderr() -> None:
    """Log to standard error, one escaped line an event; the journal adds the time itself."""

    class Escaped(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(super().format(record), keep_newlines=True)

    handler = logging.StreamHandler()
    moment = "" if os.environ.get("JOURNAL_STREAM") else "%(asctime)s "
    handler.setFormatter(Escaped(f"{moment}%(levelname)s %(message)s"))
    root = logging.getLogger("flare")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


async def _serve(
    paths: Paths,
    settings: Settings,
    options: AgentOptions,
    name: str,
    address: SocketAddress,
    spawner: SpawnerHandle,
    lock: AgentLock,
) -> None:
    stopping = Stopping()
    async with _node(paths, settings, name, spawner) as (node, conversations, sampler):
        end_run_permission(paths)  # of a run that was killed
        listener = Listener(node.identity, node.hello_for, node.is_known, conversations.converse)
        sampling = asyncio.create_task(sampler.run())
        try:
            addresses = await listen(listener, *address)
            lock.tell(name, addresses)
            if options.accept_first:
                _accept_first(node)
            await node.refresh_engines()
            _announce(node, addresses)
            notify("READY=1")
            await stopping.wait(node.ranks)
            notify("STOPPING=1")
            # Ranks first: whoever is attached hears how each of them ended.
            await node.ranks.close()
        finally:
            give_up_after(DISK_WITHIN)
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            await listener.close()
            end_run_permission(paths)


@contextlib.asynccontextmanager
async def _node(
    paths: Paths, settings: Settings, name: str, spawner: SpawnerHandle
) -> AsyncIterator[tuple[Node, Conversations, Sampler]]:
    identity = Identity.load_or_create(paths.node_key, "The node key")
    authority = Authority(paths.controllers_file)
    pairing = Pairing(paths, authority)
    cache = Cache(paths, settings.agent.cache_limit)
    cache.prepare()
    pool = WorkerPool(spawner)
    devices = Devices(identity.fingerprint)
    ranks = Ranks()

    def each_second() -> None:
        authority.refresh()
        pairing.forget_used_code()
        arrivals.forget_quiet()
        uploads.tell_quiet()

    digest = digest_in(pool, settings.agent.stall_timeout)
    arrivals = Arrivals(cache, digest)
    uploads = Uploads()
    sampler = Sampler(devices, ranks, each_second=each_second)
    await sampler.answered_readings()  # an agent whose driver hangs starts all the same
    if devices.problem is not None:
        logger.warning("%s", devices.problem)
    executable, executable_path = installed_executable()
    node = Node(
        identity=identity,
        name=name,
        paths=paths,
        settings=settings,
        authority=authority,
        pairing=pairing,
        cache=cache,
        arrivals=arrivals,
        ranks=ranks,
        sampler=sampler,
        pool=pool,
        digest=digest,
        executable=executable,
        executable_path=executable_path,
        uploads=uploads,
    )
    arrivals.is_fetched = lambda entry: node.transfers.runs(str(entry))
    conversations = Conversations(node)
    authority.on_change = conversations.revise
    try:
        yield node, conversations, sampler
    finally:
        await ranks.close()
        await pool.close()
        # In a thread of its own: no call that hangs is before it, and `give_up_after` leaves it its time.
        with contextlib.suppress(TimeoutError):  # the next start removes what stays
            await asyncio.wait_for(ask_driver(arrivals.close), DISK_WITHIN)
        if not sampler.asking:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ask_driver(devices.close), CLOSE_WITHIN)


def digest_in(pool: Pool, stall_timeout: float) -> Digest:
    """Return what digests a file in a worker, and says what a worker's failure means to whoever waits.

    Args:
        stall_timeout: seconds without a byte read that are a failure.
    """

    async def digest(descriptor: int, file: str, size: int) -> bytes:
        job = Hash(
            title=f"digest {file}",
            name=file,
            ranges=Ranges.whole(size).runs,
            size=size,
            whole=True,
            sync=True,
            stall_timeout=stall_timeout,
            drop_cache=True,
        )
        try:
            result = await pool.run(job, files=[descriptor])
        except WorkerError as problem:
            raise worker_failure(problem) from None
        assert result.sha256 is not None
        return result.sha256

    return digest


async def listen(listener: Listener, host: str, port: int) -> tuple[SocketAddress, ...]:
    """Listen on an address; a wildcard means IPv4 and, where the host has it, IPv6 on the same port.

    Raises:
        BusyError: the port is in use.
        UnreachableError: this host has no such address.
    """
    if host not in WILDCARDS:
        return await listener.listen(host, port)
    addresses = await listener.listen("0.0.0.0", port)  # noqa: S104 - every session proves its key
    with contextlib.suppress(UnreachableError):  # a host without IPv6
        addresses += await listener.listen("::", addresses[0][1])
    return addresses


class Stopping:
    """SIGTERM, SIGINT and SIGHUP end the agent; the second one ends its ranks without draining.

    Those that come later change nothing, nor do they change the exit status.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._ranks: Ranks | None = None
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        take_signals(asyncio.get_running_loop(), numbers, self._take)

    def _take(self, _number: int) -> None:
        if self._asked.is_set() and self._ranks is not None:
            for run in self._ranks.running():
                run.kill()
        self._asked.set()

    async def wait(self, ranks: Ranks) -> None:
        """Wait for the first signal."""
        self._ranks = ranks
        await self._asked.wait()
        logger.info("stopping")


def _accept_first(node: Node) -> None:
    if node.authority.controllers is not None:
        logger.info("--accept-first changes nothing: this node is paired already")
        return
    allow_first(node.paths, node.wall_clock(), this_run=True)


def _announce(node: Node, addresses: tuple[SocketAddress, ...]) -> None:
    where = " and ".join(format_address(*address) for address in addresses)
    sys.stdout.write(f"flare agent {node.name} listens on {where}, fingerprint {node.identity.fingerprint}\n")
    sys.stdout.flush()
    if node.authority.controllers is not None:
        return
    until = accepts_first(node.paths.accept_first_file, node.wall_clock())
    if until is None:
        logger.info("this node is unpaired; `flare agent join-code` prints a code for pairing it")
        return
    logger.warning(
        "the first controller that connects until %s will be obeyed (--accept-first); "
        "`flare agent reset` ends that",
        f"{datetime.fromtimestamp(until).astimezone():%Y-%m-%d %H:%M %Z}",
    )


def notify(state: str) -> None:
    """Tell systemd, where it started us with Type=notify."""
    if not os.environ.get("NOTIFY_SOCKET"):
        return
    import sdnotify

    sdnotify.SystemdNotifier().notify(state)
