from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flare.cores import orbit_limits
from flare.cores.reference import LocalReference
from flare.errors import CoreError, NotFoundError, UnsupportedError
from flare.orbit.resolve import resolve_core, resolve_local
from tests.cores.making import write_core, write_packed_core
from tests.orbit.fake_node import client_of


def test_a_core_here_knows_its_files_and_cache_entry(tmp_path: Path) -> None:
    primary = write_core(tmp_path, {"model/a.gguf": b"a" * 5, "model/config.json": b""})
    core = resolve_local(LocalReference(str(primary)))
    assert core.source is None
    assert core.files == (
        ("tiny.safetensors", primary.stat().st_size),
        ("model/a.gguf", 5),
        ("model/config.json", 0),
    )
    assert core.entry == f"{core.primary.index.export.hex()}-{primary.stat().st_size}"
    assert core.default_name == "tiny"


def test_a_packed_core_is_one_file(tmp_path: Path) -> None:
    primary = write_packed_core(tmp_path, b"z" * 4000)
    assert resolve_local(LocalReference(str(primary))).files == ((primary.name, primary.stat().st_size),)


def test_a_relative_path_and_a_link_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    primary = write_core(tmp_path / "real", {"model/a.gguf": b"a" * 5})
    data = tmp_path / "elsewhere.gguf"
    (tmp_path / "real/model/a.gguf").rename(data)
    (tmp_path / "real/model/a.gguf").symlink_to(data)
    monkeypatch.chdir(tmp_path)
    assert resolve_local(LocalReference("real/tiny.safetensors")).path == str(primary)


def test_what_is_missing_or_changed_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no core at"):
        resolve_local(LocalReference(str(tmp_path / "none.safetensors")))
    primary = write_core(tmp_path, {"model/a.gguf": b"a" * 5})
    (tmp_path / "model/a.gguf").write_bytes(b"a" * 6)
    with pytest.raises(CoreError, match=r"The file model/a\.gguf .* has 6 bytes here, .* index says 5"):
        resolve_local(LocalReference(str(primary)))
    (tmp_path / "model/a.gguf").unlink()
    (tmp_path / "model/a.gguf").mkdir()
    with pytest.raises(CoreError, match=r"no such file is here"):
        resolve_local(LocalReference(str(primary)))
    (tmp_path / "model/a.gguf").rmdir()
    with pytest.raises(CoreError, match=r"needs the file model/a\.gguf beside it, and no such file is here"):
        resolve_local(LocalReference(str(primary)))


def test_a_core_that_no_grant_can_name_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = LocalReference(str(write_core(tmp_path, {"model/a.gguf": b"a", "model/b": b"b"})))
    client, _ = client_of(tmp_path, [])
    assert asyncio.run(resolve_core(client, reference)).files
    monkeypatch.setattr(orbit_limits, "MAX_ORBIT_FILES", 2)
    with pytest.raises(UnsupportedError, match=r"This core has 3 files, .* fewer, larger files"):
        asyncio.run(resolve_core(client, reference))


def test_a_ctrl_c_while_the_core_was_read_comes_before_any_question(tmp_path: Path) -> None:
    primary = write_core(tmp_path, {"model/a.gguf": b"a"})

    async def interrupted() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as Ctrl-C does in a running event loop
        try:
            await resolve_core(client_of(tmp_path, [])[0], LocalReference(str(primary)))
        except asyncio.CancelledError:
            return "ended"
        return "asked"

    assert asyncio.run(interrupted()) == "ended"
