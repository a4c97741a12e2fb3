"""Processes that are killed at any moment of a push between hosts of their own.

A core goes down a chain: host0 has it, or gets it from the controller; host1 gets a part of it and passes the
rest on; host2 gets all of it. In each round one process is killed: an agent, a worker, a spawner, or the
controller's command; or a worker is stopped, so that it hangs. There are rounds over a host that holds a part
of the core already and now gets all of it, and rounds of an upload alone. The moments are drawn from a seed,
which is printed:

    FLARE_KILL_ROUNDS=50 FLARE_KILL_SEED=7 python -m pytest -s tests/netlab/test_kills.py
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flare.agent.places import PART_MARKER
from flare.cores.marker import AGENT_MARKER, read_marker
from flare.cores.primary import Primary, load_primary
from flare.cores.verify import verify_core
from netlab import Host, Lab
from tests.cores.making import MIB, write_core
from tests.netlab.agents import STALL_SECONDS, Agents, agents
from tests.netlab.test_transfers import slow_down

pytestmark = pytest.mark.root

ROUNDS = int(os.environ.get("FLARE_KILL_ROUNDS", "5"))
FEW_ROUNDS = int(os.environ.get("FLARE_KILL_ROUNDS", "2"))
SEED = int(os.environ.get("FLARE_KILL_SEED", secrets.randbelow(1_000_000)))
HOSTS = 3
WEIGHTS = "model/weights.safetensors"
SIZES = {WEIGHTS: 24 * MIB + 12345, "model/more.safetensors": 3 * MIB + 1, "model/config.json": 700}
PARTS: list[list[list[int]] | None] = [None, [[0, MIB, MIB], [1, 0, MIB]], None]  # what each rank reads
# The same where the last host reads a part, too: in the opposite order it is the first, and gets everything.
BOTH_PARTS: list[list[list[int]] | None] = [None, [[0, MIB, MIB]], [[0, 4 * MIB, 9 * MIB], [1, MIB, MIB]]]
VICTIMS = (
    *((kind, host) for kind in ("agent", "worker", "spawner") for host in range(HOSTS)),
    ("controller", None),
)
HANGING = tuple(("hanging worker", host) for host in range(HOSTS))
OF_UPLOADS = (
    ("controller", None),
    ("controller's worker", None),
    ("controller's hanging worker", None),
    *((kind, 0) for kind in ("agent", "worker", "hanging worker", "spawner")),
)
END_SECONDS = 5.0  # in which everything that belonged to a killed process is gone
HANG_SECONDS = (
    END_SECONDS + STALL_SECONDS + 5.0
)  # the same for a worker that hangs: first it has to be noticed
CODES = (0, 4, 12)  # how a push ends that was over, cannot reach a node, or lost a transfer


@dataclass(frozen=True, slots=True)
class Published:
    """A core, and how it stands in the hosts' caches."""

    primary: Primary

    def folders(self, host: Host) -> list[Path]:
        entries = host.home / ".cache/flare/cores"
        return sorted(entries.iterdir()) if entries.is_dir() else []

    def check(self, host: Host, *, done: bool = False) -> str:
        """Assert that no byte under a final name is wrong; return how much there is.

        Args:
            done: whether everything must be there, and marked.
        """
        states = [self._check(folder) for folder in self.folders(host)]
        assert not done or set(states) == {"all, marked"}, (host.name, states)
        return f"{host.name} has {' and '.join(states) or 'nothing'}"

    def _check(self, folder: Path) -> str:
        primary, source = self.primary, self.primary.root
        assert primary.path is not None
        name, _, rank = folder.name.partition("-rank")
        assert name == f"{primary.index.export.hex()}-{primary.size}"
        wanted = primary.index.wanted(int(rank)) if rank else primary.index.complete()
        marker, part = read_marker(folder / AGENT_MARKER), read_marker(folder / PART_MARKER)
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        there -= {AGENT_MARKER, PART_MARKER}
        names = {primary.index.files[number].path: ranges.runs for number, ranges in wanted.items()}
        assert there <= {*names, primary.path.name}, there
        assert part is None or part.files.keys() <= there, (there, part)
        if primary.path.name in there:
            assert (folder / primary.path.name).read_bytes() == primary.path.read_bytes()
        for path in there & names.keys():
            here, original = (folder / path).read_bytes(), (source / path).read_bytes()
            assert len(here) == len(original)
            # Marked or not: a file that has its name is whole, and no byte that anybody asked for is wrong.
            for offset, length in names[path]:
                for block in range(offset, offset + length, MIB):
                    end = min(block + MIB, offset + length)
                    assert here[block:end] == original[block:end], (folder, path, block // MIB)
        if marker is None:
            # From a node the primary comes last: who finds it finds the others, too. What a controller sends
            # comes in any order, and whoever uses it looks for each file.
            assert not rank or primary.path.name not in there or there == {*names, primary.path.name}
            return f"{len(there)} of {len(names) + 1} files"
        assert marker.index_sha256 == primary.index_sha256.hex()
        assert marker.files.keys() == there == {*names, primary.path.name}
        assert marker.holds(folder)
        for path, marked in marker.files.items():
            assert marked.ranges is None or marked.ranges == tuple(names[path]), path
        return "all, marked"


class Watched:
    """What must not grow on the hosts: processes, descriptors, shared memory, temporary files.

    Args:
        temporary: every host's TMPDIR.
    """

    def __init__(self, made: Agents, temporary: Path) -> None:
        self.made = made
        self.temporary = temporary
        self._shared = shared_memory()
        self._descriptors: dict[int, int] = {}

    def check(self, *, resuming: bool = False, killed: bool = False, seconds: float = END_SECONDS) -> None:
        """Assert that all of it is as it was, within a few seconds.

        Args:
            resuming: whether a failed transfer may have left what the next one goes on with.
            killed: whether the controller was killed: its next push tidies up after it.
            seconds: how long that may take.
        """
        for index in range(HOSTS):
            soon(lambda index=index: self.strays(index), seconds)  # type: ignore[misc]
            soon(lambda index=index: self.dead(index), seconds)  # type: ignore[misc]
            if index in self.made.processes:
                soon(lambda index=index: self.leaked(index), seconds)  # type: ignore[misc]
                soon(lambda index=index: self.unfinished(index, resuming), seconds)  # type: ignore[misc]
        controller = self.made.lab.controller
        soon(lambda: processes(controller))
        soon(lambda: sorted(shared_memory() - self._shared))
        soon(lambda: [] if killed else list(self.temporary.iterdir()))

    def strays(self, index: int) -> list[str]:
        """Return the processes of a host that are no living agent's."""
        agent = self.made.processes.get(index)
        family = set[int]()
        if agent is not None:
            assert agent.poll() is None, self.made.log(index)
            family = {agent.pid, *(each.pid for each in descendants(agent.pid))}
        return [described(pid) for pid in processes(self.made.lab.hosts[index]) if pid not in family]

    def dead(self, index: int) -> list[str]:
        """Return the ended processes that a living agent has not collected."""
        agent = self.made.processes.get(index)
        if agent is None:
            return []
        return [
            described(each.pid) for each in descendants(agent.pid) if status(each) == psutil.STATUS_ZOMBIE
        ]

    def leaked(self, index: int) -> list[str]:
        """Return the open descriptors of an agent and its spawner when there are more than ever before.

        Each worker that waits for its next job holds one of either.
        """
        agent = self.made.processes[index].pid
        spawner = spawner_of(agent)
        found = []
        for pid in [agent, *([spawner] if spawner else [])]:
            names = descriptors(pid)
            count = len(names) - (len(workers(spawner)) if spawner else 0)
            self._descriptors[pid] = min(count, self._descriptors.get(pid, count))
            if count > self._descriptors[pid]:
                found += [f"{described(pid)}: {count} instead of {self._descriptors[pid]}", *names]
        return found

    def unfinished(self, index: int, resuming: bool) -> list[str]:
        """Return files of a host that no transfer needs any more."""
        home = self.made.lab.hosts[index].home
        cache = home / ".cache/flare"
        folders = [cache / "arriving", *([] if resuming else [cache / "resuming"])]
        return [str(path) for folder in folders for path in (*folder.iterdir(), *home.rglob("*.new"))]


def soon(wrong: Callable[[], Sequence[object]], seconds: float = END_SECONDS) -> None:
    """Wait until nothing is wrong any more."""
    deadline = time.monotonic() + seconds
    while found := wrong():
        assert time.monotonic() < deadline, "\n".join(map(str, found))
        time.sleep(0.02)


def shared_memory() -> set[str]:
    """Return what Python's libraries have in /dev/shm; other tests' files there are none of ours."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if name.startswith(("sem.", "psm_"))}


def processes(host: Host) -> list[int]:
    """Return every process in a host's network; one that ended is in none."""
    network = Path("/run/netns", host.namespace).stat().st_ino
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and (process / "ns/net").stat().st_ino == network:
                found.append(int(process.name))
    return found


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def status(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.status())
    return "gone"


def described(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"{pid} of {process.ppid()}: ended, not collected"
        return f"{pid} of {process.ppid()}: {' '.join(process.cmdline())}"
    return f"{pid}: gone"


def descriptors(pid: int) -> list[str]:
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(entry.readlink()))
    return sorted(names)


def spawner_of(agent: int) -> int | None:
    for each in psutil.Process(agent).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if each.status() != psutil.STATUS_ZOMBIE and each.cmdline()[:1] == ["flare: spawner"]:
                return each.pid
    return None


def workers(spawner: int) -> list[int]:
    return [each.pid for each in descendants(spawner) if status(each) != psutil.STATUS_ZOMBIE]


def busy_workers(spawner: int) -> list[int]:
    found = []
    for pid in workers(spawner):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).cmdline()[:1] not in ([], ["flare: worker idle"], ["flare: spawner"]):
                found.append(pid)
    return found


