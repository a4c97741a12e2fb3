"""From a checked grant to the words and the environment that a rank is started with. Pure.

Only what stands here reaches a rank: no secret in a word or a variable, nothing of the agent's environment
but an allow-list, and no serving option that is not in the one table that the controller checked too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flare.errors import RemoteProtocolError
from flare.serving_options import parse_grant_words
from flare.session import format_address
from flare.trust.grants import Grant, Member
from flare.values import dataclass

# What a rank and its engine need to find files and devices. Not HF_TOKEN, not LD_*, not PYTHON*: a rank
# loads what was signed, with the libraries of its own installation.
ALLOWED_VARIABLES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "TZ",
        "TMPDIR",
        "XDG_CONFIG_HOME",
        "XDG_CACHE_HOME",
        "XDG_DATA_HOME",
        "XDG_RUNTIME_DIR",
    }
)
ALLOWED_PREFIXES = ("LC_", "NVIDIA_")
FALLBACK_PATH = "/usr/local/bin:/usr/bin:/bin"  # where systemd gives a service none


def rank_environment(environment: Mapping[str, str], visible_devices: str | None) -> dict[str, str]:
    """Return a rank's whole environment.

    Args:
        environment: the agent's.
        visible_devices: the value of CUDA_VISIBLE_DEVICES; None leaves it unset.
    """
    allowed = {
        name: value
        for name, value in environment.items()
        if name in ALLOWED_VARIABLES or name.startswith(ALLOWED_PREFIXES)
    }
    allowed.setdefault("PATH", FALLBACK_PATH)
    allowed["PYTHONUNBUFFERED"] = "1"  # a line of output is a line of LOG when it is written
    if visible_devices is not None:
        allowed["CUDA_VISIBLE_DEVICES"] = visible_devices
    return allowed


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Files of this node that a rank is told of.

    Args:
        executable: the program and its leading words.
        core: the primary, where this rank needs the complete core here; None for a peer.
        cache: the agent's cache, root of the rank's model cache.
        profile: the publisher's public profile.
    """

    executable: tuple[str, ...]
    core: Path | None
    cache: Path
    profile: Path


def needs_complete_core(grant: Grant, member: Member) -> bool:
    """Tell whether this member's rank reads a core that lies here before it starts."""
    return grant.single_host or member.rank == 0


def rank_command(grant: Grant, member: Member, files: RankFiles) -> tuple[str, ...]:
    """Return the words that start a member's rank, without those that name descriptors.

    Raises:
        UsageError: a serving option that is not allowed.
        RemoteProtocolError: the rendezvous is no address.
    """
    options = parse_grant_words(grant.serving, grant.rank_zero)
    words = [*files.executable, "run"]
    if files.core is not None:
        words.append(str(files.core))
    if not grant.single_host:
        host, port = split_rendezvous(grant)
        rendezvous = f"0.0.0.0:{port}" if member.rank == 0 else f"{host}:{port}"
        words += ["--rank", str(member.rank), "--rendezvous", rendezvous, "--ranks", str(len(grant.members))]
    words += ["--core-cache", str(files.cache), "--publisher-profile", str(files.profile)]
    words += ["--expect-index", grant.package.index_sha256]
    words += options.serving_words()
    if needs_complete_core(grant, member):
        words += options.rank_zero_words()
    return tuple(words)


def front_address(grant: Grant, member: Member) -> str | None:
    """Return "host:port" that the member's HTTP front binds; None where it has none.

    Raises:
        UsageError: a serving option that is not allowed.
    """
    if not needs_complete_core(grant, member):
        return None
    options = parse_grant_words(grant.serving, grant.rank_zero)
    return format_address(options.http_host, options.http_port)


def split_rendezvous(grant: Grant) -> tuple[str, int]:
    """Return host (IPv6 in brackets) and port of the rendezvous.

    Raises:
        RemoteProtocolError: the grant has none, or none that is an address.
    """
    host, _, port = (grant.rendezvous or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RemoteProtocolError("The grant of a multi-host core has no rendezvous such as 10.0.0.1:29800.")
    return host, int(port)
