from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flare.cores import export, placing
from flare.cores.export import export_core
from flare.cores.index import model_file
from flare.cores.primary import load_primary
from flare.cores.verify import verify_core
from flare.errors import CoreError, IntegrityError, StorageError, UsageError
from tests.cores.making import MIB, PUBLISHER, gguf, gguf_core, model_folder, safetensors


def make(source: Path, folder: Path, **options: Any) -> Path:
    return export_core(source, folder, **{"revision": "cpu", "publisher": PUBLISHER, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_a_gguf_core_of_two_ranks(tmp_path: Path) -> None:
    path = gguf_core(tmp_path, ranks=2)
    assert path == tmp_path / "core" / "Tiny-cpu-pp2.safetensors"
    loaded = load_primary(path)
    index = loaded.index
    assert (index.model, index.engine, index.revision) == ("Tiny", "llama.cpp", "cpu")
    assert (index.layout, index.ranks) == ("multi_host", 2)
    assert (index.tensor_parallel, index.pipeline_parallel) == (1, 2)
    assert index.rank_ranges(0) is None
    assert index.rank_ranges(1) == {}
    assert model_file(index) == "model/Tiny.gguf"
    assert sum(index.device_bytes) > 0
    assert index.serving_reserve > 0
    assert loaded.publisher == PUBLISHER.public_key
    assert set(contents(path.parent)) == {path.name, "model/Tiny.gguf"}
    assert (path.parent / "model/Tiny.gguf").read_bytes() == (tmp_path / "Tiny.gguf").read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    verify_core(path)


def test_the_same_model_gives_the_same_export(tmp_path: Path) -> None:
    exports = [load_primary(gguf_core(tmp_path / name)).index.export for name in ("one", "two")]
    assert exports[0] == exports[1]


def test_a_folder_core(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "Tiny-1B")
    path = make(source, tmp_path / "core", ranks=2, revision="gb10")
    assert path.name == "Tiny-1B-gb10-tp2.safetensors"
    index = load_primary(path).index
    assert (index.engine, index.layout) == ("vllm", "multi_host")
    assert (index.tensor_parallel, index.pipeline_parallel) == (2, 1)
    assert [index.rank_ranges(rank) for rank in (0, 1)] == [None, None]
    assert model_file(index) == "model"
    assert contents(path.parent / "model") == contents(source)
    assert index.device_bytes == (512, 512)


def test_one_rank_and_one_host(tmp_path: Path) -> None:
    source = gguf(tmp_path / "Tiny.gguf")
    one = make(source, tmp_path / "one")
    assert (one.name, load_primary(one).index.layout) == ("Tiny-cpu.safetensors", "single_host")
    index = load_primary(make(source, tmp_path / "two", ranks=2, layout="single_host")).index
    assert (index.layout, index.ranks, index.rank_ranges(1)) == ("single_host", 2, None)


def test_parts_of_a_gguf_model(tmp_path: Path) -> None:
    parts = [gguf(tmp_path / f"Tiny-{number:05d}-of-00002.gguf") for number in (1, 2)]
    index = load_primary(make(parts[0], tmp_path / "core")).index
    assert [file.path for file in index.files] == [f"model/{part.name}" for part in parts]
    assert model_file(index) == "model/Tiny-00001-of-00002.gguf"


def test_the_name_may_be_chosen(tmp_path: Path) -> None:
    path = make(gguf(tmp_path / "Tiny.gguf"), tmp_path / "core", name="acme/My Model")
    assert (path.name, load_primary(path).index.model) == ("acme-My-Model-cpu.safetensors", "acme/My Model")


def test_engine_for_safetensors(tmp_path: Path) -> None:
    path = make(model_folder(tmp_path / "m"), tmp_path / "core", engine="sglang")
    assert load_primary(path).index.engine == "sglang"


def test_code_only_where_it_is_allowed(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m")
    (source / "modeling.py").write_text("print('hello')")
    with pytest.raises(CoreError, match="--allow-code"):
        make(source, tmp_path / "core")
    path = make(source, tmp_path / "core", allow_code=True)
    assert load_primary(path).index.code_files() == ["model/modeling.py"]


@pytest.mark.parametrize("copy", [False, True])
def test_stages_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: bool) -> None:
    monkeypatch.setattr(placing, "_reflink", lambda *_: False)
    shown: dict[str, int] = {}
    counted: list[int] = []

    def stage(label: str, total: int) -> Any:
        shown[label] = total
        return counted.append

    source = gguf(tmp_path / "Tiny.gguf")
    make(source, tmp_path / "core", progress=stage, copy=copy)
    stages = ["copying", "digesting", "verifying"] if copy else ["digesting", "verifying"]
    size = source.stat().st_size
    assert shown == dict.fromkeys(stages, size)
    assert sum(counted) == len(stages) * size


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gguf", {"revision": "a100"}, '"a100" is no hardware revision. Known are gb10, gb202, gb300, cpu'),
        ("gguf", {"engine": "tgi"}, '"tgi" is no engine. Known are llama.cpp, vllm, sglang'),
        ("gguf", {"engine": "vllm"}, "vllm does not serve GGUF files"),
        ("folder", {"engine": "llama.cpp"}, "llama.cpp serves GGUF files"),
        ("gguf", {"ranks": 0}, "A core has at least one rank"),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, kind: str, options: dict[str, Any], message: str) -> None:
    source = gguf(tmp_path / "Tiny.gguf") if kind == "gguf" else model_folder(tmp_path / "m")
    with pytest.raises(UsageError) as caught:
        make(source, tmp_path / "core", **options)
    assert message in caught.value.message
    assert not (tmp_path / "core").exists()


def test_more_ranks_than_layers(tmp_path: Path) -> None:
    with pytest.raises(CoreError, match="cannot be split over 9 ranks"):
        make(gguf(tmp_path / "Tiny.gguf"), tmp_path / "core", ranks=9)


def test_an_output_folder_inside_the_source(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m")
    with pytest.raises(UsageError, match="lies inside"):
        make(source, source / "core")


def test_an_output_that_is_there_is_not_touched(tmp_path: Path) -> None:
    source = gguf(tmp_path / "Tiny.gguf")
    path = make(source, tmp_path / "core")
    before = contents(tmp_path / "core")
    with pytest.raises(StorageError, match=r"Tiny-cpu.safetensors is already there"):
        make(source, tmp_path / "core")
    with pytest.raises(StorageError, match="model is already there"):
        make(source, tmp_path / "core", name="Other")
    assert contents(tmp_path / "core") == before
    verify_core(path)
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"file is a file\. Choose another"):
        make(source, tmp_path / "file")
    with pytest.raises(StorageError, match="Cannot make the folder"):
        make(source, tmp_path / "file" / "below")


def test_a_folder_with_other_files_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "notes.txt").write_text("mine")
    path = make(gguf(tmp_path / "Tiny.gguf"), tmp_path / "core")
    assert set(contents(tmp_path / "core")) == {"notes.txt", path.name, "model/Tiny.gguf"}


