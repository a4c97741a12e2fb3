"""What an export is given: a GGUF file, or a folder of safetensors with what belongs to it.

Links are followed first, and only to where a model's files may be: inside the folder itself, or in
the blobs of the Hugging Face cache that the folder is a snapshot of.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from flare.cores.gguf import GgufHead, read_head
from flare.cores.hashing import open_regular
from flare.cores.index import MODEL_FOLDER, is_code
from flare.cores.safetensors import Header, read_header
from flare.errors import CoreError, NotFoundError, UsageError
from flare.files import read_bounded
from flare.limits import MAX_FILES
from flare.paths import check_relative_path
from flare.values import dataclass

MAX_CONFIG = 16 << 20  # config.json and the weights' own index; the largest seen have 2 MB
# What llama.cpp's gguf-split makes; the engine opens the first part and finds the others itself.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<parts>\d{5})\.gguf\Z")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to be: its path in the core, and the regular file, links resolved, that it is made of."""

    path: str
    real: Path


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF model: its files (parts in order) and their heads."""

    model: str
    files: tuple[SourceFile, ...]
    heads: tuple[GgufHead, ...]


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A folder of safetensors: all its files, the headers of its weights, and its config.json."""

    model: str
    files: tuple[SourceFile, ...]
    headers: tuple[Header, ...]
    config: Mapping[str, Any]


def read_source(source: Path, *, allow_code: bool) -> GgufSource | FolderSource:
    """Look at what SOURCE is, and check every file of it that belongs into the core.

    Raises:
        NotFoundError: there is no SOURCE.
        UsageError: it is neither a GGUF file nor a folder with a model.
        CoreError: a file of it is wrong, leads elsewhere, or could run code.
    """
    if source.is_dir():
        real = source.resolve()
        if any(real.glob("*.safetensors")):
            return _folder(real, allow_code)
        return _gguf(_only_model(source))
    if not source.exists():
        raise NotFoundError(f"There is no {source}. SOURCE is a GGUF file or a folder with a model.")
    if source.suffix.lower() == ".gguf":
        return _gguf(source)
    raise UsageError(
        f"{source} is neither a GGUF file nor a folder. For safetensors give the folder that holds them, "
        "so that config.json and the tokenizer come along."
    )


def _only_model(folder: Path) -> Path:
    """Return the one GGUF model of a folder: a file, or the first part."""
    models = [
        path
        for path in sorted(folder.glob("*.gguf"))
        if not (match := _PART.match(path.name)) or int(match["number"]) == 1
    ]
    if len(models) != 1:
        found = (
            f"{len(models)} GGUF models; name one of them" if models else "neither safetensors nor GGUF files"
        )
        raise UsageError(f"The folder {folder} holds {found}.")
    return models[0]


def _gguf(source: Path) -> GgufSource:
    match = _PART.match(source.name)
    if match is None:
        names, model = [source.name], source.stem
    elif int(match["number"]) == 1:
        parts = int(match["parts"])
        names = [f"{match['stem']}-{number:05d}-of-{parts:05d}.gguf" for number in range(1, parts + 1)]
        model = match["stem"]
    else:
        raise UsageError(
            f"{source} is a later part of a model. Name the first part, -00001-of-{match['parts']}."
        )
    files, heads = [], []
    for name in names:
        path = source.with_name(name)
        if not path.exists():
            raise NotFoundError(f"The part {path} is missing. Fetch all {len(names)} parts of the model.")
        real = path.resolve()
        with _open(real, str(path)) as file:
            heads.append(read_head(file, str(path)))
        check_relative_path(name, "The file name", CoreError)
        files.append(SourceFile(f"{MODEL_FOLDER}/{name}", real))
    return GgufSource(model, tuple(files), tuple(heads))


def _folder(root: Path, allow_code: bool) -> FolderSource:
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    files = _walk(root, allowed)
    code = [file.path for file in files if is_code(file.path)]
    if code and not allow_code:
        raise CoreError(
            f"{root} holds {len(code)} file(s) that can run code when they are loaded, first "
            f'"{code[0].removeprefix(MODEL_FOLDER + "/")}". Move them away, or give --allow-code '
            "if the model needs them and you trust where they come from."
        )
    headers = []
    for file in files:
        if file.path.endswith(".safetensors"):
            shown = str(root / file.path.removeprefix(MODEL_FOLDER + "/"))
            with _open(file.real, shown) as opened:
                headers.append(read_header(opened, shown, companion=True))
    _refuse_missing_shards(root, files)
    return FolderSource(_model_name(root), files, tuple(headers), _json(root / "config.json"))


def _walk(root: Path, allowed: list[Path]) -> tuple[SourceFile, ...]:
    """Return the folder's files in the order of their paths; hidden ones (.git, .cache) are left out."""
    found: list[SourceFile] = []
    folders = [root]
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as entries:
            listed = list(entries)
        for entry in listed:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
                continue
            relative = Path(entry.path).relative_to(root).as_posix()
            check_relative_path(relative, "The file name", CoreError)
            found.append(SourceFile(f"{MODEL_FOLDER}/{relative}", _resolved(Path(entry.path), allowed)))
            if len(found) > MAX_FILES:
                raise CoreError(f"{root} holds more than the {MAX_FILES} files that a core may have.")
    return tuple(sorted(found, key=lambda file: file.path))


def _resolved(path: Path, allowed: list[Path]) -> Path:
    try:
        real = path.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        raise CoreError(f"{path} is a link that leads nowhere. Fetch the model again.") from None
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise CoreError(
            f"{path} is a link to {real}, outside the model's folder. "
            "Put the file itself there if it belongs to the model."
        )
    if not regular:
        raise CoreError(f"{path} is not a regular file. Move it away, then export again.")
    return real


def _refuse_missing_shards(root: Path, files: tuple[SourceFile, ...]) -> None:
    """Refuse a folder whose own list of shards names one that is not there."""
    present = {file.path for file in files}
    for listing in sorted(root.glob("*.safetensors.index.json")):
        shards = _json(listing).get("weight_map")
        if not isinstance(shards, dict):
            raise CoreError(f'{listing} has no "weight_map". Fetch the model again.')
        for shard in shards.values():
            if f"{MODEL_FOLDER}/{shard}" not in present:
                raise CoreError(
                    f'{listing} names the file "{shard}", which is missing. Fetch the model again.'
                )


def _json(path: Path) -> Mapping[str, Any]:
    """Read a JSON file of the model, whose rules are not ours: duplicates and the like are its own affair."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_bounded(path, MAX_CONFIG, "The file", CoreError))
    except (ValueError, RecursionError):
        raise CoreError(f"{path} is not JSON. Fetch the model again.") from None
    if not isinstance(value, dict):
        raise CoreError(f"{path} is not a JSON object. Fetch the model again.")
    return value


def _model_name(root: Path) -> str:
    """Return the repository's name for a Hugging Face snapshot, else the folder's."""
    cache = root.parent.parent.name
    if root.parent.name == "snapshots" and cache.startswith("models--"):
        return cache.split("--")[-1]
    return root.name


def _open(real: Path, what: str) -> BinaryIO:
    try:
        return open(open_regular(real), "rb")
    except OSError as problem:
        raise CoreError(f"{what} cannot be read: {problem.strerror}.") from None
