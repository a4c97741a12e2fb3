"""`flare ignition export`: ordinary model files become a core without a byte of them changing.

Everything is made and verified in a hidden folder inside the output folder, then published: the
companions first, the primary last. A folder without a primary is no core, so what an interrupted
export leaves behind is never half a core, and what was there before is never touched.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flare.cores.estimate import Estimate, estimate_gguf, estimate_safetensors
from flare.cores.hashing import Advance, DigestTask, Stages, digest_all, no_stages
from flare.cores.index import ENGINES, MODEL_FOLDER, REVISIONS, CoreFile, CoreIndex, Layout
from flare.cores.placing import PUBLISHED_MODE, place
from flare.cores.primary import DIGESTS_TENSOR, INDEX_KEY, PUBLISHER_KEY, SIGNATURE_KEY, SIGNED_PREFIX
from flare.cores.safetensors import Header, Tensor
from flare.cores.source import FolderSource, GgufSource, SourceFile, read_source
from flare.cores.verify import verify_core
from flare.errors import StorageError, UsageError
from flare.files import NO_HARD_LINKS, describe_os_error, fsync_folder, scratch_folder
from flare.paths import safe_component
from flare.strict_json import canonical
from flare.values import dataclass
from flare_workers.blocks import DIGEST_SIZE

HEADER_ALIGNMENT = 8  # the safetensors format begins its data at a multiple of eight


class Signer(Protocol):
    """The publisher: a public key, and signatures under it."""

    public_key: bytes

    def sign(self, message: bytes) -> bytes:
        """Return the signature over `message`."""
        ...


@dataclass(frozen=True, slots=True)
class _Plan:
    model: str
    engine: str
    files: tuple[SourceFile, ...]
    estimate: Estimate
    tensor: int
    pipeline: int
    rank_ranges: list[list[Any] | None]


def export_core(
    source: Path,
    folder: Path,
    *,
    revision: str,
    publisher: Signer,
    ranks: int = 1,
    layout: Layout | None = None,
    engine: str | None = None,
    name: str | None = None,
    copy: bool = False,
    allow_code: bool = False,
    progress: Stages = no_stages,
    processes: int | None = None,
) -> Path:
    """Make a core, verify it, and publish it.

    Args:
        source: a GGUF file (of several parts the first), or a folder of safetensors.
        folder: where the core will be; made if needed. It must hold no core and no `model` yet.
        revision: the hardware it is for.
        publisher: who signs it.
        ranks: over how many devices it is split.
        layout: where the ranks run; one rank is single_host, several are multi_host unless told otherwise.
        engine: what serves it; llama.cpp for GGUF, else vllm.
        name: the model's name; by default that of the file or repository.
        copy: copy files that cannot be linked.
        allow_code: take companions that are code or pickles.
        progress: shows the stages "copying" (where something is), "digesting" and "verifying".
        processes: at most so many; by default one a processor.

    Returns:
        The path of the primary.

    Raises:
        UsageError, NotFoundError, CoreError: nothing can be made of `source` in this way.
        StorageError: files cannot be linked or written, or something is in the way.
        IntegrityError: the model changed while it was exported.
    """
    layout = layout or ("single_host" if ranks == 1 else "multi_host")
    plan = _plan(read_source(source, allow_code=allow_code), revision, ranks, layout, engine, name)
    primary = folder / _primary_name(plan, revision)
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{folder} lies inside {source}. Choose an output folder elsewhere.")
    made = _make_folder(folder, primary)
    try:
        with scratch_folder(folder, ".flare-export-") as staging:
            _place_files(plan.files, staging, copy, progress)
            table, files = _digests(plan.files, staging, progress, processes)
            members = _members(plan, revision, ranks, layout, files)
            _write(staging / primary.name, encode_primary(members, table, publisher))
            # The staged core is read back from the disk: what was digested is what will be published.
            verify_core(staging / primary.name, progress=progress, processes=processes)
            _publish(staging, primary)
    except OSError as problem:
        raise describe_os_error(problem, "The export failed at") from None
    finally:
        if made and not any(folder.iterdir()):
            folder.rmdir()
    return primary


def encode_primary(
    members: Mapping[str, Any],
    table: bytes,
    publisher: Signer,
    packed: Sequence[Tensor] = (),
) -> bytes:
    """Return a primary's bytes up to the end of its digest table.

    Args:
        members: the index without "format", "export", "block_digests_sha256" and "tensor_table_sha256".
        table: the digest table.
        publisher: who signs.
        packed: a packed core's tensors, their offsets counted behind the table; their data follows.

    Raises:
        CoreError: the index breaks a rule.
    """
    tensors = (
        Tensor(DIGESTS_TENSOR, "U8", (len(table) // DIGEST_SIZE, DIGEST_SIZE), 0, len(table)),
        *(
            Tensor(each.name, each.dtype, each.shape, each.begin + len(table), each.end + len(table))
            for each in packed
        ),
    )
    _, text = CoreIndex.create(
        {
            **members,
            "block_digests_sha256": hashlib.sha256(table).hexdigest(),
            "tensor_table_sha256": Header(0, {}, tensors, 0).table_sha256().hex(),
        }
    )
    header: dict[str, Any] = {
        "__metadata__": {
            INDEX_KEY: text,
            PUBLISHER_KEY: publisher.public_key.hex(),
            SIGNATURE_KEY: publisher.sign(SIGNED_PREFIX + text.encode("ascii")).hex(),
        }
    }
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    encoded = canonical(header).encode("ascii")
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded + table


def check_revision(revision: str) -> None:
    """Refuse what is no hardware revision.

    Raises:
        UsageError: it is none; names the nearest.
    """
    if revision not in REVISIONS:
        near = difflib.get_close_matches(revision, REVISIONS, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(
            f'"{revision[:80]}" is no hardware revision. Known are {", ".join(REVISIONS)}.{hint}'
        )


def _plan(
    source: GgufSource | FolderSource,
    revision: str,
    ranks: int,
    layout: Layout,
    engine: str | None,
    name: str | None,
) -> _Plan:
    check_revision(revision)
    if engine is not None and engine not in ENGINES:
        raise UsageError(f'"{engine}" is no engine. Known are {", ".join(ENGINES)}.')
    if ranks < 1:
        raise UsageError("A core has at least one rank.")
    complete: list[list[Any] | None] = [None] * ranks
    if isinstance(source, GgufSource):
        if engine not in (None, "llama.cpp"):
            raise UsageError(f"{engine} does not serve GGUF files. Leave --engine out, or use llama.cpp.")
        # llama.cpp's head sends its peers their layers, so that they read nothing from a disk.
        nothing: list[list[Any] | None] = [None, *([] for _ in range(ranks - 1))]
        return _Plan(
            model=name or source.model,
            engine="llama.cpp",
            files=source.files,
            estimate=estimate_gguf(source.heads, ranks, revision),
            tensor=1,
            pipeline=ranks,
            rank_ranges=nothing if layout == "multi_host" else complete,
        )
    if engine == "llama.cpp":
        raise UsageError("llama.cpp serves GGUF files. Give a GGUF file of this model, or --engine vllm.")
    # Every rank gets everything: a byte that a rank reads and does not have would be read as zero.
    return _Plan(
        model=name or source.model,
        engine=engine or "vllm",
        files=source.files,
        estimate=estimate_safetensors(source.headers, source.config, ranks, revision),
        tensor=ranks,
        pipeline=1,
        rank_ranges=complete,
    )


def _primary_name(plan: _Plan, revision: str) -> str:
    split = f"-tp{plan.tensor}" if plan.tensor > 1 else f"-pp{plan.pipeline}" if plan.pipeline > 1 else ""
    return f"{safe_component(plan.model)}-{revision}{split}.safetensors"


def _make_folder(folder: Path, primary: Path) -> bool:
    """Make the output folder, or see that nothing is in the way in it; tell whether it is new."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        pass
    except OSError as problem:
        raise describe_os_error(problem, "Cannot make the folder") from None
    else:
        return True
    if not folder.is_dir():
        raise StorageError(f"{folder} is a file. Choose another output folder.")
    for taken in (primary, folder / MODEL_FOLDER):
        if taken.exists() or taken.is_symlink():
            raise StorageError(
                f"{taken} is already there, and an export never replaces anything. "
                "Choose another output folder, or remove it first."
            )
    return False


