from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from flare.cores import source as source_module
from flare.cores.source import FolderSource, GgufSource, read_source
from flare.errors import CoreError, NotFoundError, UsageError
from tests.cores.making import gguf, header_bytes, model_folder, safetensors


def paths(found: FolderSource | GgufSource) -> list[str]:
    return [file.path for file in found.files]


def folder(path: Path, allow_code: bool = False) -> FolderSource:
    found = read_source(path, allow_code=allow_code)
    assert isinstance(found, FolderSource)
    return found


def snapshot(tmp_path: Path) -> Path:
    """Make a Hugging Face cache: links in snapshots/, content in blobs/."""
    model_folder(tmp_path / "plain")
    repository = tmp_path / "hub" / "models--acme--Tiny-1B"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / "0123abcd").mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.move(file, repository / "blobs" / f"blob{number}")
        link = repository / "snapshots" / "0123abcd" / file.name
        link.symlink_to(Path("../../blobs") / f"blob{number}")
    return repository / "snapshots" / "0123abcd"


def test_a_gguf_file(tmp_path: Path) -> None:
    found = read_source(gguf(tmp_path / "Tiny-Q4.gguf"), allow_code=False)
    assert isinstance(found, GgufSource)
    assert (found.model, paths(found)) == ("Tiny-Q4", ["model/Tiny-Q4.gguf"])
    assert found.heads[0].count("block_count") == 4


def test_a_gguf_file_behind_a_link_keeps_the_links_name(tmp_path: Path) -> None:
    gguf(tmp_path / "blob")
    (tmp_path / "Tiny.gguf").symlink_to("blob")
    found = read_source(tmp_path / "Tiny.gguf", allow_code=False)
    assert (found.files[0].path, found.files[0].real) == ("model/Tiny.gguf", tmp_path / "blob")


def test_a_gguf_model_in_parts(tmp_path: Path) -> None:
    parts = [gguf(tmp_path / f"Tiny-{number:05d}-of-00002.gguf") for number in (1, 2)]
    found = read_source(parts[0], allow_code=False)
    assert (found.model, paths(found)) == ("Tiny", [f"model/{part.name}" for part in parts])
    assert read_source(tmp_path, allow_code=False) == found
    with pytest.raises(
        UsageError, match=r"is a later part of a model\. Name the first part, -00001-of-00002"
    ):
        read_source(parts[1], allow_code=False)
    parts[1].unlink()
    with pytest.raises(NotFoundError, match=r"Tiny-00002-of-00002.gguf is missing. Fetch all 2 parts"):
        read_source(parts[0], allow_code=False)


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    gguf(tmp_path / "a.gguf")
    assert read_source(tmp_path, allow_code=False).model == "a"
    gguf(tmp_path / "b.gguf")
    with pytest.raises(UsageError, match="holds 2 GGUF models; name one of them"):
        read_source(tmp_path, allow_code=False)


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors"])
def test_what_is_no_source(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFoundError, match="There is no"):
        read_source(tmp_path / name, allow_code=False)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match="is neither a GGUF file nor a folder"):
        read_source(tmp_path / name, allow_code=False)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds neither safetensors nor GGUF files"):
        read_source(tmp_path, allow_code=False)


def test_a_folder(tmp_path: Path) -> None:
    root = model_folder(tmp_path / "Tiny-1B")
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text("{}")
    (root / ".gitattributes").write_text("hidden")
    (root / ".cache").mkdir()
    (root / ".cache" / "x").write_text("hidden")
    found = folder(root)
    assert found.model == "Tiny-1B"
    assert paths(found) == [
        "model/1_Pooling/config.json",
        "model/config.json",
        "model/model-00001-of-00002.safetensors",
        "model/model-00002-of-00002.safetensors",
        "model/model.safetensors.index.json",
        "model/tokenizer.json",
    ]
    assert [header.data_length for header in found.headers] == [512, 512]
    assert found.config["num_hidden_layers"] == 2


