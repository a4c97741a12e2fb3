"""`flare ignition`: models become cores."""

from __future__ import annotations

import click

from flare.cli.main import HelpfulGroup


@click.group(cls=HelpfulGroup)
def ignition() -> None:
    """Prepare a model as a signed core."""


@ignition.command()
@click.argument("source", type=click.Path(readable=False))
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(readable=False),
    help="The folder for the core.",
)
@click.option(
    "--revision", required=True, metavar="REVISION", help="The hardware it is for: gb10, gb202, gb300 or cpu."
)
@click.option(
    "--ranks", type=click.IntRange(1, 1024), default=1, show_default=True, help="Split over so many devices."
)
@click.option(
    "--layout",
    type=click.Choice(["multi_host", "single_host"]),
    help="One device a node, or all on one node. One rank: single_host; several: multi_host.",
)
@click.option(
    "--engine", metavar="ENGINE", help="llama.cpp (for GGUF), vllm or sglang; no rank runs the last two yet."
)
@click.option("--publisher", "publisher_name", metavar="NAME", help="Who signs it, if there are several.")
@click.option("--name", metavar="MODEL", help="The model's name, if not the file's or repository's.")
@click.option("--copy", is_flag=True, help="Copy files that cannot be linked.")
@click.option(
    "--allow-code", is_flag=True, help="Take files that can run code when loaded (.py, .bin, .pt, ...)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(
    source: str,
    folder: str,
    revision: str,
    ranks: int,
    layout: str | None,
    engine: str | None,
    publisher_name: str | None,
    name: str | None,
    copy: bool,
    allow_code: bool,
    as_json: bool,
) -> None:
    """Make a core of a model without changing a byte of it.

    SOURCE is a GGUF file, or a folder of safetensors such as a Hugging Face snapshot. The core's files
    are reflinks or hard links of SOURCE's, so keep SOURCE as it is, or give --copy.
    """
    from pathlib import Path
    from typing import cast

    from flare.cli.output import human_bytes, print_json, progress, say, warn
    from flare.cli.signals import ending_cleanly
    from flare.cores.export import check_revision, export_core
    from flare.cores.index import Layout
    from flare.cores.orbit_limits import excess, names_of
    from flare.cores.primary import load_primary
    from flare.cores.publisher_keys import load_publisher
    from flare.engines.discovery import BINARIES
    from flare.paths import Paths

    check_revision(revision)
    signer_name, signer = load_publisher(Paths.from_environment(), publisher_name)
    with ending_cleanly(), progress() as add:
        path = export_core(
            Path(source),
            Path(folder),
            revision=revision,
            publisher=signer,
            ranks=ranks,
            layout=cast("Layout | None", layout),
            engine=engine,
            name=name,
            copy=copy,
            allow_code=allow_code,
            progress=lambda label, total: add(label, total).advance,
        )
    index = load_primary(path).index
    if index.engine not in BINARIES:
        warn(f"No rank of this version of flare runs {index.engine} yet: this core can be stored and pushed.")
    too_many = excess(names_of(index, path.name))
    if too_many is not None:
        warn(too_many)
    if as_json:
        print_json(
            {
                "primary": str(path.resolve()),
                "export": index.export.hex(),
                "index_sha256": index.index_sha256.hex(),
                "bytes": index.total_bytes,
                "publisher": {"name": signer_name, "fingerprint": signer.fingerprint},
            }
        )
        return
    say(f"Exported and verified {path}")
    say(f"  {index.model} for {index.engine} on {index.revision}, {_ranks(index.ranks, index.layout)}")
    say(f"  {human_bytes(index.total_bytes)} in {len(index.files)} file(s), export {index.export.hex()}")
    say(f"  signed by {signer_name}, fingerprint {signer.fingerprint}")


def _ranks(ranks: int, layout: str) -> str:
    if ranks == 1:
        return "1 rank"
    return f"{ranks} ranks on {'one host' if layout == 'single_host' else f'{ranks} hosts'}"
