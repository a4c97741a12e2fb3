"""What an encrypted and verified transfer costs, beside its floors, scp and rsync, all in one run.

    python tools/bench/transfer.py [--folder FOLDER]... [--size MIB] [--streams 1,2,4,8] [--rounds N] [--json]

A core of two files of random data goes from one real agent to another over loopback (`flare orbit push`); the
same files go through an sshd that the benchmark starts itself, with one cipher, chacha20-poly1305. Every way
is measured once a round and in turn, so that a busy minute does not hit one of them alone; what is printed is
the median over the rounds, of ratios too. CPU-seconds are those of both ends, with all their processes.

Seconds of a flare transfer are from the controller's request to the answer, which comes when all is verified
and on the disk; those of scp and rsync are their own less what an empty connection takes. Those of the floor
are what this machine's CPUs need for it if none of them ever waits: no way can be faster, and its row says
how much the bars leave. The bars are goals and no test: the figures depend on the machine and on its other
work.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ssh
from cryptography.hazmat.backends.openssl import backend
from floors import BAR, GIGABYTE, arithmetic_floors, kernel_floor
from processes import MemoryWatch, own_seconds, tree_seconds

from flare.cli.orbit_common import TerminalReporter
from flare.orbit.client import Client
from flare.orbit.controller import Controller
from flare.orbit.distribution import Delivered, distribute, raise_failures
from flare.orbit.push import plan_push, plan_request
from flare.paths import Paths

FLARE = Path(sys.executable).parent / "flare"
FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
SHARDS = 2
MEBIBYTE = 1 << 20
EMPTY = "empty ssh"  # a connection that carries nothing; what it takes is taken off scp and rsync
SCP_BAR = 2.5  # at two streams or more: times as fast as scp with the same cipher
RSYNC_BAR = 3.5  # times as fast as rsync -W and sha256sum after it
MEMORY_BAR = 8 * MEBIBYTE  # a worker's own, above what it shares
MAIN_BAR = 0.02  # of the transfer's CPU-seconds: a main process's, the busier one of the two


class SilentReporter(TerminalReporter):
    """The benchmark's own output is the table."""

    def note(self, text: str, /) -> None:
        """Say nothing."""


