"""The lab itself: namespaces, cables, and the hosts that tests run commands on."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from netlab import guard
from netlab.host import MANAGEMENT, Host, Interface
from netlab.iproute import LabError, ip, ip_batch, wait_until_up

Topology = Literal["direct", "ring", "chain"]

MIN_HOSTS, MAX_HOSTS = 2, 16
"""Fewer need no lab; more than the address plan below has room to number."""

MAX_RAILS = 2
"""Parallel cables between two hosts, as a ConnectX-7 port has two halves."""

MANAGEMENT_SUBNET = "10.77.0"
FABRIC_SUBNETS = "10.78"
PREFIX = 24
FABRIC_MTU = 9000
"""What people set on fabric interfaces."""

_CONTROLLER_NUMBER = 250
_FIRST_HOST_NUMBER = 10
_LAB_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Cable:
    """One rail between two hosts."""

    low: int
    high: int
    rail: int
    low_end: Interface
    high_end: Interface


class Lab:
    """Several hosts; a context manager that leaves nothing behind.

    Args:
        hosts: How many, 2 to 16.
        topology: How they are cabled: `direct`, a cable between every two; `ring`, neighbours and the last to
            the first; `chain`, neighbours alone.
        rails: Cables between two hosts that are connected, 1 or 2; each is a subnet of its own.
        folder: Where the hosts' HOMEs lie; None makes a folder that goes with the lab.

    Attributes:
        hosts: The hosts by index, named host0 upward.
        controller: One more host, on the management network alone.
        cables: Every rail.
    """

    def __init__(
        self,
        hosts: int = 2,
        *,
        topology: Topology = "direct",
        rails: int = 1,
        folder: Path | None = None,
    ) -> None:
        if not MIN_HOSTS <= hosts <= MAX_HOSTS:
            raise LabError(f"A lab has {MIN_HOSTS} to {MAX_HOSTS} hosts, not {hosts}.")
        if topology not in ("direct", "ring", "chain"):
            raise LabError(f"A lab is cabled direct, as a ring or as a chain, not {topology!r}.")
        if not 1 <= rails <= MAX_RAILS:
            raise LabError(f"Two hosts have 1 to {MAX_RAILS} cables, not {rails}.")
        self._count = hosts
        self._topology = topology
        self._rails = rails
        self._given_folder = folder
        self._guard: subprocess.Popen[bytes] | None = None
        self.hosts: tuple[Host, ...] = ()
        self.cables: tuple[Cable, ...] = ()
        self._controller: Host | None = None

    @property
    def controller(self) -> Host:
        """The host that is on the management network alone."""
        if self._controller is None:
            raise LabError("The lab is not built. Enter it with a with statement first.")
        return self._controller

    def __enter__(self) -> Self:
        """Build the lab.

        Raises:
            LabError: Not root, no `ip` command, or the kernel refuses.
        """
        _check_rights()
        guard.remove_stale()
        self._prefix = f"netlab-{os.getpid()}-{guard.start_time(os.getpid())}-{next(_LAB_NUMBERS)}-"
        self._own_folder = "" if self._given_folder else tempfile.mkdtemp(prefix=self._prefix)
        self._guard = subprocess.Popen(
            [sys.executable, "-P", guard.__file__, self._prefix, self._own_folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._build(self._given_folder or Path(self._own_folder))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the lab."""
        self.close()

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; does nothing the second time."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            # A byte, and not only the end of the pipe: a process that we forked may hold another end of it.
            try:
                self._guard.stdin.write(b".")
                self._guard.stdin.close()
            except BrokenPipeError:
                pass  # the guard was killed
            if self._guard.wait() != 0:
                guard.clean_up(self._prefix, self._own_folder)
            self._guard = None
            self.hosts, self.cables, self._controller = (), (), None

    # --- cables

    def cable(self, one: int, other: int, rail: int = 0) -> Cable:
        """The cable between two hosts.

        Raises:
            LabError: There is none.
        """
        for cable in self.cables:
            if (cable.low, cable.high, cable.rail) == (min(one, other), max(one, other), rail):
                return cable
        raise LabError(f"There is no cable {rail} between host{one} and host{other}.")

    def cut(self, one: int, other: int, rail: int = 0) -> None:
        """Take a cable's link down at the end of the host named first; the other end loses its carrier.

        The addresses stay. `restore` undoes it.
        """
        self._set(one, other, rail, "down")

    def restore(self, one: int, other: int, rail: int = 0) -> None:
        """Bring a link up again that `cut` took down."""
        self._set(one, other, rail, "up")

    def delete(self, one: int, other: int, rail: int = 0) -> None:
        """Remove a cable for good: both interfaces vanish, as when an adapter falls off its bus."""
        cable = self.cable(one, other, rail)
        ip("-n", self.hosts[cable.low].namespace, "link", "delete", cable.low_end.name)
        self.cables = tuple(each for each in self.cables if each is not cable)

    def cut_management(self, host: Host) -> None:
        """Unplug a host from the management network: it keeps its address and loses its carrier."""
        ip("-n", self._switch, "link", "set", host.name, "down")

    def restore_management(self, host: Host) -> None:
        """Plug a host into the management network again."""
        ip("-n", self._switch, "link", "set", host.name, "up")

    def _set(self, one: int, other: int, rail: int, state: str) -> None:
        cable = self.cable(one, other, rail)
        end = cable.low_end if one == cable.low else cable.high_end
        ip("-n", self.hosts[one].namespace, "link", "set", end.name, state)

    # --- building

    @property
    def _switch(self) -> str:
        return f"{self._prefix}switch"

    def _build(self, folder: Path) -> None:
        ip("netns", "add", self._switch)
        ip_batch(self._switch, ["link add bridge type bridge", "link set bridge up"])
        self.hosts = tuple(
            self._add_host(f"host{index}", _FIRST_HOST_NUMBER + index, folder) for index in range(self._count)
        )
        self._controller = self._add_host("controller", _CONTROLLER_NUMBER, folder)
        numbers = itertools.count()
        names = [itertools.count() for _ in self.hosts]
        cables = []
        for low, high in self._connected():
            for rail in range(self._rails):
                subnet = f"{FABRIC_SUBNETS}.{next(numbers)}"
                ends = [
                    Interface(
                        f"fabric{next(names[end])}", f"{subnet}.{_FIRST_HOST_NUMBER + end}", PREFIX, peer
                    )
                    for end, peer in ((low, high), (high, low))
                ]
                self._lay(self.hosts[low], self.hosts[high], *ends)
                cables.append(Cable(low, high, rail, *ends))
        self.cables = tuple(cables)
        for host in (*self.hosts, self.controller):
            wait_until_up(host.namespace)

    def _connected(self) -> Iterator[tuple[int, int]]:
        """The pairs of hosts that have cables, the lower index first."""
        if self._topology == "direct":
            yield from itertools.combinations(range(self._count), 2)
            return
        yield from itertools.pairwise(range(self._count))
        if self._topology == "ring" and self._count > 2:
            yield (0, self._count - 1)

    def _add_host(self, name: str, number: int, folder: Path) -> Host:
        home = folder / name
        home.mkdir(mode=0o700, exist_ok=True)
        host = Host(name, f"{self._prefix}{name}", home, f"{MANAGEMENT_SUBNET}.{number}")
        ip("netns", "add", host.namespace)
        ip_batch(
            host.namespace,
            [
                "link set lo up",
                f"link add {MANAGEMENT} type veth peer name {name} netns {self._switch}",
                *_raise(MANAGEMENT, host.address),
            ],
        )
        ip_batch(
            self._switch,
            [f"link set {name} addrgenmode none", f"link set {name} master bridge", f"link set {name} up"],
        )
        return host

    def _lay(self, low: Host, high: Host, low_end: Interface, high_end: Interface) -> None:
        """Connect two hosts and give both ends their addresses."""
        pair = f"link add {low_end.name} type veth peer name {high_end.name} netns {high.namespace}"
        ip_batch(low.namespace, [pair, *_raise(low_end.name, low_end.address, FABRIC_MTU)])
        ip_batch(high.namespace, _raise(high_end.name, high_end.address, FABRIC_MTU))
        low.fabric += (low_end,)
        high.fabric += (high_end,)


def _raise(interface: str, address: str, mtu: int = 1500) -> list[str]:
    """The `ip` commands that bring an interface up; no IPv6, whose greetings would show in the counters."""
    return [
        f"link set {interface} mtu {mtu} addrgenmode none",
        f"address add {address}/{PREFIX} dev {interface}",
        f"link set {interface} up",
    ]


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise LabError("The lab makes network namespaces, which only root may. Run it as root.")
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            raise LabError(f"The lab needs the {program} command. Install the package {package}.")
