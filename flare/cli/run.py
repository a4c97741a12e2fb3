"""`flare run`: serve a core, alone or as one rank of a group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flare.cli.serving import serving_options, serving_words

if TYPE_CHECKING:
    from flare.cores.primary import AcceptedPublishers
    from flare.paths import Paths
    from flare.rank.launch import RunRequest

KEY_LENGTH = 32
MAX_KEY_FILE = 1024
"""Bytes: 32 random ones, or 64 hex digits with a newline."""


@click.command()
@click.argument("core", required=False)
@click.option("--rank", type=click.IntRange(0, 1023), help="This rank of a group; 0 holds the complete core.")
@click.option(
    "--rendezvous", metavar="HOST:PORT", help="Where the ranks meet: bound by rank 0, sought by peers."
)
@click.option(
    "--rendezvous-key-file",
    type=click.Path(path_type=Path),
    help="File with the 32 random bytes (or 64 hex digits) that all ranks of the group share.",
)
@click.option(
    "--insecure-rendezvous", is_flag=True, help="Let ranks on other machines join without a shared key."
)
@click.option(
    "--core-cache", type=click.Path(path_type=Path), help="Root of the model cache of received cores."
)
@click.option(
    "--transfer-streams",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Parallel connections for one file of the core.",
)
@click.option("--accept-publisher", metavar="FINGERPRINT", help="Accept this publisher without a question.")
@click.option("--allow-code", is_flag=True, help="Load a core that holds files which can run code.")
@serving_options
# What the agent sets; a person has no use for these.
@click.option("--ranks", type=click.IntRange(1, 1024), hidden=True)
@click.option("--launch-key-fd", type=int, hidden=True)
@click.option("--status-fd", type=int, hidden=True)
@click.option("--expect-index", hidden=True)
@click.option("--publisher-profile", type=click.Path(path_type=Path), hidden=True)
def run(**arguments: Any) -> int:
    """Serve CORE, a primary .safetensors file on this machine.

    \b
    One process:  flare run CORE
    Rank zero:    flare run CORE --rank 0 --rendezvous 0.0.0.0:29800 --rendezvous-key-file FILE
    A peer:       flare run --rank 1 --rendezvous ZERO:29800 --rendezvous-key-file FILE

    Ctrl-C or SIGTERM finishes the running requests and ends with exit code 0; once more, two seconds later,
    ends at once, with 1 when requests were cut.
    """
    from flare.cli.output import say

    status = arguments.pop("status_fd")
    if status is not None:
        _bind_to_parent()
    request = _request(arguments)

    from flare.rank.run import serve

    return serve(request, say, status)


def _bind_to_parent() -> None:
    """End with the process that started this rank, even if it was gone before this line."""
    import os
    import signal

    from flare.errors import RankError
    from flare.system import set_parent_death_signal

    parent = os.getppid()
    set_parent_death_signal(signal.SIGKILL)
    if parent == 1 or os.getppid() != parent:
        raise RankError("Whoever started this rank is gone.")


def _request(arguments: dict[str, Any]) -> RunRequest:
    import os

    from flare.errors import UsageError
    from flare.paths import Paths
    from flare.rank.launch import RunRequest
    from flare.serving_options import parse_serving
    from flare.session.addresses import parse_address
    from flare.settings import Settings

    if arguments["api_key_file"]:
        arguments["api_key_file"] = str(Path(arguments["api_key_file"]).absolute())
    options = parse_serving(serving_words(arguments))
    paths = Paths.from_environment()
    settings = Settings.load(paths)
    rank, core = arguments["rank"], arguments["core"]
    address = arguments["rendezvous"]
    if (rank is None) != (address is None):
        raise UsageError("--rank and --rendezvous belong together; without both, the core is served alone.")
    if rank and core is not None:
        raise UsageError(
            f"Rank {rank} is a peer: it receives its core from rank zero. Leave {core} out of its command."
        )
    if not rank and core is None:
        raise UsageError("Say which core: flare run CORE. A peer needs --rank and --rendezvous instead.")
    primary = None if core is None else _core_path(core)
    expect = arguments["expect_index"]
    return RunRequest(
        core=primary,
        rank=rank or 0,
        ranks=arguments["ranks"],
        rendezvous=None if address is None else parse_address(address, 29800),
        options=options,
        cache=(arguments["core_cache"] or settings.core_cache or paths.cores).absolute(),
        key=_launch_key(arguments["launch_key_fd"], arguments["rendezvous_key_file"]),
        insecure=arguments["insecure_rendezvous"],
        expect_index=None if expect is None else _digest(expect),
        accepted=_accepted(paths, primary, arguments["publisher_profile"], arguments["accept_publisher"]),
        allow_code=arguments["allow_code"],
        streams=arguments["transfer_streams"],
        settings=settings,
        paths=paths,
        environment=dict(os.environ),
    )


def _core_path(text: str) -> Path:
    from flare.errors import NotFoundError

    path = Path(text).expanduser()
    if path.exists():
        return path.absolute()
    hint = ""
    if text.count("/") == 1 and not text.startswith((".", "~")):
        hint = (
            f" If {text} is a repository: this version takes files of this machine alone. Download the "
            "model, make a core of it with `flare ignition export`, and run that file."
        )
    raise NotFoundError(f"There is no core at {path}. Name its primary .safetensors file.{hint}")


def _launch_key(descriptor: int | None, file: Path | None) -> bytes | None:
    """Read the launch key from the descriptor that the agent passed, or from the operator's file."""

    from flare.errors import IdentityError, UsageError
    from flare.files import read_private

    if descriptor is not None:
        if file is not None:
            raise UsageError("--rendezvous-key-file and --launch-key-fd exclude each other.")
        try:
            with open(descriptor, "rb") as pipe:
                key = pipe.read(KEY_LENGTH + 1)
        except OSError:
            raise UsageError(f"--launch-key-fd {descriptor} is no open descriptor.") from None
        if len(key) != KEY_LENGTH:
            raise UsageError(f"The launch key has {len(key)} bytes, not {KEY_LENGTH}.")
        return key
    if file is None:
        return None
    data = read_private(file, MAX_KEY_FILE, "The rendezvous key file")
    if len(data) == KEY_LENGTH:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii").strip())
    except (UnicodeDecodeError, ValueError):
        key = b""
    if len(key) != KEY_LENGTH:
        raise IdentityError(
            f"{file} is no rendezvous key: it must hold {KEY_LENGTH} random bytes or {2 * KEY_LENGTH} hex "
            f"digits. Make one with `(umask 077; head -c {KEY_LENGTH} /dev/urandom > {file})`."
        )
    return key


