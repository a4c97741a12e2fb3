"""Whom this node obeys: the signed controller set, on disk and in memory.

The only writer of controllers.toml is this module; `flare agent reset` removes the file from another
process, so its state is looked at before every decision.
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Callable
from pathlib import Path

from flare.agent.waiting import in_other_thread
from flare.errors import ConfigError, ConflictError, FlareError, ForbiddenError
from flare.files import ensure_private_folder, locked, read_private, write_atomic
from flare.trust.controllers import ControllerSet
from flare.trust.signed import SignedRecord

MAX_FILE = 64 * 1024 * 1024  # thousands of revisions of a set of 64 controllers
HEADING = (
    "# The controllers that this node obeys, as they signed it. Written by the agent;\n"
    "# `flare agent reset` removes it.\n"
)

logger = logging.getLogger("flare.agent")

Stamp = tuple[int, int, int]


class Authority:
    """The controller set that this node obeys.

    Args:
        path: controllers.toml.
        on_change: called after every change.

    Attributes:
        changing: held by whoever decides about a change, from the look at the set until `adopt` is done.

    Raises:
        ConfigError: the file is there and damaged.
        IdentityError: others can read or change it.
    """

    def __init__(self, path: Path, on_change: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self.on_change = on_change
        self.changing = asyncio.Lock()
        self._writing = False
        self._set: ControllerSet | None = None
        self._stamp: Stamp | None = None
        self._stamp = self._look()
        if self._stamp is not None:
            self._set = read_controllers(path)

    @property
    def controllers(self) -> ControllerSet | None:
        """The set that is obeyed now; None while the node is unpaired."""
        self.refresh()
        return self._set

    @property
    def revision(self) -> int:
        """The set's revision, 0 while the node is unpaired."""
        controllers = self.controllers
        return 0 if controllers is None else controllers.revision

    def is_controller(self, key: bytes) -> bool:
        """Tell whether `key` is in the set now."""
        controllers = self.controllers
        return controllers is not None and controllers.contains(key)

    def refresh(self) -> None:
        """Take in what another process did to the file, such as `flare agent reset`.

        A file that became unreadable authorizes nobody: the safe side of a damaged disk.
        """
        if self._writing:
            return  # `adopt` tells of it, once it is on the disk
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        found = None
        if stamp is not None:
            try:
                found = read_controllers(self._path)
            except FlareError as problem:
                logger.error("nobody is obeyed until this is repaired: %s", problem.message)
        elif self._set is not None:
            logger.info("the authorized controllers were removed; this node is unpaired")
        self._set = found
        self.on_change()

    async def adopt(self, controllers: ControllerSet) -> None:
        """Obey this set from now on; it is on disk before anybody is told.

        A caller that is cancelled waits for the writing, and the next look at the file takes the set in.

        Args:
            controllers: follows from the set that was looked at after `changing` was taken.

        Raises:
            ConflictError: the file was changed since then, as `flare agent reset` does; nothing changed here.
            StorageError: it could not be written; nothing changed.
        """
        assert self.changing.locked(), "of two changes at once one would be lost"
        self._writing = True
        try:
            self._stamp = await in_other_thread(self._write, controllers, self._stamp)
        finally:
            self._writing = False
        self._set = controllers
        self.on_change()

    def _write(self, controllers: ControllerSet, before: Stamp | None) -> Stamp | None:
        """Write the file, if it is as it was; return what it is then. Waits for the disk."""
        ensure_private_folder(self._path.parent)
        with locked(self._path):
            if self._look() != before:
                raise ConflictError("The node's controllers were changed at the same moment. Try again.")
            write_atomic(self._path, controllers_text(controllers).encode())
            return self._look()

    async def apply(self, records: tuple[SignedRecord, ...]) -> int:
        """Apply newer revisions, each signed by a key of the one before; return the revision then.

        Raises:
            ForbiddenError: the node is unpaired, or a signer was not in the set.
            ConflictError: another record of a known revision.
        """
        async with self.changing:
            controllers = self.controllers
            if controllers is None:
                raise ForbiddenError("This node obeys no controller. Pair it first.")
            newer = controllers.apply(records)
            if newer.revision != controllers.revision:
                logger.info("controller set: revision %d to %d", controllers.revision, newer.revision)
                await self.adopt(newer)
            return newer.revision

    def _look(self) -> Stamp | None:
        try:
            information = self._path.stat()
        except OSError:
            return None
        return information.st_ino, information.st_size, information.st_mtime_ns


def remove_controllers(path: Path) -> bool:
    """Remove controllers.toml, so that the node is unpaired; return whether there was one.

    Raises:
        BusyError: an agent writes it and does not finish.
    """
    if not path.exists():
        return False
    # An agent that is writing the next revision would bring the file back.
    with locked(path):
        path.unlink(missing_ok=True)
    return True


def controllers_text(controllers: ControllerSet) -> str:
    """Return the file's text: every signed revision, oldest first."""
    tables = [
        f"\n[[record]]\nbody = {_quoted(record.body)}\n"
        f'signer = "{record.signer.hex()}"\nsignature = "{record.signature.hex()}"\n'
        for record in controllers.chain
    ]
    return HEADING + "".join(tables)


def _quoted(text: str) -> str:
    """Return a TOML string. JSON is full of double quotes, so a literal string is easier to read."""
    if "'" not in text and text.isprintable():
        return f"'{text}'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return (
        '"'
        + "".join(char if char >= " " and char != "\x7f" else f"\\u{ord(char):04x}" for char in escaped)
        + '"'
    )


def read_controllers(path: Path) -> ControllerSet:
    """Read and verify controllers.toml.

    Raises:
        NotFoundError: there is none.
        IdentityError: others can read or change it, or it cannot be read.
        ConfigError: it is damaged, or its revisions do not follow from one another.
    """
    data = read_private(
        path, MAX_FILE, "The controller file", then="look with `flare agent status` whom this node obeys"
    )
    remedy = "Restore it from a backup, or run `flare agent reset` and pair again."
    try:
        document = tomllib.loads(data.decode())
        records = tuple(SignedRecord.from_json(record, "a record") for record in document["record"])
        return ControllerSet.from_chain(records)
    except FlareError as problem:
        raise ConfigError(f"{path} is damaged: {problem.message} {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged: it is not the TOML that the agent wrote. {remedy}") from None