def test_a_damaged_core_is_found_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = export.encode_primary

    def damaging(*arguments: Any) -> bytes:
        """Stands for a disk that changes a byte between writing and reading back."""
        encoded = bytearray(real(*arguments))
        encoded[-1] ^= 1
        return bytes(encoded)

    monkeypatch.setattr(export, "encode_primary", damaging)
    with pytest.raises(IntegrityError):
        make(gguf(tmp_path / "Tiny.gguf"), tmp_path / "core")
    assert not (tmp_path / "core").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device", "model/x")])
@pytest.mark.parametrize(
    "where", ["_place_files", "_digests", "_write", "verify_core", "_publish", "_appear"]
)
def test_nothing_half_made_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Any
) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "notes.txt").write_text("mine")

    def interrupted(*_arguments: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(export, where, interrupted)
    source = gguf(tmp_path / "Tiny.gguf")
    for folder in (tmp_path / "core", tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else StorageError) as caught:
            make(source, folder)
        if error is not KeyboardInterrupt:
            assert "The export failed at model/x: the disk is full" in str(caught.value)
    assert contents(tmp_path / "core") == {"notes.txt": b"mine"}
    assert not (tmp_path / "new").exists()


def test_somebody_else_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gguf(tmp_path / "Tiny.gguf")
    real = export.verify_core

    def racing(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        monkeypatch.setattr(export, "verify_core", real)
        make(source, tmp_path / "core")

    monkeypatch.setattr(export, "verify_core", racing)
    with pytest.raises(StorageError, match="model appeared while this core was made"):
        make(source, tmp_path / "core")
    verify_core(tmp_path / "core" / "Tiny-cpu.safetensors")
    assert set(contents(tmp_path / "core")) == {"Tiny-cpu.safetensors", "model/Tiny.gguf"}


def test_a_primary_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "staged").write_bytes(b"new")
    (tmp_path / "taken").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        export._appear(tmp_path / "staged", tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == b"mine"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(name.encode())
    export._appear(tmp_path / "first", tmp_path / "primary")
    with pytest.raises(FileExistsError):
        export._appear(tmp_path / "second", tmp_path / "primary")
    assert (tmp_path / "primary").read_bytes() == b"first"


SCRIPT = """
import sys
from pathlib import Path
from flare.cores import hashing
from flare.cores.export import export_core
from flare.identity import Identity

if __name__ == "__main__":
    hashing.WORTH_PROCESSES = 0
    def stage(label, total):
        print(label, flush=True)
        return lambda count: None
    export_core(Path(sys.argv[1]), Path(sys.argv[2]), revision="cpu", publisher=Identity.generate(),
                progress=stage, processes=2)
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("after", [0.0, 0.2])
def test_stopped_while_processes_digest(tmp_path: Path, stop: signal.Signals, after: float) -> None:
    source = model_folder(tmp_path / "m", shards=1)
    for number in range(4):
        with (source / f"part{number}.dat").open("wb") as file:
            file.truncate(1024 * MIB)  # holes take no disk, but their digests take a second
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", source, tmp_path / "core"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "digesting\n"
    time.sleep(after)
    os.killpg(process.pid, stop) if stop is signal.SIGINT else process.kill()
    _, complaint = process.communicate(timeout=20)
    assert process.returncode != 0
    assert not list((tmp_path / "core").glob("*.safetensors")), "no primary, no core"
    if stop is signal.SIGINT:
        assert not (tmp_path / "core").exists()
        assert complaint.count("Traceback") == 1, complaint
    else:
        wait_until_gone(process.pid)
        # What a killed export leaves is hidden and in nobody's way.
        make(gguf(tmp_path / "Tiny.gguf"), tmp_path / "core")


def wait_until_gone(session: int) -> None:
    """Wait until no process of that session is left."""
    for _ in range(100):
        fields = [
            path.read_text().rpartition(")")[2].split()
            for path in Path("/proc").glob("[0-9]*/stat")
            if path.exists()
        ]
        if not any(each[3] == str(session) and each[0] != "Z" for each in fields):
            return
        time.sleep(0.1)
    raise AssertionError("processes are left behind")


def test_hugging_face_snapshot(tmp_path: Path) -> None:
    plain = model_folder(tmp_path / "plain")
    repository = tmp_path / "hub" / "models--acme--Tiny-1B"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    path = make(snapshot, tmp_path / "core")
    assert path.name == "Tiny-1B-cpu.safetensors"
    assert contents(path.parent / "model") == contents(plain)
    assert not any(file.is_symlink() for file in path.parent.rglob("*"))


def test_an_index_that_breaks_a_rule_is_not_written(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m")
    (source / "Config.json").write_text("{}")
    with pytest.raises(CoreError, match="differ by case alone"):
        make(source, tmp_path / "core")
    assert not (tmp_path / "core").exists()


def test_config_is_optional(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    safetensors(tmp_path / "m" / "model.safetensors", {"a": (4,)})
    path = make(tmp_path / "m", tmp_path / "core")
    assert json.loads(load_primary(path).index_text)["decode_weight_bytes"] is None
