"""`flare publisher`."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from flare.cores.publisher_keys import load_trust_store
from flare.identity import Identity
from flare.paths import Paths
from flare.trust.publishers import PublisherProfile
from tests.cli.calling import call, live_in

Capture = pytest.CaptureFixture[str]
ACME = PublisherProfile("acme", Identity.from_seed(b"\x01" * 32).public_key)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return live_in(tmp_path, monkeypatch)


def profile_file(folder: Path) -> str:
    (folder / "acme.toml").write_text(ACME.to_text())
    return str(folder / "acme.toml")


def accepted() -> bool:
    return load_trust_store(Paths.from_environment()).accepts(ACME.fingerprint)


def test_create_and_show(capsys: Capture) -> None:
    code, out, err = call(capsys, "publisher", "create", "acme")
    assert code == 0
    assert "Created the publisher acme." in out
    assert "keep a backup" in err
    code, out, _ = call(capsys, "publisher", "show")
    assert code == 0
    profile = PublisherProfile.from_text(out)
    assert profile.name == "acme"
    code, out, _ = call(capsys, "publisher", "show", "acme", "--json")
    assert json.loads(out) == {
        "name": "acme",
        "public_key": profile.public_key.hex(),
        "fingerprint": profile.fingerprint,
    }
    code, _, err = call(capsys, "publisher", "create", "acme")
    assert code == 9
    assert "There is a publisher acme already" in err


def test_show_without_one_says_how_to_make_it(capsys: Capture) -> None:
    code, _, err = call(capsys, "publisher", "show")
    assert code == 11
    assert "flare publisher create NAME" in err


def test_accept_a_file_with_its_fingerprint(capsys: Capture, tmp_path: Path) -> None:
    path = profile_file(tmp_path)
    code, out, _ = call(capsys, "publisher", "accept", path, "--fingerprint", ACME.fingerprint.upper())
    assert (code, out) == (0, "Accepted the publisher acme.\n")
    assert accepted()
    code, out, _ = call(capsys, "publisher", "accept", path, "--yes")
    assert (code, out) == (0, "The publisher acme was accepted already.\n")


def test_accept_from_standard_input(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ACME.to_text().encode())))
    assert call(capsys, "publisher", "accept", "--yes")[0] == 0
    assert accepted()


def test_another_fingerprint_is_refused(capsys: Capture, tmp_path: Path) -> None:
    code, _, err = call(capsys, "publisher", "accept", profile_file(tmp_path), "--fingerprint", "00" * 32)
    assert code == 5
    assert f"has the fingerprint {ACME.fingerprint}, not the one that you gave" in err
    assert not accepted()


def test_where_nobody_can_be_asked_the_fingerprint_must_be_given(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, _, err = call(capsys, "publisher", "accept", profile_file(tmp_path))
    assert code == 2
    assert f"give --fingerprint {ACME.fingerprint}" in err
    assert not accepted()


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff", "not UTF-8"), (b"x", "not TOML"), (b" " * 5000, "larger")]
)
def test_what_is_no_profile(capsys: Capture, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "profile").write_bytes(content)
    code, _, err = call(capsys, "publisher", "accept", str(tmp_path / "profile"), "--yes")
    assert code == 3
    assert message in err


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 5), (b"\n", 5)])
def test_a_person_is_asked(tmp_path: Path, answer: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "flare", "publisher", "accept", profile_file(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ,
    )
    os.close(theirs)
    shown = b""
    while b"Accept it?" not in shown:
        assert select.select([ours], [], [], 20)[0]
        shown += os.read(ours, 4096)
    assert ACME.fingerprint.encode() in shown
    os.write(ours, answer)
    assert process.wait(20) == code
    os.close(ours)
    assert accepted() is (code == 0)


def test_list(capsys: Capture, tmp_path: Path) -> None:
    assert "No publishers yet" in call(capsys, "publisher", "list")[1]
    call(capsys, "publisher", "create", "mine")
    call(capsys, "publisher", "accept", profile_file(tmp_path), "--yes")
    code, out, _ = call(capsys, "publisher", "list")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["NAME", "KEY", "ACCEPTED", "FINGERPRINT"]
    assert rows[1][:3] == ["mine", "own", "yes"]
    assert rows[2] == ["acme", "other", "yes", ACME.fingerprint]
    listed = json.loads(call(capsys, "publisher", "list", "--json")[1])
    assert [each["name"] for each in listed["own"]] == ["mine"]
    assert [each["name"] for each in listed["accepted"]] == ["acme"]
