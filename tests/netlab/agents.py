"""Real agents on the lab's hosts, paired with a controller on a host of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from netlab import Counters, Host, Lab
from tests.cores.making import PUBLISHER

ROOT = Path(__file__).resolve().parents[2]
FLARE = [sys.executable, "-m", "flare"]
TRUST = ("--accept-publisher", PUBLISHER.fingerprint)
STALL_SECONDS = 4  # instead of two minutes, so that a cable that is cut is noticed while a test waits


class Agents:
    """An agent on every host of a lab.

    Attributes:
        lab: the hosts.
        processes: the agents' processes by host index.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{ROOT}:{ROOT / 'workers'}", "NO_COLOR": "1"}

    def start(self, *indices: int) -> None:
        """Start agents, all at the same time, and wait until they listen."""
        for index in indices:
            host = self.lab.hosts[index]
            settings = host.home / ".config/flare/config.toml"
            settings.parent.mkdir(parents=True, exist_ok=True)
            names = ", ".join(f'"{interface.name}"' for interface in host.fabric)
            settings.write_text(
                f"[fabric]\ninterfaces = [{names}]\n[agent]\nstall_timeout = {STALL_SECONDS}\n"
            )
            with (self.folder / f"{host.name}.log").open("a") as log:
                self.processes[index] = host.popen(
                    [*FLARE, "agent", "--name", host.name, "--accept-first"],
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        for index in indices:
            output = self.processes[index].stdout
            assert output is not None
            line = output.readline()
            assert "listens on" in line, self.log(index)

    def log(self, index: int) -> str:
        return (self.folder / f"{self.lab.hosts[index].name}.log").read_text()

    def kill(self, index: int) -> None:
        """End an agent without a word."""
        process = self.processes.pop(index)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def pair(self) -> None:
        outcome = self.flare("orbit", "pair", *(host.address for host in self.lab.hosts))
        assert outcome.returncode == 0, outcome

    def flare(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller."""
        done = self.lab.controller.run(
            [*FLARE, *words],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def push(self, *words: str, code: int = 0) -> dict[str, Any]:
        """Push a core and return the command's document."""
        done = self.flare("orbit", "push", *words, "--json", *TRUST)
        assert done.returncode == code, (done, [self.log(index) for index in self.processes])
        document: dict[str, Any] = json.loads(done.stdout)
        return {**document, "err": done.stderr}

    @contextmanager
    def pushing(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A push while it runs."""
        process = self.lab.controller.popen(
            [*FLARE, "orbit", "push", *words, *TRUST],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def cores(self, index: int) -> dict[str, Any]:
        """A host's cache directories by name."""
        listed = json.loads(self.flare("orbit", "cores", "--json").stdout)
        name = self.lab.hosts[index].name
        return {core["name"]: core for core in listed if core["node"] == name}


@contextmanager
def agents(lab: Lab, folder: Path) -> Iterator[Agents]:
    """Start an agent on every host and pair them all."""
    made = Agents(lab, folder)
    try:
        made.start(*range(len(lab.hosts)))
        made.pair()
        yield made
    finally:
        for index in tuple(made.processes):
            made.kill(index)


class Traffic:
    """What every interface carried since this was made."""

    def __init__(self, lab: Lab) -> None:
        self._before = {key: host.counters(key[1]) for key, host in _interfaces(lab)}
        self._hosts = dict(_interfaces(lab))

    def __call__(self, host: Host, interface: str = "mgmt0") -> Counters:
        before, now = (
            self._before[host.name, interface],
            self._hosts[host.name, interface].counters(interface),
        )
        return Counters(now.received - before.received, now.sent - before.sent)


def _interfaces(lab: Lab) -> Iterator[tuple[tuple[str, str], Host]]:
    from netlab.host import MANAGEMENT

    for host in (*lab.hosts, lab.controller):
        for name in (MANAGEMENT, *(interface.name for interface in host.fabric)):
            yield (host.name, name), host


class Memory:
    """The most private memory that a process and its descendants had together, sampled while it runs."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self.before = self.peak = self._now()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _now(self) -> int:
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                total += process.memory_full_info().uss
            except psutil.NoSuchProcess:
                continue
        return total

    def _sample(self) -> None:
        while not self._ended.wait(0.1):
            self.peak = max(self.peak, self._now())


def wait_for(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


def used(folder: Path) -> int:
    """Bytes on the disk below a folder."""
    return sum(
        path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    )
