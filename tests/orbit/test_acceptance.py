from __future__ import annotations

from pathlib import Path

import pytest

from flare.cores.publisher_keys import create_publisher, load_trust_store
from flare.cores.reference import LocalReference
from flare.errors import ConfigError, NotFoundError, TrustError
from flare.files import ensure_private_folder, write_atomic
from flare.orbit.acceptance import accept_publisher, preview_publisher, read_profile
from flare.orbit.controller import Controller
from flare.orbit.resolve import Core, resolve_local
from flare.paths import Paths
from flare.trust.publishers import PublisherProfile
from tests.cores.making import PUBLISHER, write_core
from tests.orbit.reporting import RecordingReporter


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.from_environment({"HOME": str(tmp_path)})


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return resolve_local(LocalReference(str(write_core(tmp_path / "core", {"model/a.gguf": b"a"}))))


def test_a_person_is_asked_once(paths: Paths, core: Core) -> None:
    first = RecordingReporter(answer=True)
    profile = accept_publisher(Controller.open(paths, first), core, trust_store=None)
    assert profile.public_key == PUBLISHER.public_key
    assert PUBLISHER.fingerprint in first.questions[0]
    second = RecordingReporter(answer=None)
    assert accept_publisher(Controller.open(paths, second), core, trust_store=None) == profile
    assert second.questions == []


def test_no_means_no(paths: Paths, core: Core) -> None:
    controller = Controller.open(paths, RecordingReporter(answer=False))
    with pytest.raises(TrustError, match="was not accepted, so nothing was started"):
        accept_publisher(controller, core, trust_store=None)
    assert not paths.trust_store.exists()


def test_without_a_terminal_the_message_has_the_exact_option(paths: Paths, core: Core) -> None:
    controller = Controller.open(paths, RecordingReporter(answer=None))
    with pytest.raises(TrustError) as caught:
        accept_publisher(controller, core, trust_store=None)
    option = f"--accept-publisher {PUBLISHER.fingerprint}"
    assert caught.value.message.endswith(option)
    accept_publisher(controller, core, trust_store=None, accepted=option.split()[1].upper())
    accept_publisher(controller, core, trust_store=None)


def test_another_fingerprint_accepts_nothing(paths: Paths, core: Core) -> None:
    controller = Controller.open(paths, RecordingReporter(answer=True))
    with pytest.raises(TrustError, match="Nothing was accepted"):
        accept_publisher(controller, core, trust_store=None, accepted="ab" * 32)


def test_a_trust_store_of_its_own_and_a_profile_of_the_launch(
    paths: Paths, core: Core, tmp_path: Path
) -> None:
    controller = Controller.open(paths, RecordingReporter(answer=None))
    store = tmp_path / "elsewhere/trust.toml"
    accept_publisher(controller, core, trust_store=store, accepted=PUBLISHER.fingerprint)
    assert store.exists()
    assert not paths.trust_store.exists()
    profile = PublisherProfile("house", PUBLISHER.public_key)
    file = tmp_path / "house.toml"
    file.write_text(profile.to_text())
    assert accept_publisher(controller, core, trust_store=None, profiles=[file]) == profile
    assert not paths.trust_store.exists()


def test_ones_own_publisher_needs_no_question(paths: Paths, core: Core) -> None:
    reporter = RecordingReporter(answer=None)
    controller = Controller.open(paths, reporter)
    ensure_private_folder(paths.publisher_keys)
    write_atomic(paths.publisher_keys / "house.key", PUBLISHER.private_pem())
    create_publisher(paths, "another")
    profile = PublisherProfile("house", PUBLISHER.public_key)
    assert preview_publisher(controller, core, trust_store=None) == (profile, True)
    assert not paths.trust_store.exists()
    for _ in range(2):
        assert accept_publisher(controller, core, trust_store=None) == profile
    assert load_trust_store(paths).find(PUBLISHER.fingerprint) == profile
    assert reporter.notes == [f"Accepted your own publisher house: its key lies in {paths.publisher_keys}."]
    assert reporter.questions == []


def test_a_key_that_others_can_read_proves_nothing(paths: Paths, core: Core) -> None:
    ensure_private_folder(paths.publisher_keys)
    write_atomic(paths.publisher_keys / "house.key", PUBLISHER.private_pem(), mode=0o644)
    reporter = RecordingReporter()
    with pytest.raises(TrustError, match="nobody can be asked"):
        accept_publisher(Controller.open(paths, reporter), core, trust_store=None)
    [warning] = reporter.warnings  # the way out is not to accept a stranger, but to close the file
    assert f"can be read by others (mode 0644). Run `chmod 600 {paths.publisher_keys}/house.key`" in warning


def test_a_dry_run_asks_nobody(paths: Paths, core: Core) -> None:
    reporter = RecordingReporter(answer=True)
    profile, accepted = preview_publisher(Controller.open(paths, reporter), core, trust_store=None)
    assert (profile.public_key, accepted) == (PUBLISHER.public_key, False)
    assert reporter.questions == []
    assert f"--accept-publisher {PUBLISHER.fingerprint}" in reporter.notes[0]
    assert not paths.trust_store.exists()


def test_a_preview_records_nothing_that_is_named(paths: Paths, core: Core) -> None:
    reporter = RecordingReporter(answer=None)
    controller = Controller.open(paths, reporter)
    named = PUBLISHER.fingerprint.upper()
    profile, accepted = preview_publisher(controller, core, trust_store=None, accepted=named)
    assert (profile.public_key, accepted) == (PUBLISHER.public_key, True)
    assert reporter.notes == [
        f"A run accepts the publisher {PUBLISHER.fingerprint}; a dry run records nothing."
    ]
    with pytest.raises(TrustError, match="Nothing was accepted"):
        preview_publisher(controller, core, trust_store=None, accepted="ab" * 32)
    assert not paths.trust_store.exists()


def test_a_profile_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"The publisher profile .* does not exist"):
        read_profile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_profile(tmp_path / "bytes")
