"""What a launch may say about serving: one allow-list for the controller, the agent and the rank.

A grant carries these options as words. Both ends parse them here, so that no word can override what
the agent sets itself (`--core-cache`, trust, rendezvous), and nothing reaches an engine unseen.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from flare.engines.arguments import check_engine_arguments
from flare.errors import UsageError
from flare.limits import MAX_STREAMS
from flare.printable import printable
from flare.sizes import parse_size
from flare.values import dataclass

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
DEFAULT_DRAIN_TIMEOUT: Final = 120.0
"""Seconds that running requests get after SIGTERM: a long answer of a large model takes about that."""

MAX_WORDS: Final = 256
"""No launch needs more; a grant is at most 1 MiB and every word is looked at."""
MAX_WORD_LENGTH: Final = 4096
"""The longest path that Linux takes (PATH_MAX)."""
MAX_CONCURRENCY: Final = 4096
"""Each request holds a connection at the front and a slot in the engine."""
MAX_CONTEXT_LENGTH: Final = 2**27
"""134 million tokens; the longest context published so far is 10 million."""
MAX_THREADS: Final = 1024
"""More than any machine that serves has; llama.cpp itself refuses more than 512."""
MAX_MEMORY: Final = 2**53 - 1
"""Bytes; the largest integer that every JSON reader keeps exact."""
MAX_PORT: Final = 0xFFFF
MAX_DRAIN_TIMEOUT: Final = 86_400
"""One day: longer would mean never."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}\Z")
_HOST = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}\Z"
    r"|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]{1,15})?\]?\Z"
)

WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound
"""Every address of a machine."""

RANK_ZERO_OPTIONS: Final = frozenset({"--host", "--port", "--api-key-file"})
"""What only the front of rank zero needs: a grant's `rank_zero` words."""

GRANT_OPTIONS: Final = frozenset({"--transfer-streams"})
"""What a grant's `serving` words may say besides; on a command line it is an option of the launch."""

