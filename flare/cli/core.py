"""`flare core`: look at cores, and check them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flare.cli.main import HelpfulGroup

if TYPE_CHECKING:
    from flare.cores.primary import Primary


@click.group(cls=HelpfulGroup)
def core() -> None:
    """Show and verify cores."""


@core.command()
@click.argument("path", metavar="CORE", type=click.Path(readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(path: str, as_json: bool) -> None:
    """Print what a core is, who signed it, and what each rank needs. Digests nothing.

    CORE is a primary .safetensors file on this machine.

    For each rank, STORES are the core's bytes that it reads from its node's disk (with llama.cpp rank zero
    reads them all, and sends the others their weights), DEVICE the weights that it puts on its device, and
    RESERVE what the device needs besides, for context and computing. Placement wants DEVICE and RESERVE free.

    \b
    Example:  flare core show ~/cores/Model-gb10-pp2.safetensors
    """
    from flare.cli.output import human_bytes, print_json, say, table
    from flare.cores.publisher_keys import load_trust_store, own_publishers
    from flare.paths import Paths

    primary = _load(path, "show")
    paths = Paths.from_environment()
    own = own_publishers(paths).get(primary.fingerprint)
    accepted = load_trust_store(paths).find(primary.fingerprint)
    if own is not None:
        publisher = f"{own.name}, your own"
    else:
        publisher = f"{accepted.name}, accepted here" if accepted is not None else "not accepted here"
    if as_json:
        print_json(_described(primary, accepted=accepted is not None or own is not None, own=own is not None))
        return
    index = primary.index
    for label, value in (
        ("core", primary.path),
        ("model", index.model),
        ("engine", index.engine),
        ("revision", index.revision),
        ("layout", f"{index.layout}, {index.ranks} rank(s)"),
        ("export", index.export.hex()),
        ("publisher", publisher),
        ("fingerprint", primary.fingerprint),
        ("size", f"{human_bytes(index.total_bytes)} in {len(index.files)} file(s)"),
    ):
        say(f"{label:<12} {value}")
    code = index.code_files()
    if code:
        say(f"{'code':<12} {len(code)} file(s) that can run code when loaded, first {code[0]}")
    say()
    table(
        ("rank", "stores", "device", "reserve"),
        [
            (
                rank,
                human_bytes(index.rank_bytes(rank)),
                human_bytes(index.device_bytes[rank]),
                human_bytes(index.serving_reserve),
            )
            for rank in range(index.ranks)
        ],
    )


@core.command()
@click.argument("path", metavar="CORE", type=click.Path(readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(path: str, as_json: bool) -> None:
    """Digest all of a core's stored data against its signed index.

    CORE is a primary .safetensors file on this machine. Nothing is sent or changed; a block that is not the
    signed one is named, with exit code 6.

    \b
    Example:  flare core verify ~/cores/Model-gb10-pp2.safetensors
    """
    from pathlib import Path

    from flare.cli.output import human_bytes, human_duration, human_rate, print_json, progress, say, warn
    from flare.cores.orbit_limits import excess, names_of
    from flare.cores.verify import verify_core

    primary = _load(path, "verify")
    with progress() as add:
        report = verify_core(primary, progress=lambda label, total: add(label, total).advance)
    too_many = excess(names_of(primary.index, Path(path).name))
    if too_many is not None:
        warn(too_many)
    if as_json:
        print_json(
            {
                "verified": True,
                "files": report.files,
                "blocks": report.blocks,
                "bytes": report.bytes,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    rate = human_rate(report.bytes / max(report.seconds, 1e-6))
    took = f"{report.seconds:.1f} s" if report.seconds < 60 else human_duration(report.seconds)
    say(
        f"Verified {path}: {human_bytes(report.bytes)} in {report.files} file(s), {report.blocks} blocks, "
        f"{took} ({rate})."
    )


def _load(text: str, command: str) -> Primary:
    """Read the core that a person named; of another machine's file say where it can be read."""
    from pathlib import Path

    from flare.cores.primary import load_primary
    from flare.cores.reference import NodeReference, parse_reference
    from flare.errors import NotFoundError, UsageError

    try:
        return load_primary(Path(text))
    except NotFoundError:
        try:
            reference = parse_reference(text)
        except UsageError:
            reference = None  # the path says enough
        if isinstance(reference, NodeReference):
            raise NotFoundError(
                f"{text} is on the node {reference.node}, and this command reads files of this machine. "
                f"Run it there: flare core {command} {reference.path}"
            ) from None
        raise


def _described(primary: Primary, *, accepted: bool, own: bool) -> dict[str, Any]:
    index = primary.index
    return {
        "primary": str(primary.path),
        "primary_bytes": primary.size,
        "model": index.model,
        "engine": index.engine,
        "revision": index.revision,
        "layout": index.layout,
        "ranks": index.ranks,
        "parallel": {"tensor": index.tensor_parallel, "pipeline": index.pipeline_parallel},
        "export": index.export.hex(),
        "index_sha256": index.index_sha256.hex(),
        "publisher": {
            "public_key": primary.publisher.hex(),
            "fingerprint": primary.fingerprint,
            "accepted": accepted,
            "own": own,
        },
        "bytes": index.total_bytes,
        "device_bytes": list(index.device_bytes),
        "serving_reserve": index.serving_reserve,
        "decode_weight_bytes": index.decode_weight_bytes,
        "rank_bytes": [index.rank_bytes(rank) for rank in range(index.ranks)],
        "files": [
            {"path": file.path, "size": file.size, "sha256": file.sha256.hex()} for file in index.files
        ],
    }
