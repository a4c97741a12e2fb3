"""The tree of errors that may reach a person or a peer.

Every class has an exit code (what a script sees) and a wire code (what an ERROR frame
carries), so that a refusal on a node ends the controller's command with the same exit
code as the same refusal at home.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed in a way that no other code names |
| 2 | the command line is wrong |
| 3 | a configuration file is wrong |
| 4 | a node, name or address cannot be reached |
| 5 | refused: not authorized, not trusted, not who it was |
| 6 | the data is wrong: a core that is none, bytes that do not match |
| 7 | no place: no free device, or something already holds the name or device |
| 8 | the engine is missing or failed |
| 9 | storage: no room, no permission, already there |
| 10 | the peer speaks something else than this protocol version |
| 11 | no such group, node, file or publisher |
| 12 | a transfer failed |
| 13 | somebody else changed the same thing first |
| 14 | not available on this platform or in this version |
| 15 | a rank failed |
| 130 | interrupted with Ctrl-C |
"""

from __future__ import annotations


class FlareError(Exception):
    """Something went wrong that a person can understand and act on.

    Args:
        message: one or more sentences that name the thing and say what to do next.
    """

    exit_code = 1
    code = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @staticmethod
    def from_wire(code: str, message: str) -> FlareError:
        """Return the error that an ERROR frame stands for; an unknown code gives a plain FlareError."""
        return _BY_CODE.get(code, FlareError)(message)


def sentence(phrase: str) -> str:
    """Return a phrase, such as a worker's or the system's reason, so that another sentence can follow it."""
    return f"{phrase.rstrip('. ')}."


class UsageError(FlareError):
    """The words of a command do not fit together."""

    exit_code = 2
    code = "usage"


class ConfigError(FlareError):
    """A file that a person edits does not say what it must."""

    exit_code = 3
    code = "config"


class UnreachableError(FlareError):
    """Nobody answers there, or the connection ended before the answer."""

    exit_code = 4
    code = "unreachable"


class ForbiddenError(FlareError):
    """The peer may not ask for this. Says nothing about what it protects."""

    exit_code = 5
    code = "forbidden"


class PairingError(FlareError):
    """Pairing was refused."""

    exit_code = 5
    code = "pairing_refused"


class IdentityError(FlareError):
    """A key is not what it must be: changed, unreadable, open to others, or not a sound key at all."""

    exit_code = 5
    code = "identity"


class ClockSkewError(FlareError):
    """Two clocks disagree so far that a fresh grant looks expired or not yet issued."""

    exit_code = 5
    code = "clock_skew"


class TrustError(FlareError):
    """A signature is missing or wrong, or its signer has not been accepted."""

    exit_code = 5
    code = "untrusted"


class CoreError(FlareError):
    """A core's format is wrong."""

    exit_code = 6
    code = "bad_core"


class IntegrityError(FlareError):
    """Stored or received bytes are not the ones that were signed.

    Attributes:
        file: the path in the core of the file that they are in, where one is known.
    """

    exit_code = 6
    code = "corrupt"
    file: str | None = None


class PlacementError(FlareError):
    """No assignment of ranks to nodes and devices exists; the message says why, a line each."""

    exit_code = 7
    code = "no_placement"


class BusyError(FlareError):
    """Something holds the device, port or name already."""

    exit_code = 7
    code = "busy"


class EngineError(FlareError):
    """An engine is missing, unsupported or failed."""

    exit_code = 8
    code = "engine"


class StorageError(FlareError):
    """A disk is full, a folder is not writable, or a file is in the way."""

    exit_code = 9
    code = "storage"


class ProtocolError(FlareError):
    """Common base of the two kinds of protocol fault; never raised itself."""

    exit_code = 10
    code = "protocol"


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow. Parsers raise only this one."""


class LocalProtocolError(ProtocolError):
    """Our own code used the protocol wrongly: a bug here, not the peer's fault."""

    code = "internal"


class VersionError(FlareError):
    """The peer speaks another version of the agent protocol."""

    exit_code = 10
    code = "version"


class NotFoundError(FlareError):
    """There is no group, node, file, cluster or publisher of that name."""

    exit_code = 11
    code = "not_found"


class TransferError(FlareError):
    """Core bytes did not arrive; nothing partial was published."""

    exit_code = 12
    code = "transfer"


class ConflictError(FlareError):
    """Somebody else changed the same thing first."""

    exit_code = 13
    code = "conflict"


class UnsupportedError(FlareError):
    """This platform or this version cannot do that."""

    exit_code = 14
    code = "unsupported"


class RankError(FlareError):
    """A rank of a group failed; the message carries its own last words."""

    exit_code = 15
    code = "rank"


def _all_subclasses(root: type[FlareError]) -> list[type[FlareError]]:
    found = []
    for child in root.__subclasses__():
        found.append(child)
        found.extend(_all_subclasses(child))
    return found


# "protocol" must give the class that means "the peer's fault": an ERROR frame is a peer's word.
_BY_CODE: dict[str, type[FlareError]] = {
    **{child.code: child for child in _all_subclasses(FlareError)},
    "protocol": RemoteProtocolError,
}
