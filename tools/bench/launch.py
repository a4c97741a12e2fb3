"""From `flare orbit run` to ready, against the engine's own start: two ranks, a real model, medians.

    python tools/bench/launch.py [--rounds 5] [--json]

In every round a group of two ranks is launched (the core lies in the cache already) until /health gives 200;
then the very same engine processes, with the arguments that the group used, are started by hand until the
same answer. The difference is what flare adds: starting the command, sessions, grants, rendezvous, checks.
The bar: less than one second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

LAB = tempfile.mkdtemp(prefix="flare-launch-")
os.environ["FLARE_QUICKSTART_FOLDER"] = LAB
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import quickstart_steps as steps  # noqa: E402 (reads the variable above when it is imported)

BAR = 1.0  # seconds
POLL = 0.01  # seconds between two looks at /health, for both sides alike
GROUP = "bench"


def wait_for_health(url: str) -> None:
    """Return when /health answers 200."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL)
    raise SystemExit(f"launch.py: {url} did not become ready")


def engine_commands() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return argv and environment of the group's two engine processes, as they run now."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            argv = (entry / "cmdline").read_bytes().decode().split("\0")[:-1]
            variables = (entry / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if any(value.startswith(f"HOME={LAB}") for value in variables) and argv:
            name = Path(argv[0]).name
            if name in ("llama-server", "ggml-rpc-server"):
                found[name] = (argv, dict(value.split("=", 1) for value in variables if "=" in value))
    return found


def wait_for_port(port: int) -> None:
    """Return when somebody listens on loopback."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(POLL)


def engine_alone(commands: dict[str, tuple[list[str], dict[str, str]]]) -> float:
    """Start the two engine processes by hand; return the seconds until they are ready."""
    peer, peer_environment = commands["ggml-rpc-server"]
    head, head_environment = commands["llama-server"]
    peer_port, head_port = steps.free_port(), steps.free_port()
    peer = replaced(peer, "-p", str(peer_port))
    head = replaced(replaced(head, "--port", str(head_port)), "--rpc", f"127.0.0.1:{peer_port}")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = time.monotonic()
    processes = [subprocess.Popen(peer, env=peer_environment, **quiet)]
    try:
        wait_for_port(peer_port)
        processes.append(subprocess.Popen(head, env=head_environment, **quiet))
        wait_for_health(f"http://127.0.0.1:{head_port}")
        return time.monotonic() - started
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def replaced(argv: list[str], option: str, value: str) -> list[str]:
    """Return argv with another value of one option."""
    place = argv.index(option) + 1
    return [*argv[:place], value, *argv[place + 1 :]]


def launch(controller: Path, core: Path) -> float:
    """Launch the group; return the seconds from the command to ready."""
    port = steps.free_port()
    words = ["--name", GROUP, "--nodes", ",".join(name for name, _ in steps.NODES), "--threads", "1"]
    started = time.monotonic()
    steps.flare(controller, "orbit", "run", str(core), *words, "--detach", "--port", str(port), show=False)
    wait_for_health(f"http://127.0.0.1:{port}")
    return time.monotonic() - started


def measure(rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each launch and of each start of the engine alone, in turn."""
    controller = steps.BASE / "controller"
    nodes = [steps.Node(name, host) for name, host in steps.NODES]
    launches: list[float] = []
    alone: list[float] = []
    try:
        for node in nodes:
            steps.start_agent(node)
        steps.pair(controller, nodes)
        core = steps.export(controller, steps.fetch_model())
        profile = steps.flare(controller, "publisher", "show", show=False)
        steps.flare(controller, "publisher", "accept", "-", "--yes", text=profile, show=False)
        for number in range(rounds + 1):
            seconds = launch(controller, core)
            commands = engine_commands()
            steps.flare(controller, "orbit", "stop", GROUP, show=False)
            own = engine_alone(commands)
            if number:  # the first launch uploads the core and warms the page cache
                launches.append(seconds)
                alone.append(own)
    finally:
        for node in nodes:
            steps.stop_agent(node)
        shutil.rmtree(LAB, ignore_errors=True)
    return launches, alone


def main() -> None:
    """Measure, print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "log").open("w") as log:
        shown, sys.stdout = sys.stdout, log
        try:
            launches, alone = measure(arguments.rounds)
        finally:
            sys.stdout = shown
    added = [one - other for one, other in zip(launches, alone, strict=True)]
    row = {
        "launch_s": round(statistics.median(launches), 3),
        "engine_alone_s": round(statistics.median(alone), 3),
        "added_s": round(statistics.median(added), 3),
        "ratio": round(statistics.median(launches) / statistics.median(alone), 2),
        "bar_s": BAR,
    }
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, **row}, indent=2))
        return
    print(f"Two ranks of SmolLM2-135M on the CPU, median of {arguments.rounds} rounds")
    print(f"  orbit run to ready   {row['launch_s']:7.3f} s")
    print(f"  the engine alone     {row['engine_alone_s']:7.3f} s   ({row['ratio']} x)")
    print(f"  what flare adds      {row['added_s']:7.3f} s   (bar {BAR} s)")


if __name__ == "__main__":
    main()
