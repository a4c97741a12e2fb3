"""Stands where `flare run` would, in tests of the controller: a process that says lines and leaves as a rank
does.

`--served-name` says how it behaves: `exit-3-at-1` (rank 1 ends with status 3), `unmet-3-at-1` (the
same before it says a phase; the others wait for it), `slow` (drains for a minute),
`taken` (rank zero finds its HTTP port taken), `stay` (peers do not leave with rank zero), anything else
serves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def option(name: str, default: str = "") -> str:
    words = sys.argv
    return words[words.index(name) + 1] if name in words else default


def main(folder: Path) -> None:
    rank = int(option("--rank", "0"))
    behaviour = option("--served-name")
    port = option("--rendezvous").rpartition(":")[2]
    zero = folder / f"zero-{port or os.getpid()}"
    status = os.fdopen(int(option("--status-fd", "2")), "w", buffering=1)
    url = f"http://{option('--host', '127.0.0.1')}:{option('--port', '8000')}"

    def drain(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: end(1))
        print("draining", flush=True)
        if behaviour == "slow":
            time.sleep(60)
        end(0)

    def end(code: int) -> None:
        if rank == 0:
            zero.unlink(missing_ok=True)
        sys.exit(code)

    signal.signal(signal.SIGTERM, drain)
    if rank == 0:
        zero.write_text(str(os.getpid()))
    if behaviour.startswith("unmet-"):
        _, code, _, where = behaviour.split("-")
        if int(where) == rank:
            print("flare: error: config.toml has no such key.", file=sys.stderr, flush=True)
            end(int(code))
    print(f"rank {rank} says hello from {' '.join(sys.argv[1:])}", flush=True)
    status.write(json.dumps({"phase": "resolving"}) + "\n")
    if behaviour == "taken" and rank == 0:
        time.sleep(0.3)
        status.write(json.dumps({"phase": "failed", "reason": "port 8123 is taken"}) + "\n")
        end(9)
    if behaviour.startswith("unmet-"):
        status.write(json.dumps({"phase": "rendezvous", "reason": "waiting"}) + "\n")
        while True:
            time.sleep(0.05)
    status.write(json.dumps({"phase": "loading"}) + "\n")
    if behaviour.startswith("exit-"):
        _, code, _, where = behaviour.split("-")
        if int(where) == rank:
            time.sleep(0.5)
            print("out of memory", file=sys.stderr, flush=True)
            end(int(code))
    status.write(json.dumps({"phase": "serving", "url": url}) + "\n")
    print("serving", flush=True)
    arrived = False
    while True:
        time.sleep(0.05)
        arrived = arrived or zero.exists()
        if rank > 0 and arrived and not zero.exists() and behaviour != "stay":
            print("rank zero is gone", flush=True)
            sys.exit(0)