def _digest(text: str) -> bytes:
    from flare.errors import UsageError

    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise UsageError("--expect-index takes the SHA-256 of a core index: 64 hex digits.")
    return digest


def _accepted(
    paths: Paths, core: Path | None, profile: Path | None, fingerprint: str | None
) -> AcceptedPublishers:
    """Return the publishers that this rank trusts; an unknown one of a local core is asked about.

    A rank that an agent started trusts exactly the publisher that the controller accepted and passed.
    """
    from flare.cli.output import confirm, note, warn
    from flare.cores.primary import load_primary
    from flare.cores.publisher_keys import (
        accept_publisher,
        ask_acceptance,
        load_trust_store,
        own_publishers,
    )
    from flare.errors import ConfigError
    from flare.files import read_bounded
    from flare.rank.launch import Accepted
    from flare.trust.publishers import MAX_PROFILE, PublisherProfile

    if profile is not None:
        data = read_bounded(profile, MAX_PROFILE, "The publisher profile", ConfigError)
        read = PublisherProfile.from_text(data.decode("utf-8", "replace"))
        return Accepted(frozenset({read.fingerprint}))
    store = load_trust_store(paths)
    problems: list[str] = []
    own = own_publishers(paths, problems.append)
    known = {*own, *(publisher.fingerprint for publisher in store.publishers)}
    if fingerprint is not None:
        known.add(fingerprint.lower())
    if core is None:
        return Accepted(frozenset(known))
    primary = load_primary(core)
    if primary.fingerprint not in known:
        for problem in problems:  # it may be the key that signed
            warn(f"A publisher's key of this account does not count. {problem}")
        ask_acceptance(core, primary.fingerprint, confirm)
    if primary.fingerprint not in own and not store.accepts(primary.fingerprint):
        accept_publisher(paths, PublisherProfile(f"publisher-{primary.fingerprint[:12]}", primary.publisher))
        note(f"Accepted the publisher {primary.fingerprint} (kept in {paths.trust_store}).")
    return Accepted(frozenset({*known, primary.fingerprint}))