def kill(
    made: Agents, kind: str, host: int | None, push: subprocess.Popen[str], chance: random.Random
) -> bool:
    """Kill or stop a process; return whether there was one: workers are there while something moves."""
    if kind == "controller":
        push.kill()
        return True
    if kind == "agent":
        assert host is not None
        made.kill(host)
        return True
    number = signal.SIGSTOP if "hanging" in kind else signal.SIGKILL
    while push.poll() is None:
        spawner = spawner_of(push.pid if host is None else made.processes[host].pid)
        victims = [] if spawner is None else [spawner] if kind == "spawner" else busy_workers(spawner)
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(victims), number)
            return True
        time.sleep(0.005)
    return False


def revive(made: Agents, kind: str, host: int | None) -> None:
    """Start again what was killed; an agent without a spawner ends when it is asked to."""
    if host is None or "worker" in kind:
        return
    if kind == "spawner":
        agent = made.processes.pop(host)
        agent.terminate()
        assert agent.wait(timeout=60) == 0, (described(agent.pid), made.log(host))
        assert agent.stdout is not None
        agent.stdout.close()
    made.start(host)


@dataclass(frozen=True, slots=True)
class Scene:
    """A chain of agents, and a new core for every round."""

    made: Agents
    watched: Watched
    chance: random.Random

    @contextlib.contextmanager
    def push(self) -> Iterator[Push]:
        """Write a core on host0 or the controller; it goes, wherever it went, after the block."""
        with self._core(PARTS, local=self.chance.random() < 0.3) as (core, name):
            resume = ["--resume"] if self.chance.random() < 0.3 else []
            words = (name, "--to", "host0,host1,host2", "--roce-chain", *resume)
            yield Push(self.made, self.watched, core, words)

    @contextlib.contextmanager
    def push_to_who_has_a_part(self) -> Iterator[Push]:
        """The same in the opposite order, after host2 got a part, and with it less than it gets now."""
        with self._core(BOTH_PARTS, local=False) as (core, name):
            words = (name, "--to", "host0,host1,host2", "--roce-chain")
            parts = Push(self.made, self.watched, core, words)
            self.made.push(*words)
            parts.states(done=True)
            resume = ["--resume"] if self.chance.random() < 0.3 else []
            words = (name, "--to", "host2,host1,host0", "--roce-chain", *resume)
            yield Push(self.made, self.watched, core, words)

    @contextlib.contextmanager
    def upload(self) -> Iterator[Push]:
        """An upload of the controller's core to host0 alone."""
        with self._core([None], local=True) as (core, name):
            yield Push(self.made, self.watched, core, (name, "--to", "host0"), taker=0)

    @contextlib.contextmanager
    def _core(self, parts: list[list[list[int]] | None], *, local: bool) -> Iterator[tuple[Path, str]]:
        lab = self.made.lab
        folder = (lab.controller if local else lab.hosts[0]).home / "core"
        files = {path: self.chance.randbytes(size) for path, size in SIZES.items()}
        core = write_core(folder, files, ranks=len(parts), rank_ranges=parts)
        yield core, str(core) if local else f"host0:{core}"
        for host in lab.hosts:
            for entry in (host.home / ".cache/flare/cores").iterdir():
                shutil.rmtree(entry)
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Push:
    """One core on its way.

    Args:
        taker: the host that gets all of it.
    """

    made: Agents
    watched: Watched
    core: Path
    words: tuple[str, ...]
    taker: int = 2

    @property
    def resume(self) -> bool:
        return "--resume" in self.words

    def __str__(self) -> str:
        source = "host0" if self.words[0].startswith("host0:") else "the controller"
        return f"a push from {source} {' '.join(self.words[1:])}"

    def states(self, *, done: bool = False) -> list[str]:
        """Check what the hosts have published; return how much it is."""
        published = Published(load_primary(self.core))
        # What a controller sent, to host0, is verified by whoever loads it.
        return [published.check(host, done=done and host.name != "host0") for host in self.made.lab.hosts]

    def complete(self) -> float:
        """Push until everything is there, and look at it; return the seconds that the push took."""
        began = time.monotonic()
        document = self.made.push(*self.words)
        seconds = time.monotonic() - began
        assert all(node["skipped"] or node["verified"] for node in document["nodes"][1:])
        self.states(done=bool(self.taker))
        folders = Published(load_primary(self.core)).folders(self.made.lab.hosts[self.taker])
        complete = [folder for folder in folders if "-rank" not in folder.name]
        (folder,) = complete or folders
        verify_core(folder / self.core.name)
        self.watched.check()
        return seconds


