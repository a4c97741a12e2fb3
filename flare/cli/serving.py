"""The serving options as click shows them: the same ones for `flare run` and `flare orbit run`.

Values stay words; `flare.serving_options` alone says what they may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

# option -> (placeholder or None for a flag, help); every one of flare.serving_options, in the order of
# --help.
_OPTIONS: dict[str, tuple[str | None, str]] = {
    "--host": ("ADDR", "Address that rank zero's HTTP front binds (default 127.0.0.1)."),
    "--port": ("PORT", "Port of the HTTP front (default 8000)."),
    "--max-concurrency": ("N", "Requests that run at once; more of them queue."),
    "--context-length": ("TOKENS", "Tokens of one request, prompt and answer together."),
    "--threads": ("N", "CPU threads of each rank's engine."),
    "--memory-limit": ("SIZE", "Memory that each rank's context is planned for, such as 24GiB."),
    "--drain-timeout": ("SECONDS", "What running requests get when the group stops (default 120)."),
    "--api-key-file": ("FILE", "File on rank zero's host with the key that clients must send."),
    "--served-name": ("NAME", "The model's name in the HTTP interface."),
    "--verify-weights": (None, "Digest stored data at load even where it was verified before."),
    "--engine-arg": ("ARG", "A word for the engine itself, as in --engine-arg=--flash-attn. Repeatable."),
    "--allow-unsafe-engine-args": (None, "Pass on engine arguments that are not known to be harmless."),
}


def serving_options(command: Command) -> Command:
    """Add every serving option to a click command; `serving_words` turns its arguments into words."""
    for name, (placeholder, text) in reversed(_OPTIONS.items()):
        if placeholder is None:
            option = click.option(name, is_flag=True, help=text)
        else:
            option = click.option(name, metavar=placeholder, multiple=name == "--engine-arg", help=text)
        command = option(command)
    return command


def serving_words(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Take the serving options out of a click command's arguments and return them as words.

    Args:
        arguments: the command's keyword arguments; the serving options are removed from it.
    """
    words: list[str] = []
    for name, (placeholder, _) in _OPTIONS.items():
        value = arguments.pop(name[2:].replace("-", "_"))
        if placeholder is None:
            words += [name] if value else []
        elif name == "--engine-arg":
            words += [f"{name}={word}" for word in value]
        elif value is not None:
            words += [name, value]
    return tuple(words)
