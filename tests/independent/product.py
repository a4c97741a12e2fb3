"""Runs the product's command in a home of its own, as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).parent / "flare"


def environment(home: Path) -> dict[str, str]:
    """An environment in which every folder of the product lies under `home`."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    folders = {"HOME": "", "XDG_CONFIG_HOME": "config", "XDG_CACHE_HOME": "cache", "XDG_DATA_HOME": "data"}
    folders |= {"XDG_STATE_HOME": "state", "XDG_RUNTIME_DIR": "run"}
    for folder in folders.values():
        (home / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    return kept | {name: str(home / folder) for name, folder in folders.items()}


def flare(home: Path, *arguments: str) -> str:
    """Run one command to its end; return what it printed."""
    done = subprocess.run(
        [COMMAND, *arguments],
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
