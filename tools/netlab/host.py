"""A host of the lab: how to run commands there, and what its interfaces have carried."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlab.iproute import ip

MANAGEMENT = "mgmt0"

# Runs a command under a host name of its own, "$0"; the kernel's file is there where `hostname` is not.
_ENTER = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'

# Variables that would lead a command back to the files of whoever runs the lab.
_PERSONAL = (
    "HOME",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "XDG_RUNTIME_DIR",
)


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes that an interface has received and sent."""

    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class Interface:
    """A host's end of a cable: name, IPv4 address, prefix length, and the index of the host beyond."""

    name: str
    address: str
    prefix: int
    peer: int


class Host:
    """A host of the lab.

    Attributes:
        name: Its host name.
        namespace: Its network namespace.
        home: Its HOME.
        address: Its address on the management network.
        fabric: Its ends of cables; empty on the controller.
    """

    def __init__(self, name: str, namespace: str, home: Path, address: str) -> None:
        self.name = name
        self.namespace = namespace
        self.home = home
        self.address = address
        self.fabric: tuple[Interface, ...] = ()

    def command(self, words: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The words that run `words` on this host, for callers that start processes in their own way.

        The process that they start becomes the command itself, so that its pid and signals are the command's.
        """
        inside = [os.fspath(word) for word in words]
        enter = ["unshare", "--uts", "--", "sh", "-c", _ENTER, self.name]
        return ["ip", "netns", "exec", self.namespace, *enter, *inside]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment for a command on this host: ours with its HOME, and `extra`."""
        ours = {name: value for name, value in os.environ.items() if name not in _PERSONAL}
        return {**ours, "HOME": str(self.home), **(extra or {})}

    def run(
        self,
        words: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        check: bool = False,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` on this host; `env` is added to `environment`."""
        return subprocess.run(self.command(words), env=self.environment(env), check=check, **options)

    def popen(
        self, words: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on this host; `env` is added to `environment`."""
        return subprocess.Popen(self.command(words), env=self.environment(env), **options)

    def counters(self, interface: str = MANAGEMENT) -> Counters:
        """What an interface has carried since the lab was built.

        Raises:
            LabError: The host has no such interface.
        """
        output = ip("-n", self.namespace, "-json", "-statistics", "link", "show", "dev", interface)
        statistics = json.loads(output)[0]["stats64"]
        return Counters(statistics["rx"]["bytes"], statistics["tx"]["bytes"])
