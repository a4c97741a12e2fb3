"""What starting the command line costs: CPU time against `python -c pass`, in turn, medians.

    python tools/bench/startup.py [--rounds 15] [--json]

The bars: `flare --version` at most 4 times, `flare orbit status` of one real, paired agent at most 12 times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLARE = Path(sys.executable).parent / "flare"
BARS = {"flare --version": 4.0, "flare orbit status": 12.0}
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "flare --version": [str(FLARE), "--version"],
    "flare orbit status": [str(FLARE), "orbit", "status"],
}


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    """Run one command and return the user and system seconds that the kernel counted for it."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"startup.py: {' '.join(command)} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


@contextmanager
def paired_agent() -> Iterator[dict[str, str]]:
    """Run an agent in a HOME of its own, paired with that HOME's controller; yield the environment."""
    with tempfile.TemporaryDirectory() as home:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        environment["HOME"] = home

        def flare(*words: str, text: str = "") -> str:
            return subprocess.run(
                [str(FLARE), *words],
                env=environment,
                input=text,
                text=True,
                check=True,
                stdout=subprocess.PIPE,
            ).stdout

        agent = subprocess.Popen(
            [str(FLARE), "agent", "--listen", "127.0.0.1:0", "--name", "node"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert agent.stdout is not None
            started = re.search(r"listens on (\S+:\d+)", agent.stdout.readline())
            if started is None:
                raise SystemExit("startup.py: the agent did not start")
            code = json.loads(flare("agent", "join-code", "--json"))["code"]
            flare("orbit", "pair", started.group(1), "--code", "-", text=code + "\n")
            yield environment
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait()


def main() -> None:
    """Measure, print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with paired_agent() as environment:
        for number in range(arguments.rounds + 1):
            for name, command in COMMANDS.items():
                seconds = cpu_seconds(command, environment)
                if number:  # the first round warms the page cache and writes .pyc files
                    samples[name].append(seconds)
    floor = statistics.median(samples["python -c pass"])
    rows = [
        {
            "command": name,
            "cpu_ms": round(1000 * statistics.median(values), 1),
            "ratio": round(statistics.median(values) / floor, 2),
            "bar": BARS.get(name),
        }
        for name, values in samples.items()
    ]
    if arguments.json:
        print(
            json.dumps({"python": sys.version.split()[0], "rounds": arguments.rounds, "rows": rows}, indent=2)
        )
        return
    print(f"CPU time, median of {arguments.rounds} rounds, Python {sys.version.split()[0]}")
    for row in rows:
        bar = f"(bar {row['bar']:.0f})" if row["bar"] else ""
        print(f"  {row['command']:<20} {row['cpu_ms']:7.1f} ms   {row['ratio']:5.2f} x  {bar}")


if __name__ == "__main__":
    main()