def _place_files(files: Sequence[SourceFile], staging: Path, copy: bool, progress: Stages) -> None:
    advance: Advance | None = None

    def copied(count: int) -> None:
        # Whether a file is copied or shares its blocks shows with its first piece.
        nonlocal advance
        if advance is None:
            advance = progress("copying", sum(file.real.stat().st_size for file in files))
        advance(count)

    for file in files:
        destination = staging / file.path
        destination.parent.mkdir(parents=True, exist_ok=True)
        place(file.real, destination, copy=copy, copied=copied)


def _digests(
    files: Sequence[SourceFile], staging: Path, progress: Stages, processes: int | None
) -> tuple[bytes, list[CoreFile]]:
    """Digest what was placed; return the digest table and the files of the index."""
    paths = [staging / file.path for file in files]
    tasks = [DigestTask(path, 0, path.stat().st_size, whole=True) for path in paths]
    advance = progress("digesting", sum(task.length for task in tasks))
    found = dict(digest_all(tasks, advance, processes))
    ordered = [found[number] for number in range(len(tasks))]
    table = b"".join(digests.blocks for digests in ordered)
    return table, [
        CoreFile(file.path, 0, task.length, digests.sha256)
        for file, task, digests in zip(files, tasks, ordered, strict=True)
    ]


