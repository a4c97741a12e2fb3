from __future__ import annotations

import os
import re
from pathlib import Path

import click
import pytest

from flare.cli import serving
from flare.cli.run import run
from flare.cores.publisher_keys import load_trust_store
from flare.files import ensure_private_folder, write_atomic
from flare.paths import Paths
from flare.trust.publishers import PublisherProfile
from tests.cli.calling import call, live_in
from tests.cores.making import PUBLISHER, gguf_core, write_core, write_packed_core
from tests.rank.lab import KEY

ACCEPT = ("--accept-publisher", PUBLISHER.fingerprint)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no engine on it
    return live_in(tmp_path / "home", monkeypatch)


@pytest.fixture
def core(tmp_path: Path, home: Path) -> Path:
    return gguf_core(tmp_path / "made", ranks=1)


def key_file(folder: Path, data: bytes = KEY, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def test_what_the_agent_sets_and_what_does_not_exist_yet_is_not_in_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, "run", "--help")
    assert code == 0
    for word in ("--launch-key-fd", "--status-fd", "--expect-index", "--publisher-profile", "--hosts"):
        assert word not in out
    for word in ("--rank", "--rendezvous", "--rendezvous-key-file", "--insecure-rendezvous", "--port"):
        assert word in out


def test_every_serving_option_is_offered() -> None:
    offered = {name for option in run.params if isinstance(option, click.Option) for name in option.opts}
    assert set(serving._OPTIONS) <= offered


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "Say which core"),
        (("--rank", "0", "--rendezvous", "h:1"), 2, "Say which core"),
        (("core", "--rank", "1", "--rendezvous", "h:1"), 2, "Rank 1 is a peer: it receives its core"),
        (("--rank", "1"), 2, "--rank and --rendezvous belong together"),
        (("core", "--rendezvous", "h:1"), 2, "--rank and --rendezvous belong together"),
        (("--rank", "1", "--rendezvous", "h:"), 2, "a port is missing"),
        (("/gone.safetensors",), 11, "There is no core at /gone.safetensors"),
        (("org/model",), 11, "this version takes files of this machine alone. Download the model"),
        (("core", "--port", "x"), 2, "--port takes a whole number"),
        (("core", "--engine-arg=--tools"), 2, "--allow-unsafe-engine-args"),
        (("core", "--frobnicate"), 2, "No such option"),
        (
            ("--rank", "1", "--rendezvous", "h:1", "--expect-index", "zz"),
            2,
            "--expect-index takes the SHA-256",
        ),
        (("--rank", "1", "--rendezvous", "h:1", "--launch-key-fd", "99"), 2, "is no open descriptor"),
    ],
)
def test_commands_that_make_no_sense_are_explained(
    capsys: pytest.CaptureFixture[str], home: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    status, _, err = call(capsys, "run", *words)
    assert (status, message in err) == (code, True), err
    assert "Traceback" not in err


def test_a_publisher_that_nobody_accepted_is_refused_with_the_way_out(
    capsys: pytest.CaptureFixture[str], core: Path
) -> None:
    code, _, err = call(capsys, "run", str(core))
    assert code == 5
    assert (
        f"The core {core} is signed by a publisher that is not accepted here, and nobody can be asked." in err
    )
    assert f"\n  --accept-publisher {PUBLISHER.fingerprint}\n" in err


def test_a_publisher_is_accepted_once(capsys: pytest.CaptureFixture[str], core: Path) -> None:
    code, out, err = call(capsys, "run", str(core), *ACCEPT)
    assert code == 8  # the engine is missing, which comes later
    assert "Accepted the publisher" in err
    assert load_trust_store(Paths.from_environment()).accepts(PUBLISHER.fingerprint)
    code, out, err = call(capsys, "run", str(core))
    assert (code, err) == (8, "")
    assert "failed: The engine llama.cpp is not installed on this node" in out
    assert "flare engine install llama.cpp" in out


def test_ones_own_publisher_needs_no_question(capsys: pytest.CaptureFixture[str], core: Path) -> None:
    paths = Paths.from_environment()
    ensure_private_folder(paths.publisher_keys)
    key = paths.publisher_keys / "house.key"
    write_atomic(key, PUBLISHER.private_pem())
    assert call(capsys, "run", str(core))[0] == 8
    key.chmod(0o644)
    code, _, err = call(capsys, "run", str(core))
    assert code == 5
    assert f"Run `chmod 600 {key}`" in err


@pytest.mark.parametrize(("answer", "code"), [(True, 8), (False, 5)])
def test_a_person_is_asked(
    capsys: pytest.CaptureFixture[str], core: Path, monkeypatch: pytest.MonkeyPatch, answer: bool, code: int
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("flare.cli.output.confirm", lambda text: asked.append(text) or answer)
    assert call(capsys, "run", str(core))[0] == code
    assert PUBLISHER.fingerprint in asked[0]


def test_a_passed_profile_is_the_only_one_that_counts(
    capsys: pytest.CaptureFixture[str], core: Path, tmp_path: Path
) -> None:
    call(capsys, "run", str(core), *ACCEPT)
    profile = tmp_path / "profile"
    profile.write_text(PublisherProfile("other", b"\x01" * 32).to_text().replace("01" * 32, "d7" * 32))
    code, _, err = call(capsys, "run", str(core), "--publisher-profile", str(profile))
    assert code == 3, err  # its fingerprint is not its key's
    profile.write_text(PublisherProfile("me", PUBLISHER.public_key).to_text())
    assert call(capsys, "run", str(core), "--publisher-profile", str(profile))[0] == 8


@pytest.mark.parametrize(
    ("data", "mode", "message"),
    [
        (b"short", 0o600, "is no rendezvous key"),
        (b"zz" * 32, 0o600, "is no rendezvous key"),
        (KEY, 0o644, "can be read by others"),
    ],
)
def test_a_key_file_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, data: bytes, mode: int, message: str
) -> None:
    path = key_file(tmp_path, data, mode)
    words = ("--rank", "1", "--rendezvous", "h:1", "--rendezvous-key-file", path)
    code, _, err = call(capsys, "run", *words)
    assert code == 5
    assert message in err


def test_a_launch_key_of_another_length_is_refused(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"short")
    os.close(write_end)
    code, _, err = call(capsys, "run", "--rank", "1", "--rendezvous", "h:1", "--launch-key-fd", str(read_end))
    assert (code, "The launch key has 5 bytes" in err) == (2, True)


def test_two_keys_exclude_each_other(capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    path = key_file(tmp_path, KEY.hex().encode() + b"\n")
    words = ("--rank", "1", "--rendezvous", "h:1", "--rendezvous-key-file", path, "--launch-key-fd", "3")
    assert "exclude each other" in call(capsys, "run", *words)[2]


def test_cores_that_cannot_be_served_here_are_refused_at_once(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    rendezvous = ("--rank", "0", "--rendezvous", "127.0.0.1:0", "--ranks", "3")
    for path, words, code, message in (
        (gguf_core(tmp_path / "two"), (), 2, "is made for 2 ranks"),
        (gguf_core(tmp_path / "three"), rendezvous, 2, "a port is a whole number"),
        (
            gguf_core(tmp_path / "four"),
            ("--rank", "0", "--rendezvous", "h:1", "--ranks", "3"),
            6,
            "has 2 ranks",
        ),
        (write_packed_core(tmp_path / "packed", b"x" * 9), (), 8, "The engine vllm is not supported"),
        (write_core(tmp_path / "code", {"model/x.py": b""} | {"model/y": b"x"}), (), 6, "--allow-code"),
        (gguf_core(tmp_path / "five", ranks=1), ("--expect-index", "00" * 32), 6, "not the one that was"),
    ):
        status, out, err = call(capsys, "run", str(path), *ACCEPT, *words)
        assert (status, message in out + err) == (code, True), out + err
        assert "Traceback" not in err


def test_a_peer_that_finds_nobody_says_where_it_looked(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare.rank.join.MEETING_LIMIT", 0.1)
    code, out, _ = call(capsys, "run", "--rank", "1", "--rendezvous", "no.such.host.invalid:1")
    assert code == 4
    assert re.search(r"(?m)^failed: The rendezvous address no\.such\.host\.invalid cannot be resolved", out)


def test_other_systems_are_refused(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare.rank.run.sys.platform", "darwin")
    code, _, err = call(capsys, "run", "--rank", "1", "--rendezvous", "h:1")
    assert (code, "A rank runs on Linux" in err) == (14, True)


def test_a_rank_whose_starter_is_gone_does_not_begin(
    capsys: pytest.CaptureFixture[str], core: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare.system.set_parent_death_signal", lambda _: None)
    parents = iter([os.getppid(), 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    code, _, err = call(capsys, "run", str(core), "--status-fd", "1")
    assert (code, "Whoever started this rank is gone" in err) == (15, True)
