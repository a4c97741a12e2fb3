"""The `ip` command, and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence

UP_SECONDS = 10.0
"""How long interfaces may take to come up; the kernel needs one second at most."""


class LabError(Exception):
    """The lab cannot be built, or has no such part; the message says what to do."""


def ip(*words: str, text: str | None = None) -> str:
    """Run `ip` and return what it prints.

    Raises:
        LabError: It fails; with its own words.
    """
    done = subprocess.run(["ip", *words], check=False, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise LabError(f"`ip {' '.join(words)}` failed: {said}")
    return done.stdout


def ip_batch(namespace: str, commands: Sequence[str]) -> None:
    """Run several `ip` commands in a namespace."""
    ip("-n", namespace, "-batch", "-", text="\n".join(commands) + "\n")


def wait_until_up(namespace: str) -> None:
    """Wait until every interface has noticed its carrier, which the kernel tells with a delay."""
    deadline = time.monotonic() + UP_SECONDS
    while any(
        link["operstate"] == "DOWN" for link in json.loads(ip("-n", namespace, "-json", "link", "show"))
    ):
        if time.monotonic() > deadline:
            raise LabError(
                f"The interfaces of {namespace} did not come up within {UP_SECONDS:.0f} s. Try again."
            )
        time.sleep(0.02)
