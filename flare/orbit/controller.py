"""This controller: its key, its orbit file and the controller set that it holds."""

from __future__ import annotations

import socket

from flare.errors import ConfigError, FlareError, ForbiddenError
from flare.identity import Identity
from flare.orbit.orbit_file import load_orbit_file
from flare.orbit.orbit_records import OrbitFile
from flare.orbit.reporter import Reporter
from flare.paths import Paths, safe_component
from flare.trust.controllers import ControllerSet
from flare.values import dataclass


@dataclass(frozen=True, slots=True)
class Controller:
    """What every orbit command starts from.

    Attributes:
        controllers: the set in orbit.toml, verified; None before the first pairing.
    """

    paths: Paths
    identity: Identity
    orbit: OrbitFile
    controllers: ControllerSet | None
    reporter: Reporter

    @classmethod
    def open(cls, paths: Paths, reporter: Reporter) -> Controller:
        """Read orbit.toml and the controller key, which the first command makes.

        Raises:
            ConfigError: orbit.toml is wrong, or its controller-set records do not verify.
            IdentityError: the key file is damaged, or others can read it.
        """
        orbit = load_orbit_file(paths.orbit_file)
        identity = Identity.load_or_create(paths.controller_key, "The controller key")
        return cls(paths, identity, orbit, read_controllers(orbit), reporter)

    def member_set(self) -> ControllerSet:
        """Return the controller set, which must list this controller.

        Raises:
            ForbiddenError: it does not; the message says how to get in.
        """
        if self.controllers is None or not self.controllers.contains(self.identity.public_key):
            raise ForbiddenError(
                f"This controller ({self.identity.fingerprint[:16]}…) is not in the controller set of "
                f"{self.orbit.path}. Run this on a controller that is, then copy its orbit.toml here:\n"
                f"  flare orbit controllers add {own_name()} {self.identity.public_key.hex()}"
            )
        return self.controllers


def read_controllers(orbit: OrbitFile) -> ControllerSet | None:
    """Return the verified controller set of an orbit file; None when it has none yet.

    Raises:
        ConfigError: the records do not follow from one another.
    """
    if not orbit.controllers:
        return None
    try:
        return ControllerSet.from_chain(orbit.controllers)
    except FlareError as problem:
        raise ConfigError(
            f"{orbit.path}: the signed controller records do not verify: {problem.message} They are written "
            "by Flare alone: restore the file from a backup, or copy it from another controller."
        ) from None


def own_name() -> str:
    """This host's name, as a controller is called by default."""
    name = safe_component(socket.gethostname().split(".")[0])[:63].lstrip("._-")
    return name or "controller"