@dataclass
class Agent:
    """One agent in a HOME of its own; its cache lies in the measured folder."""

    name: str
    home: Path
    cache: Path
    process: subprocess.Popen[str] | None = None
    address: str = ""

    @property
    def pid(self) -> int:
        """Of its main process."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it and read where it listens."""
        for folder in (self.home, self.cache):
            folder.mkdir(mode=0o700)
        self.process = subprocess.Popen(
            [str(FLARE), "agent", "--listen", "127.0.0.1:0", "--name", self.name],
            env=environment(self.home, self.cache),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.home / "agent.log").open("w"),
            text=True,
        )
        assert self.process.stdout is not None
        started = re.search(r"listens on (\S+:\d+)", self.process.stdout.readline())
        if started is None:
            raise SystemExit(f"transfer.py: the agent {self.name} did not start")
        self.address = started.group(1)

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()

    def forget_cores(self) -> None:
        """Remove what its cache holds."""
        for kind in ("cores", "blobs"):
            for entry in (self.cache / "flare" / kind).glob("*"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def environment(home: Path, cache: Path | None = None) -> dict[str, str]:
    """The environment of one host."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    return kept | {"HOME": str(home)} | ({"XDG_CACHE_HOME": str(cache)} if cache is not None else {})


@dataclass
class Lab:
    """Two paired agents, a controller, and a core that the first agent holds in place."""

    controller: Path
    source: Agent
    target: Agent
    model: Path
    core: Path
    publisher: str
    digests: dict[str, str] = field(default_factory=dict)

    def flare(self, *words: str, text: str | None = None, home: Path | None = None) -> str:
        """Run one command and return what it printed."""
        result = subprocess.run(
            [str(FLARE), *words],
            env=environment(home or self.controller),
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise SystemExit(f"transfer.py: flare {' '.join(words)} failed: {result.stderr}")
        return result.stdout

    def pair(self) -> None:
        """Give both agents to the controller."""
        for agent in (self.source, self.target):
            code = json.loads(self.flare("agent", "join-code", "--json", home=agent.home))["code"]
            self.flare("orbit", "pair", agent.address, "--code", "-", text=code + "\n")

    def export(self) -> None:
        """Make the core."""
        self.flare("publisher", "create", "bench")
        words = ("-o", str(self.core.parent), "--revision", "cpu", "--engine", "vllm", "--name", "bench")
        made = json.loads(self.flare("ignition", "export", str(self.model), *words, "--json"))
        self.core, self.publisher = Path(made["primary"]), made["publisher"]["fingerprint"]

    def push(self, streams: int) -> dict[str, float]:
        """Move the core to the other agent's empty cache, as `flare orbit push` does.

        What is measured begins when the push is planned: with the controller's TRANSFER.
        """
        self.target.forget_cores()
        mains = (self.source.pid, self.target.pid)
        controller = Controller.open(
            Paths.from_environment(environment(self.controller)), SilentReporter(quiet=True)
        )
        request = plan_request(
            controller.orbit,
            f"{self.source.name}:{self.core}",
            (self.source.name, self.target.name),
            streams=streams,
            accept_publisher=self.publisher,
        )

        async def move() -> tuple[Delivered, float, list[float]]:
            client = Client(controller)
            plan = await plan_push(client, request)
            os.sync()  # what came before is not written out while this one runs
            before, mains_before = tree_seconds(mains), [*map(own_seconds, mains)]
            outcomes = await distribute(client, plan, None)
            cpu = tree_seconds(mains) - before
            spent = [own_seconds(pid) - start for pid, start in zip(mains, mains_before, strict=True)]
            raise_failures(outcomes)
            return outcomes[-1], cpu, spent

        outcome, cpu, spent = asyncio.run(move())
        if not outcome.verified or outcome.moved < sum(map(size_of, self.model.iterdir())):
            raise SystemExit(f"transfer.py: the push did not move and verify the core: {outcome}")
        return {"cpu": cpu, "seconds": outcome.seconds, "main": max(spent), "mains": sum(spent)}

    def check_arrived(self) -> None:
        """Compare what the other agent holds with the source, byte by byte."""
        (entry,) = (self.target.cache / "flare" / "cores").iterdir()
        for name, digest in self.digests.items():
            (path,) = (path for path in entry.rglob(name))
            if file_digest(path) != digest:
                raise SystemExit(f"transfer.py: {path} is not what was sent")


def size_of(path: Path) -> int:
    """In bytes."""
    return path.stat().st_size


def file_digest(path: Path) -> str:
    """SHA-256, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_model(folder: Path, size: int) -> None:
    """Make a folder like a Hugging Face model: shards of random data, with a list of them and a config."""
    folder.mkdir()
    weight_map = {}
    for shard in range(1, SHARDS + 1):
        name = f"model-{shard:05d}-of-{SHARDS:05d}.safetensors"
        count = size // SHARDS
        header = {f"layers.{shard}.weight": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            while count:
                count -= file.write(os.urandom(min(count, 8 * MEBIBYTE)))
        weight_map[f"layers.{shard}.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
              "max_position_embeddings": 1024}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")


@contextmanager
def laboratory(folder: Path, homes: Path, size: int) -> Iterator[Lab]:
    """Everything that moves is in `folder`; settings and keys are in `homes`."""
    agents = [Agent(name, homes / name, folder / name) for name in ("source", "target")]
    controller = homes / "controller"
    controller.mkdir(mode=0o700)
    lab = Lab(controller, agents[0], agents[1], folder / "model", folder / "core" / "none", "")
    write_model(lab.model, size)
    lab.digests = {path.name: file_digest(path) for path in sorted(lab.model.iterdir())}
    lab.export()
    try:
        for agent in agents:
            agent.start()
        lab.pair()
        yield lab
    finally:
        for agent in agents:
            agent.stop()


class Rounds:
    """One folder's measurements."""

    def __init__(self, folder: Path, size: int, streams: list[int], rounds: int) -> None:
        self._folder = folder
        self._size = size
        self._streams = streams
        self._rounds = rounds
        self.found: list[dict[str, dict[str, float]]] = []
        self.memory: dict[str, int] = {}

    def run(self) -> None:
        """Measure everything."""
        with (
            tempfile.TemporaryDirectory(dir=self._folder, prefix="flare-transfer-") as folder,
            tempfile.TemporaryDirectory(prefix="flare-transfer-home-") as homes,
            ssh.Server(Path(homes)) as server,
            laboratory(Path(folder), Path(homes), self._size) as lab,
        ):
            agents = (lab.source.pid, lab.target.pid)
            with MemoryWatch(agents, lambda pid, title: kind_of(title, pid in agents)) as watch:
                for streams in self._streams:
                    lab.push(streams)
            lab.check_arrived()
            self.memory = watch.peaks
            for _ in range(self._rounds):
                self.found.append(self._round(Path(folder), lab, server))

    def _round(self, folder: Path, lab: Lab, server: ssh.Server) -> dict[str, dict[str, float]]:
        target = folder / "copy"
        shard = max(lab.model.iterdir(), key=size_of)
        found: dict[str, dict[str, float]] = {}

        def measure(name: str, way: Callable[[], tuple[float, float]], part: int = 1) -> None:
            os.sync()  # what came before is not written out while this one runs
            cpu, seconds = way()
            found[name] = {"cpu": cpu * part, "seconds": seconds * part}

        measure("sendfile -> pwrite", lambda: kernel_floor(shard, target, size_of(shard)), SHARDS)
        target.unlink()
        for name, cpu in arithmetic_floors(self._size).items():
            found[name] = {"cpu": cpu, "seconds": cpu}
        for streams in self._streams:
            found[flare_row(streams)] = lab.push(streams)
        lab.target.forget_cores()
        measure(EMPTY, server.connect)
        measure("scp", lambda: server.scp(lab.model, target))
        shutil.rmtree(target)
        target.mkdir()
        measure("rsync", lambda: server.rsync(lab.model, target))
        measure("sha256sum", lambda: ssh.sha256sum(target, lab.digests))
        shutil.rmtree(target)
        for name in ("scp", "rsync"):
            found[name]["seconds"] -= found[EMPTY]["seconds"]
        found["rsync + sha256sum"] = {
            key: found["rsync"][key] + found["sha256sum"][key] for key in ("cpu", "seconds")
        }
        parts = ("sendfile -> pwrite", "seal", "open", "sha256")
        floor = sum(found[name]["cpu"] for name in parts)
        found["floor"] = {"cpu": floor, "seconds": floor / len(os.sched_getaffinity(0))}
        return found

    def _median(self, name: str, key: str) -> float:
        return statistics.median(one[name][key] for one in self.found)

    def _ratio(self, name: str, key: str, other: str, other_key: str) -> float:
        """The median of the rounds' ratios: what slows a whole round down cancels out."""
        return statistics.median(one[name][key] / one[other][other_key] for one in self.found)

    def report(self) -> dict[str, Any]:
        """Everything for scripts; the table is made of it."""
        gigabytes = self._size / GIGABYTE
        rows = []
        for name, first in self.found[0].items():
            row: dict[str, Any] = {
                "way": name,
                "cpu_s_per_gb": round(self._median(name, "cpu") / gigabytes, 3),
                "of_floor": round(self._ratio(name, "cpu", "floor", "cpu"), 2),
            }
            if seconds := self._median(name, "seconds"):
                row["gb_per_s"] = round(gigabytes / seconds, 2)
            if "main" in first:
                row["main_share"] = round(self._ratio(name, "main", name, "cpu"), 4)
                row["both_mains_share"] = round(self._ratio(name, "mains", name, "cpu"), 4)
            if "main" in first or name == "floor":
                row |= {
                    "times_scp": round(self._ratio("scp", "seconds", name, "seconds"), 2),
                    "times_rsync_sha256sum": round(
                        self._ratio("rsync + sha256sum", "seconds", name, "seconds"), 2
                    ),
                }
            rows.append(row)
        return {
            "folder": str(self._folder),
            "rows": rows,
            "peak_private_bytes": self.memory,
            "bars": {
                "of_floor": BAR,
                "times_scp": SCP_BAR,
                "times_rsync_sha256sum": RSYNC_BAR,
                "worker_private_bytes": MEMORY_BAR,
                "main_share": MAIN_BAR,
            },
        }


def flare_row(streams: int) -> str:
    """A row's name."""
    return f"flare, {streams} stream{'s' if streams > 1 else ''}"


def kind_of(title: str, is_main: bool) -> str | None:
    """What a process of an agent is."""
    if is_main:
        return "agent"
    kinds = ("send", "receive", "verify", "sync", "spawner")
    return next((kind for kind in kinds if title.startswith(f"flare: {kind}")), None)


def print_table(report: dict[str, Any]) -> None:
    """For a person."""
    print(f"\n{report['folder']}")
    print(
        f"  {'':20} {'GB/s':>6} {'CPU-s/GB':>9} {'x floor':>8} {'main':>6} {'x scp':>6} {'x rsync+sum':>11}"
    )
    for row in report["rows"]:
        if row["way"] == EMPTY:  # not by the gigabyte
            continue
        rate = f"{row['gb_per_s']:.2f}" if "gb_per_s" in row else ""
        line = f"  {row['way']:20} {rate:>6} {row['cpu_s_per_gb']:>9.3f}"
        if "times_scp" in row:
            main = f"{row['main_share']:.1%}" if "main_share" in row else ""
            line += f" {row['of_floor']:>8.2f} {main:>6} {row['times_scp']:>6.2f}"
            line += f" {row['times_rsync_sha256sum']:>11.2f}"
        elif row["way"] in ("scp", "rsync", "rsync + sha256sum"):
            line += f" {row['of_floor']:>8.2f}"
        print(line)
    print(f"  {'bars':20} {'':6} {'':9} {BAR:>8.2f} {MAIN_BAR:>6.1%} {SCP_BAR:>6.2f} {RSYNC_BAR:>11.2f}")
    peaks = ", ".join(
        f"{kind} {size / MEBIBYTE:.1f}" for kind, size in sorted(report["peak_private_bytes"].items())
    )
    print(f"  peak private MiB a process: {peaks}   (bar for a worker: {MEMORY_BAR // MEBIBYTE})")


def main() -> None:
    """Measure, print tables or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", action="append", type=Path, help="default: /dev/shm and the disk of /tmp")
    parser.add_argument("--size", type=int, default=1024, help="MiB to move (default 1024)")
    parser.add_argument("--streams", default="1,2,4,8", help="default 1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if missing := ssh.missing_packages():
        raise SystemExit(f"transfer.py needs more packages: apt-get install -y {' '.join(missing)}")
    versions = {
        "python": sys.version.split()[0],
        "openssl_of_flare": backend.openssl_version_text(),
        "openssl_of_sha256": ssl.OPENSSL_VERSION,
        "ssh": ssh.version(),
    }
    size = arguments.size * MEBIBYTE // SHARDS * SHARDS
    streams = [int(word) for word in arguments.streams.split(",")]
    reports = []
    if not arguments.json:
        print(f"{arguments.size} MiB, median of {arguments.rounds} rounds, {os.cpu_count()} CPUs")
        print(f"seal, open: {versions['openssl_of_flare']}; SHA-256: {versions['openssl_of_sha256']}")
        print(f"ssh: {versions['ssh']}, {ssh.CIPHER}")
    for folder in arguments.folder or FOLDERS:
        rounds = Rounds(folder, size, streams, arguments.rounds)
        load = os.getloadavg()[0]
        rounds.run()
        reports.append(rounds.report() | {"load_before": round(load, 2)})
        if not arguments.json:
            print_table(reports[-1])
    if arguments.json:
        print(
            json.dumps({"size": size, "rounds": arguments.rounds, **versions, "reports": reports}, indent=2)
        )


if __name__ == "__main__":
    main()
