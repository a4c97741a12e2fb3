"""A program that stands where `flare` would: it does what its last serving words say.

Used only where the behaviour of a *process* is the subject (signals, output, escape, descriptors); the real
rank is started by the end-to-end tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def option(name: str) -> str | None:
    """Return the value that follows an option, if it is there."""
    words = sys.argv
    return words[words.index(name) + 1] if name in words else None


def main() -> None:
    """Do what --engine-arg=BEHAVIOUR[:VALUE] says; report argv and environment first."""
    behaviours = dict(
        (word.removeprefix("--engine-arg=") + ":").split(":")[:2]
        for word in sys.argv
        if word.startswith("--engine-arg=")
    )
    status = os.fdopen(int(option("--status-fd") or "2"), "w", buffering=1)
    key_descriptor = option("--launch-key-fd")
    key = os.fdopen(int(key_descriptor), "rb").read().hex() if key_descriptor else None
    descriptors = sorted(int(path.name) for path in Path("/proc/self/fd").iterdir())
    print(
        json.dumps(
            {"argv": sys.argv[1:], "environment": dict(os.environ), "key": key, "descriptors": descriptors}
        )
    )
    if "late" in behaviours:  # as a rank whose modules are still being imported
        time.sleep(float(behaviours["late"]))
    if "report" in behaviours:
        Path(behaviours["report"]).write_text(str(os.getpid()))

    def drain(*_: object) -> None:
        print("draining", flush=True)
        if "stubborn" not in behaviours:
            sys.exit(int(behaviours.get("status") or 0))

    signal.signal(signal.SIGTERM, drain)  # before the first phase, as a real rank
    status.write(json.dumps({"phase": "loading", "reason": None}) + "\n")
    status.write("this is no JSON\n")
    status.write(json.dumps({"phase": "serving", "url": "http://127.0.0.1:1"}) + "\n")

    if "engine" in behaviours:
        engine = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(behaviours["engine"]).write_text(str(engine.pid))
    if "flood" in behaviours:
        for number in range(int(behaviours["flood"])):
            print(f"line {number:06d} " + "x" * 80)
    print("ready", flush=True)
    if "exit" in behaviours:
        sys.exit(int(behaviours["exit"]))
    while True:
        time.sleep(0.2)
        if "chatter" in behaviours:
            print("still here", flush=True)


if __name__ == "__main__":
    main()