FLAGS: Final = frozenset({"--verify-weights", "--allow-unsafe-engine-args"})
VALUED: Final = frozenset(
    {
        "--host",
        "--port",
        "--max-concurrency",
        "--context-length",
        "--threads",
        "--memory-limit",
        "--drain-timeout",
        "--api-key-file",
        "--served-name",
        "--engine-arg",
    }
)
SERVING_OPTIONS: Final = FLAGS | VALUED


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The options of one launch. None means "not said": the rank then takes its own default.

    Args:
        host: address that rank zero's front binds; `http_host` gives the default.
        port: TCP port of the front; 0 lets the system choose one.
        max_concurrency: requests that run at once.
        context_length: tokens of one request, prompt and answer together.
        threads: CPU threads of the engine in each rank.
        memory_limit: bytes that each rank's engine may take.
        drain_timeout: seconds that running requests get after SIGTERM.
        api_key_file: absolute path on rank zero's host.
        verify_weights: digest stored data at load even when a marker says that it was verified.
        served_name: the model's name in the HTTP interface.
        engine_arguments: words passed on to the engine, in order.
        allow_unsafe_engine_arguments: also pass on words that are not known to be harmless.
        transfer_streams: connections for a file that a rank receives from rank zero.
    """

    host: str | None = None
    port: int | None = None
    max_concurrency: int | None = None
    context_length: int | None = None
    threads: int | None = None
    memory_limit: int | None = None
    drain_timeout: float | None = None
    api_key_file: str | None = None
    verify_weights: bool = False
    served_name: str | None = None
    engine_arguments: tuple[str, ...] = ()
    allow_unsafe_engine_arguments: bool = False
    transfer_streams: int | None = None

    @property
    def http_host(self) -> str:
        return DEFAULT_HOST if self.host is None else self.host

    @property
    def http_port(self) -> int:
        return DEFAULT_PORT if self.port is None else self.port

    @property
    def drain_seconds(self) -> float:
        return DEFAULT_DRAIN_TIMEOUT if self.drain_timeout is None else self.drain_timeout

    def serving_words(self) -> tuple[str, ...]:
        """Return the words that every rank gets (a grant's `serving`)."""
        words: list[str] = []
        for option, value in (
            ("--max-concurrency", self.max_concurrency),
            ("--context-length", self.context_length),
            ("--threads", self.threads),
            ("--memory-limit", self.memory_limit),
            ("--drain-timeout", None if self.drain_timeout is None else f"{self.drain_timeout:g}"),
            ("--served-name", self.served_name),
            ("--transfer-streams", self.transfer_streams),
        ):
            if value is not None:
                words += [option, str(value)]
        if self.verify_weights:
            words.append("--verify-weights")
        # The value can begin with a dash, so it stays in one word.
        words += [f"--engine-arg={argument}" for argument in self.engine_arguments]
        if self.allow_unsafe_engine_arguments:
            words.append("--allow-unsafe-engine-args")
        return tuple(words)

    def rank_zero_words(self) -> tuple[str, ...]:
        """Return the words that only rank zero gets (a grant's `rank_zero`)."""
        words: list[str] = []
        for option, value in (
            ("--host", self.host),
            ("--port", self.port),
            ("--api-key-file", self.api_key_file),
        ):
            if value is not None:
                words += [option, str(value)]
        return tuple(words)

    def exposure(self, machine: str = "this one") -> str | None:
        """Return what the operator should know when other machines reach the front without a key.

        Args:
            machine: that host, as the sentence names it.
        """
        host = self.http_host
        if self.api_key_file is not None or is_loopback(host):
            return None
        who = f"every machine that reaches {machine}" if host in WILDCARDS else f"whoever reaches {host}"
        return (
            f"The HTTP front listens on {host} without a key: {who} can use the model. "
            "Give --api-key-file, or --host 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Tell whether only its own machine reaches `host`; a name counts only when it is localhost."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def parse_serving(words: Sequence[str], *, only: Iterable[str] = SERVING_OPTIONS) -> ServingOptions:
    """Return the options that `words` say. Later words win; --engine-arg adds up.

    Args:
        words: as on a command line, `--option value` or `--option=value`.
        only: the options that are allowed at this place, for a grant's two lists.

    Raises:
        UsageError: an unknown option, a missing or wrong value, or an unsafe engine argument.
    """
    if len(words) > MAX_WORDS:
        raise UsageError(f"A launch takes at most {MAX_WORDS} words of serving options, not {len(words)}.")
    allowed = frozenset(only)
    options = ServingOptions()
    arguments: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if len(word) > MAX_WORD_LENGTH:
            raise UsageError(f"A serving option is longer than {MAX_WORD_LENGTH} characters.")
        name, equals, value = word.partition("=")
        if name not in allowed:
            raise UsageError(
                f"{printable(name)} is no serving option. Known here: {', '.join(sorted(allowed))}; "
                "pass an engine's own option as --engine-arg=OPTION."
            )
        if name in FLAGS:
            if equals:
                raise UsageError(f"{name} takes no value.")
        elif not equals:
            if position == len(words):
                raise UsageError(f"{name} needs a value.")
            value = words[position]
            position += 1
        if name == "--engine-arg":
            arguments.append(_engine_word(value))
        else:
            options = _with_option(options, name, value)
    options = replace(options, engine_arguments=tuple(arguments))
    check_engine_arguments(options.engine_arguments, allow_unsafe=options.allow_unsafe_engine_arguments)
    return options


def parse_grant_words(serving: Sequence[str], rank_zero: Sequence[str]) -> ServingOptions:
    """Return the options of a grant, each list checked against what may stand in it.

    Raises:
        UsageError: as parse_serving, and an option that stands in the wrong list.
    """
    parse_serving(serving, only=SERVING_OPTIONS - RANK_ZERO_OPTIONS | GRANT_OPTIONS)
    parse_serving(rank_zero, only=RANK_ZERO_OPTIONS)
    return parse_serving([*serving, *rank_zero], only=SERVING_OPTIONS | GRANT_OPTIONS)


def _with_option(options: ServingOptions, name: str, value: str) -> ServingOptions:
    match name:
        case "--host":
            if not _HOST.match(value):
                raise UsageError(f"--host takes an address or a host name, not {printable(value)!r}.")
            return replace(options, host=value.strip("[]"))
        case "--port":
            return replace(options, port=_port(name, value))
        case "--max-concurrency":
            return replace(options, max_concurrency=_number(name, value, 1, MAX_CONCURRENCY))
        case "--context-length":
            return replace(options, context_length=_number(name, value, 16, MAX_CONTEXT_LENGTH))
        case "--threads":
            return replace(options, threads=_number(name, value, 1, MAX_THREADS))
        case "--memory-limit":
            return replace(options, memory_limit=_size(name, value))
        case "--drain-timeout":
            return replace(options, drain_timeout=_seconds(name, value))
        case "--api-key-file":
            if not PurePosixPath(value).is_absolute() or "\0" in value:
                raise UsageError(
                    f"--api-key-file takes an absolute path on rank zero's host, not {printable(value)!r}."
                )
            return replace(options, api_key_file=value)
        case "--served-name":
            if not _NAME.match(value):
                raise UsageError(
                    "--served-name takes up to 255 letters, digits and . _ : / @ + -, "
                    f"beginning with a letter or digit, not {printable(value)!r}."
                )
            return replace(options, served_name=value)
        case "--transfer-streams":
            return replace(options, transfer_streams=_number(name, value, 1, MAX_STREAMS))
        case "--verify-weights":
            return replace(options, verify_weights=True)
        case _:
            return replace(options, allow_unsafe_engine_arguments=True)


def _number(name: str, text: str, smallest: int, largest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,16}", text) or not smallest <= int(text) <= largest:
        raise UsageError(
            f"{name} takes a whole number from {smallest} to {largest}, not {printable(text)!r}."
        )
    return int(text)


def _port(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > MAX_PORT:
        raise UsageError(
            f"{name} takes a whole number from 1 to {MAX_PORT}, or with `flare run` 0 for one that the "
            f"system chooses, not {printable(text)!r}."
        )
    return int(text)


def _size(name: str, text: str) -> int:
    size = parse_size(text)
    if size is None or not 0 < size <= MAX_MEMORY:
        raise UsageError(f"{name} takes a size such as 24GiB or 24GB, not {printable(text)!r}.")
    return size


def _seconds(name: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text) or float(text) > MAX_DRAIN_TIMEOUT:
        raise UsageError(f"{name} takes seconds from 0 to {MAX_DRAIN_TIMEOUT}, not {printable(text)!r}.")
    return float(text)


def _engine_word(value: str) -> str:
    if not value or "\0" in value or "\n" in value:
        raise UsageError("--engine-arg takes one word for the engine, as in --engine-arg=--flash-attn.")
    return value