@contextlib.contextmanager
def scene(folder: Path, monkeypatch: pytest.MonkeyPatch, *, uploads: bool = False) -> Iterator[Scene]:
    temporary = folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Lab(HOSTS, topology="chain", folder=folder) as lab, agents(lab, folder) as made:
        slow_down(lab.controller if uploads else lab.hosts[0])
        settings = lab.controller.home / ".config/flare/config.toml"
        settings.write_text(f"[agent]\nstall_timeout = {STALL_SECONDS}\n")
        now = Scene(made, Watched(made, temporary), random.Random(SEED))
        print(f"\nFLARE_KILL_SEED={SEED}")
        yield now
        for index in range(HOSTS):
            assert "Traceback" not in made.log(index)
            assert "never retrieved" not in made.log(index)


def go_through(
    now: Scene,
    rounds: int,
    victims: Sequence[tuple[str, int | None]],
    begin: Callable[[], contextlib.AbstractContextManager[Push]],
) -> None:
    """Kill one victim a round, and see that nothing wrong is published and nothing is left."""
    made, chance = now.made, now.chance
    with begin() as push:
        usual = push.complete()
    order = itertools.cycle(chance.sample(victims, len(victims)))
    for number, (kind, host) in zip(range(1, rounds + 1), order, strict=False):
        seconds = HANG_SECONDS if "hanging" in kind else END_SECONDS
        with begin() as push:
            moment = chance.uniform(0, usual)
            victim = kind if host is None else f"{kind} of host{host}"
            print(f"round {number}: {victim} {moment:.2f} s after {push};", end=" ", flush=True)
            with made.pushing(*push.words) as command:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    command.wait(moment)
                there = kill(made, kind, host, command, chance)
                out, err = command.communicate(timeout=60)
            if there and kind == "controller":
                assert command.returncode in (*CODES, -signal.SIGKILL), err
            else:
                assert command.returncode in CODES, (command.returncode, out, err)
            killed = kind == "controller"
            now.watched.check(resuming=push.resume, killed=killed, seconds=seconds)
            states = push.states()
            print("killed" if there else "over", command.returncode, *states, sep="; ")
            revive(made, kind, host)
            now.watched.check(resuming=push.resume, killed=killed)
            took = push.complete()
            if all(state.endswith("nothing") for state in states):
                usual = took


def test_whatever_is_killed_nothing_wrong_is_published_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(tmp_path, monkeypatch) as now:
        go_through(now, ROUNDS, VICTIMS, now.push)


def test_nor_when_a_worker_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene(tmp_path, monkeypatch) as now:
        go_through(now, FEW_ROUNDS, HANGING, now.push)


def test_nor_when_a_host_has_a_part_of_what_it_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene(tmp_path, monkeypatch) as now:
        go_through(now, FEW_ROUNDS, VICTIMS, now.push_to_who_has_a_part)


def test_nor_when_it_is_an_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene(tmp_path, monkeypatch, uploads=True) as now:
        go_through(now, FEW_ROUNDS, OF_UPLOADS, now.upload)