def test_a_snapshots_links_lead_to_its_blobs(tmp_path: Path) -> None:
    root = snapshot(tmp_path)
    found = folder(root)
    assert found.model == "Tiny-1B"
    assert {file.real.parent.name for file in found.files} == {"blobs"}


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    root = model_folder(tmp_path / "m")
    (root / "tokenizer.json").rename(root / "real.json")
    (root / "tokenizer.json").symlink_to("real.json")
    assert {file.path: file.real.name for file in folder(root).files}["model/tokenizer.json"] == "real.json"


@pytest.mark.parametrize("target", ["/etc/hostname", "../secret", "../../blobs/elsewhere"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, target: str) -> None:
    root = model_folder(tmp_path / "one" / "m")
    (tmp_path / "one" / "secret").write_text("secret")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "elsewhere").write_text("only a snapshot's own cache has blobs")
    (root / "extra.json").symlink_to(target)
    with pytest.raises(CoreError, match="outside the model's folder"):
        read_source(root, allow_code=False)


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    for number, target in enumerate(("missing", "circle.json")):
        root = model_folder(tmp_path / str(number))
        (root / "circle.json").symlink_to(target)
        with pytest.raises(CoreError, match=r"circle.json is a link that leads nowhere"):
            read_source(root, allow_code=False)


def test_a_link_to_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    root = model_folder(tmp_path / "m")
    (root / "sub").mkdir()
    (root / "again").symlink_to("sub")
    with pytest.raises(CoreError, match="again is not a regular file"):
        read_source(root, allow_code=False)
    (root / "again").unlink()
    os.mkfifo(root / "pipe")
    with pytest.raises(CoreError, match="pipe is not a regular file"):
        read_source(root, allow_code=False)


@pytest.mark.parametrize("name", ["modeling_x.py", "pytorch_model.bin", "weights.PT", "a/state.pkl"])
def test_code_is_refused_unless_allowed(tmp_path: Path, name: str) -> None:
    root = model_folder(tmp_path / "m")
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(b"x")
    with pytest.raises(CoreError) as caught:
        read_source(root, allow_code=False)
    assert f'1 file(s) that can run code when they are loaded, first "{name}"' in caught.value.message
    assert "--allow-code" in caught.value.message
    assert f"model/{name}" in paths(folder(root, allow_code=True))


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    root = model_folder(tmp_path / "m")
    (root / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CoreError, match=r'names the file "model-00002-of-00002.safetensors", which is missing'
    ):
        read_source(root, allow_code=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors.index.json", "{}", 'has no "weight_map"'),
        ("model.safetensors.index.json", "[]", "is not a JSON object"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "\udcff", "is not JSON"),
    ],
)
def test_damaged_json(tmp_path: Path, name: str, content: str, message: str) -> None:
    root = model_folder(tmp_path / "m")
    (root / name).write_text(content, errors="surrogateescape")
    with pytest.raises(CoreError, match=message):
        read_source(root, allow_code=False)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    root = model_folder(tmp_path / "m")
    (root / "model-00002-of-00002.safetensors").write_bytes(header_bytes({}, b"trailing"))
    with pytest.raises(CoreError, match=r"model-00002-of-00002.safetensors has 8 trailing bytes"):
        read_source(root, allow_code=False)


def test_a_pipe_named_like_a_model_does_not_make_us_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CoreError, match=r"a.gguf cannot be read: not a regular file"):
        read_source(tmp_path / "a.gguf", allow_code=False)


def test_names_that_no_core_may_hold(tmp_path: Path) -> None:
    root = model_folder(tmp_path / "m")
    (root / "a\nb").write_text("")
    with pytest.raises(CoreError, match="control character"):
        read_source(root, allow_code=False)


def test_a_folder_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_FILES", 3)
    with pytest.raises(CoreError, match="more than the 3 files"):
        read_source(model_folder(tmp_path / "m"), allow_code=False)


def test_weights_without_tensors_are_fine(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", {"a": (2,)})
    (tmp_path / "empty.safetensors").write_bytes(header_bytes({}))
    assert len(folder(tmp_path).headers) == 2