def _members(
    plan: _Plan, revision: str, ranks: int, layout: Layout, files: Sequence[CoreFile]
) -> dict[str, Any]:
    return {
        "model": plan.model,
        "engine": plan.engine,
        "revision": revision,
        "layout": layout,
        "ranks": ranks,
        "parallel": {"tensor": plan.tensor, "pipeline": plan.pipeline},
        "device_bytes": list(plan.estimate.device_bytes),
        "serving_reserve": plan.estimate.serving_reserve,
        "decode_weight_bytes": plan.estimate.decode_weight_bytes,
        "files": [
            {"path": file.path, "offset": file.offset, "size": file.size, "sha256": file.sha256.hex()}
            for file in files
        ],
        "rank_ranges": plan.rank_ranges,
    }


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(descriptor, PUBLISHED_MODE)
        os.fsync(descriptor)


def _appear(staged: Path, primary: Path) -> None:
    """Give the primary its name; a link, unlike a rename, refuses one that is taken."""
    try:
        os.link(staged, primary)
    except OSError as problem:
        if problem.errno not in NO_HARD_LINKS:
            raise
        if primary.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(primary)) from None
        staged.rename(primary)


def _publish(staging: Path, primary: Path) -> None:
    """Move the companions, then the primary, which alone makes a core of them. Never replaces anything."""
    staged, published = staging / MODEL_FOLDER, primary.parent / MODEL_FOLDER
    for folder in {path.parent for path in staged.rglob("*")}:
        fsync_folder(folder)
    try:
        published.mkdir()  # fails where another export was faster; an empty folder can be replaced
    except FileExistsError:
        raise StorageError(
            f"{published} appeared while this core was made. Choose another output folder."
        ) from None
    try:
        staged.rename(published)
        fsync_folder(primary.parent)
        _appear(staging / primary.name, primary)
    except BaseException:
        shutil.rmtree(published, ignore_errors=True)
        raise
    fsync_folder(primary.parent)
