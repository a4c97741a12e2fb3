"""Real agents as processes of their own, and a controller that talks to them over real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 20.0
_LINE = re.compile(r"flare agent (\S+) listens on (\S+?),? .*fingerprint ([0-9a-f]{64})|$")

# Stands where `flare` is installed: `run` is a small program that does what its words say, all else is real.
_FLARE = f"""#!{sys.executable}
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "workers")!r}]
if sys.argv[1:2] == ["run"]:
    from tests.orbit.fake_rank import main
    main(Path(__file__).parent)
else:
    from flare.cli.main import main
    main()
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(slots=True)
class Agent:
    name: str
    home: Path
    process: subprocess.Popen[str]
    address: str
    fingerprint: str


@dataclass(slots=True)
class Lab:
    """A controller's home and its agents."""

    folder: Path
    agents: dict[str, Agent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir()
        for name, text in (
            ("flare", _FLARE),
            ("llama-server", "#!/bin/sh\n"),
            ("ggml-rpc-server", "#!/bin/sh\n"),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    @property
    def orbit_file(self) -> Path:
        return self.folder / "controller/.config/flare/orbit.toml"

    def environment(self, home: Path) -> dict[str, str]:
        home.mkdir(exist_ok=True)
        return {
            "HOME": str(home),
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
        }

    def start(self, name: str, *words: str, listen: str = "127.0.0.1:0") -> Agent:
        home = self.folder / name
        log = (self.folder / f"{name}.log").open("a")
        process = subprocess.Popen(
            [self.folder / "bin/flare", "agent", "--listen", listen, "--name", name, *words],
            env=self.environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.close()
        assert process.stdout is not None
        line = process.stdout.readline()
        match = _LINE.match(line)
        assert match and match.group(2), f"{line!r}\n{(self.folder / f'{name}.log').read_text()}"
        agent = Agent(name, home, process, match.group(2), match.group(3))
        self.agents[name] = agent
        return agent

    def end(self, name: str) -> None:
        agent = self.agents.pop(name)
        agent.process.terminate()
        try:
            agent.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            agent.process.kill()
            agent.process.wait()
        assert agent.process.stdout is not None
        agent.process.stdout.close()

    def paired(self, *names: str) -> None:
        """Start agents and pair them all."""
        hosts = [self.start(name, "--accept-first").address for name in names]
        outcome = self.flare("orbit", "pair", *hosts)
        assert outcome.code == 0, outcome

    def command(self, *words: str, home: str = "controller") -> tuple[list[str], dict[str, str]]:
        return [str(self.folder / "bin/flare"), *words], self.environment(self.folder / home)

    def flare(
        self, *words: str, home: str = "controller", stdin: str | None = None, timeout: float = 60
    ) -> Outcome:
        argv, environment = self.command(*words, home=home)
        done = subprocess.run(
            argv,
            env=environment,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Outcome(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command that is followed while it runs."""
        argv, environment = self.command(*words)
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def interrupted(self, process: subprocess.Popen[str], name: str) -> str:
        """Press Ctrl-C in a command while an agent stands still; return what it said up to its end."""
        agent = self.agents[name].process
        agent.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        try:
            said = "".join(read_until(process, "Interrupted"))
            assert process.wait(timeout=60) == 130
        finally:
            agent.send_signal(signal.SIGCONT)
        assert "Traceback" not in said
        return said

    def status(self) -> dict[str, object]:
        document: dict[str, object] = json.loads(self.flare("orbit", "status", "--json").out)
        return document

    def runs(self) -> list[dict[str, object]]:
        listing = json.loads(self.flare("orbit", "ls", "--json").out)
        runs: list[dict[str, object]] = listing["runs"]
        return runs


@contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    made = Lab(folder)
    try:
        yield made
    finally:
        for name in tuple(made.agents):
            made.end(name)


def read_until(process: subprocess.Popen[str], wanted: str, seconds: float = 30) -> list[str]:
    """Read lines until one holds `wanted`."""
    assert process.stdout is not None
    lines = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if not line:
            break
        lines.append(line)
        if wanted in line:
            return lines
    raise AssertionError(f"{wanted!r} never came; what came:\n{''.join(lines)}")


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
