"""`python -m netlab --hosts 4 --ring -- COMMAND`: run a command on every host of a lab, or keep one open."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from netlab import Host, Lab, LabError, Topology

_END_SECONDS = 2.0
"""How long commands may take to end after Ctrl-C, before they are killed as their hosts are removed."""


def main() -> int:
    """Build a lab, use it, remove it; return the exit status."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _end)
    topology: Topology = "ring" if options.ring else "chain" if options.chain else "direct"
    try:
        with Lab(options.hosts, topology=topology, rails=options.rails) as lab:
            if options.command:
                return _run(_chosen(lab, options.on), options.command)
            _describe(lab)
            signal.pause()
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="netlab", description="Several hosts as network namespaces. Needs root."
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts (default 2)")
    cabling = parser.add_mutually_exclusive_group()
    cabling.add_argument(
        "--ring", action="store_true", help="cable neighbours, and the last host to the first"
    )
    cabling.add_argument(
        "--chain", action="store_true", help="cable neighbours alone (default: every two hosts)"
    )
    parser.add_argument("--rails", type=int, default=1, help="cables between two hosts, 1 or 2 (default 1)")
    parser.add_argument(
        "--on", metavar="HOST", help="run the command on this host alone, such as host0 or controller"
    )
    parser.add_argument(
        "command",
        nargs="*",
        help="what to run on every host, after --; without it the lab stays until Ctrl-C",
    )
    return parser


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End as Ctrl-C does, so that the lab is removed."""
    raise KeyboardInterrupt


def _chosen(lab: Lab, name: str | None) -> list[Host]:
    if name is None:
        return list(lab.hosts)
    for host in (*lab.hosts, lab.controller):
        if host.name == name:
            return [host]
    raise LabError(
        f"There is no host {name!r}. There are {', '.join(host.name for host in lab.hosts)}, controller."
    )


def _describe(lab: Lab) -> None:
    for host in (*lab.hosts, lab.controller):
        print(f"{host.name}  {host.address}  HOME {host.home}")
        for end in host.fabric:
            print(f"    {end.name}  {end.address}/{end.prefix}  to host{end.peer}")
        print(f"    {shlex.join(host.command(['bash']))}")
    print("Ctrl-C removes it.", flush=True)


def _run(hosts: list[Host], command: list[str]) -> int:
    """Run the command on all hosts at once, output after each host's name; the first failure's status."""
    processes = [
        host.popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for host in hosts
    ]
    readers = [
        threading.Thread(target=_copy, args=(host, process), daemon=True)
        for host, process in zip(hosts, processes, strict=True)
    ]
    for reader in readers:
        reader.start()
    try:
        statuses = [process.wait() for process in processes]
    except KeyboardInterrupt:
        for process in processes:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _END_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        for reader in readers:
            reader.join(1.0)
    failed = next((status for status in statuses if status != 0), 0)
    return 128 - failed if failed < 0 else failed


def _copy(host: Host, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{host.name}] {line}", end="" if line.endswith("\n") else "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
