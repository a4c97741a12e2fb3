"""Who may become this node's first controller: the join code, accept-first, and the answer to PAIR.

A refusal tells the peer nothing but that it was refused; the reason stands in this node's log alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from flare.agent.authority import Authority
from flare.agent.waiting import in_other_thread
from flare.errors import FlareError, NotFoundError, PairingError
from flare.files import ensure_private_folder, read_private, write_atomic
from flare.identity import fingerprint
from flare.paths import Paths
from flare.printable import printable
from flare.trust.controllers import ControllerSet
from flare.trust.join_code import (
    JOIN_CODE_LIFETIME,
    MAX_FILE,
    RETRY_WINDOW,
    JoinCodeFile,
    controller_proof,
    decode,
    node_proof,
    proof_matches,
)
from flare.values import dataclass
from flare.wire.messages import Pair

REFUSED = (
    "This node refused to pair. Its log (journalctl --user -u flare-agent, or the terminal that runs "
    "`flare agent`) says why."
)

THIS_RUN = " while this run lasts"  # behind the expiry of a permission that `flare agent --accept-first` gave

logger = logging.getLogger("flare.agent")


class WrongProofError(PairingError):
    """A proof that does not fit the code: it costs the peer a second."""


@dataclass(frozen=True, slots=True)
class _Recent:
    """A pairing without a code: its controller may ask for the answer once more."""

    key: bytes
    at: float


class Pairing:
    """Decides about PAIR.

    Args:
        paths: where the code, accept-first and the controller set lie.
        authority: takes the new set.
        clock: monotonic seconds; wall_clock: Unix seconds, which the files' expiry is written in.
    """

    def __init__(
        self,
        paths: Paths,
        authority: Authority,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._paths = paths
        self._authority = authority
        self._clock = clock
        self._wall_clock = wall_clock
        self._recent: _Recent | None = None

    async def decide(self, request: Pair, *, session_key: bytes, handshake_hash: bytes) -> bytes | None:
        """Make the session's key a controller, if it may become one. Of several at once one comes first.

        Args:
            request: the PAIR frame.
            session_key: the key that authenticated the session.
            handshake_hash: binds the proofs to this session.

        Returns:
            The node's own proof, or None where no code was used.

        Raises:
            PairingError: refused; the message says nothing.
            WrongProofError: refused, after a guess.
        """
        async with self._authority.changing:
            return await self._decide(request, session_key, handshake_hash)

    async def _decide(self, request: Pair, session_key: bytes, handshake_hash: bytes) -> bytes | None:
        who = f"{printable(request.name)} ({fingerprint(session_key)[:16]})"
        code = self._usable_code(session_key)
        if code is not None and request.proof is not None:
            if not proof_matches(request.proof, controller_proof(code.key, handshake_hash)):
                self._refuse(who, "its proof of the code is wrong")
                raise WrongProofError(REFUSED)
            await self._adopt(request, session_key, who)
            used = code.used(session_key, self._wall_clock()).to_text().encode()
            await in_other_thread(write_atomic, self._paths.join_code_file, used)
            return node_proof(code.key, handshake_hash)
        if self._authority.controllers is not None and not self._just_accepted(session_key):
            raise self._refuse(who, "this node is paired; `flare agent reset` makes it unpaired")
        if request.proof is not None:
            raise self._refuse(who, "it sent a code, but this node has none; run `flare agent join-code`")
        if not self._just_accepted(session_key):
            if accepts_first(self._paths.accept_first_file, self._wall_clock()) is None:
                missing = "this node has no code; run `flare agent join-code`"
                raise self._refuse(who, missing if code is None else "it sent no code")
            await self._adopt(request, session_key, who)
            self._recent = _Recent(session_key, self._clock())
        return None

    def _usable_code(self, key: bytes) -> JoinCodeFile | None:
        """Return the join code that may pair `key` now: a fresh one, or the one that just did."""
        now = self._wall_clock()
        code = read_code(self._paths.join_code_file, now)
        if code is None or not code.accepts(key, now):
            return None
        # Of a node that is paired, only the controller that used the code may ask for its answer again.
        return code if self._authority.controllers is None or code.used_by is not None else None

    def _just_accepted(self, key: bytes) -> bool:
        recent = self._recent
        return (
            recent is not None
            and recent.key == key
            and self._clock() - recent.at <= RETRY_WINDOW
            and self._authority.is_controller(key)
        )

    async def _adopt(self, request: Pair, key: bytes, who: str) -> None:
        """Obey the controller set that PAIR carries; once more is nothing new."""
        if self._authority.is_controller(key):
            return
        if self._authority.controllers is not None:
            raise self._refuse(who, "it was removed from the controller set since it paired")
        try:
            controllers = ControllerSet.from_chain(request.controllers)
        except FlareError as problem:
            raise self._refuse(who, f"its controller set does not verify: {problem.message}") from None
        if not controllers.contains(key):
            raise self._refuse(who, "its controller set does not list the key that it connected with")
        # The set first: a crash in between leaves a code that a paired node no longer looks at.
        await self._authority.adopt(controllers)
        self._paths.accept_first_file.unlink(missing_ok=True)
        logger.info("paired with the controller %s", who)

    def forget_used_code(self) -> None:
        """Remove a code that paired somebody, once its answer can no longer be asked for again."""
        now = self._wall_clock()
        code = read_code(self._paths.join_code_file, now)
        if code is not None and code.used_by is not None and not code.accepts(code.used_by, now):
            self._paths.join_code_file.unlink(missing_ok=True)

    def _refuse(self, who: str, reason: str) -> PairingError:
        logger.warning("refused to pair with %s: %s", who, printable(reason))
        return PairingError(REFUSED)


def install_code(paths: Paths, code: str, now: float) -> int:
    """Keep what a join code proves with, for 24 hours; return the expiry in Unix seconds.

    Args:
        code: as it is typed; case and dashes do not matter.
        now: Unix seconds.

    Raises:
        UsageError: it is no join code.
        StorageError: it cannot be written.
    """
    file = JoinCodeFile.of(decode(code), now)
    ensure_private_folder(paths.join_code_file.parent)
    write_atomic(paths.join_code_file, file.to_text().encode())
    return file.expires


def read_code(path: Path, now: float) -> JoinCodeFile | None:
    """Return the join-code file; one that expired unused is removed."""
    try:
        code = JoinCodeFile.from_text(read_private(path, MAX_FILE, "The join code"))
    except NotFoundError:
        return None
    except FlareError as problem:
        logger.error("the join code cannot be used: %s", problem.message)
        return None
    # A clock that was set back must not give a code more than its 24 hours.
    if code.used_by is None and not now < code.expires <= now + JOIN_CODE_LIFETIME + 1:
        path.unlink(missing_ok=True)
        return None
    return code


def allow_first(paths: Paths, now: float, *, this_run: bool = False) -> int:
    """Accept the first controller that connects, for 24 hours; return the expiry in Unix seconds.

    Args:
        now: Unix seconds.
        this_run: the permission ends with the agent that runs now, at the latest.
    """
    ensure_private_folder(paths.accept_first_file.parent)
    expires = int(now) + JOIN_CODE_LIFETIME
    write_atomic(paths.accept_first_file, f"{expires}{THIS_RUN if this_run else ''}\n".encode())
    return expires


def end_run_permission(paths: Paths) -> None:
    """Remove the accept-first permission of a run of the agent that has ended; another one stays.

    Called at a run's start as well, for one that was killed could not do it.
    """
    try:
        text = read_private(paths.accept_first_file, MAX_FILE, "The accept-first file")
    except FlareError:
        return  # there is none, or one that is obeyed by nobody
    if text.decode(errors="replace").rstrip().endswith(THIS_RUN):
        paths.accept_first_file.unlink(missing_ok=True)


def accepts_first(path: Path, now: float) -> int | None:
    """Return until when the first controller is accepted, in Unix seconds; None when it is not.

    An expired permission is removed.
    """
    try:
        text = read_private(path, MAX_FILE, "The accept-first file").decode()
        expires = int(text.strip().removesuffix(THIS_RUN))
    except NotFoundError:
        return None
    except (FlareError, ValueError) as problem:
        logger.error("accept-first cannot be used: %s", problem)
        return None
    if not now < expires <= now + JOIN_CODE_LIFETIME + 1:
        path.unlink(missing_ok=True)
        return None
    return expires


def remove_invitations(paths: Paths) -> None:
    """Remove the join code and the accept-first permission: a pairing used them up, or a reset did."""
    for path in (paths.join_code_file, paths.accept_first_file):
        path.unlink(missing_ok=True)
