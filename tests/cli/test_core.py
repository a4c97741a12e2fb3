"""`flare core`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flare.cores import orbit_limits
from flare.cores.publisher_keys import accept_publisher
from flare.files import ensure_private_folder, write_atomic
from flare.paths import Paths
from flare.trust.publishers import PublisherProfile
from tests.cli.calling import call, live_in
from tests.cores.making import PUBLISHER, gguf_core, write_core

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return live_in(tmp_path, monkeypatch)


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_core_of_a_node_is_looked_at_there(capsys: Capture, command: str) -> None:
    code, _, err = call(capsys, "core", command, "maxwell:/data/x.safetensors")
    assert code == 11
    assert "maxwell:/data/x.safetensors is on the node maxwell" in err
    assert f"Run it there: flare core {command} /data/x.safetensors" in err
    for other in ("nope.safetensors", "maxwell:x", "a b"):
        assert f"There is no core at {other}" in call(capsys, "core", command, other)[2]


def test_the_columns_are_explained(capsys: Capture, tmp_path: Path) -> None:
    shown = call(capsys, "core", "show", str(gguf_core(tmp_path)))[1]
    help_text = call(capsys, "core", "show", "--help")[1]
    (columns,) = (line.split() for line in shown.splitlines() if line.startswith("RANK"))
    assert all(column in help_text for column in columns[1:])


def test_show(capsys: Capture, tmp_path: Path) -> None:
    path = gguf_core(tmp_path)
    code, out, _ = call(capsys, "core", "show", str(path))
    assert code == 0
    shown = dict(line.split(maxsplit=1) for line in out.splitlines() if line)
    assert shown["model"] == "Tiny"
    assert shown["engine"] == "llama.cpp"
    assert shown["layout"] == "multi_host, 2 rank(s)"
    assert shown["publisher"] == "not accepted here"
    assert shown["fingerprint"] == PUBLISHER.fingerprint
    assert shown["1"].startswith("0 B"), "the second rank of llama.cpp stores nothing"
    accept_publisher(Paths.from_environment(), PublisherProfile("acme", PUBLISHER.public_key))
    assert "acme, accepted here" in call(capsys, "core", "show", str(path))[1]


def test_a_core_of_ones_own_is_accepted_before_it_was_ever_used(capsys: Capture, tmp_path: Path) -> None:
    path = gguf_core(tmp_path / "core")
    paths = Paths.from_environment()
    ensure_private_folder(paths.publisher_keys)
    write_atomic(paths.publisher_keys / "house.key", PUBLISHER.private_pem())
    out = call(capsys, "core", "show", str(path))[1]
    assert "publisher    house, your own\n" in out
    described = json.loads(call(capsys, "core", "show", str(path), "--json")[1])["publisher"]
    assert (described["accepted"], described["own"]) == (True, True)
    assert not paths.trust_store.exists()  # looking accepts nothing
    (paths.publisher_keys / "house.key").chmod(0o644)
    assert "not accepted here" in call(capsys, "core", "show", str(path))[1]


def test_show_as_json(capsys: Capture, tmp_path: Path) -> None:
    path = gguf_core(tmp_path)
    described = json.loads(call(capsys, "core", "show", str(path), "--json")[1])
    assert described["model"] == "Tiny"
    assert (described["publisher"]["accepted"], described["publisher"]["own"]) == (False, False)
    assert described["rank_bytes"] == [described["bytes"], 0]
    assert [file["path"] for file in described["files"]] == ["model/Tiny.gguf"]
    assert described["primary_bytes"] == path.stat().st_size


def test_show_tells_of_code_and_escapes_what_it_prints(capsys: Capture, tmp_path: Path) -> None:
    path = write_core(tmp_path / "evil\x1b[2J", {"model/a.py": b"x", "model/b": b"y"})
    code, out, _ = call(capsys, "core", "show", str(path))
    assert code == 0
    assert "1 file(s) that can run code when loaded, first model/a.py" in out
    assert "evil\\x1b[2J" in out
    assert "\x1b" not in out


def test_verify(capsys: Capture, tmp_path: Path) -> None:
    path = write_core(tmp_path, {"model/a": b"data"})
    code, out, _ = call(capsys, "core", "verify", str(path))
    assert code == 0
    assert f"Verified {path}: 4 B in 1 file(s), 1 blocks, 0.0 s" in out
    described = json.loads(call(capsys, "core", "verify", str(path), "--json")[1])
    assert described.pop("seconds") >= 0
    assert described == {"verified": True, "files": 1, "blocks": 1, "bytes": 4}
    (tmp_path / "model" / "a").write_bytes(b"date")
    code, _, err = call(capsys, "core", "verify", str(path))
    assert code == 6
    assert 'block 0 of "model/a"' in err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_no_core(capsys: Capture, tmp_path: Path, command: str) -> None:
    code, _, err = call(capsys, "core", command, str(tmp_path / "none"))
    assert code == 11
    assert "There is no core at" in err


@pytest.mark.parametrize(
    "words", [("core", "show"), ("core", "verify"), ("ignition", "export", "--revision", "cpu", "-o", "out")]
)
def test_a_file_that_cannot_be_read_is_no_fault_of_the_words(
    words: tuple[str, ...], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "closed.safetensors"
    path.write_bytes(b"")
    monkeypatch.setattr("os.access", lambda *_words, **_more: False)
    code, _, err = call(capsys, *words, str(path))
    assert code not in (0, 2)
    assert "Usage:" not in err


def test_a_core_that_no_grant_can_name_is_verified_with_a_warning(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_core(tmp_path)
    monkeypatch.setattr(orbit_limits, "MAX_ORBIT_FILES", 1)
    code, out, err = call(capsys, "core", "verify", str(path))
    assert (code, out[:8]) == (0, "Verified")
    assert "This core has 2 files" in err
