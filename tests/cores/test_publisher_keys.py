from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flare.cores.publisher_keys import (
    accept_publisher,
    create_publisher,
    load_publisher,
    load_trust_store,
    publisher_names,
)
from flare.errors import ConfigError, IdentityError, NotFoundError, StorageError, UsageError
from flare.identity import Identity
from flare.paths import Paths
from flare.trust.publishers import PublisherProfile


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.from_environment({"HOME": str(tmp_path)})


def test_a_publishers_key_is_its_owners_alone(paths: Paths) -> None:
    created = create_publisher(paths, "acme")
    path = paths.publisher_keys / "acme.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(paths.publisher_keys.stat().st_mode) == 0o700
    assert load_publisher(paths, "acme")[1].public_key == created.public_key
    path.chmod(0o644)
    with pytest.raises(IdentityError, match="can be read by others"):
        load_publisher(paths, "acme")


def test_a_publisher_is_not_replaced(paths: Paths) -> None:
    create_publisher(paths, "acme")
    with pytest.raises(StorageError, match="There is a publisher acme already"):
        create_publisher(paths, "acme")


def test_of_two_that_make_a_publisher_one_is_refused(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Barrier(2)
    generate = Identity.generate

    def together() -> Identity:
        start.wait(10)
        return generate()

    def create(_: int) -> bytes | None:
        try:
            return create_publisher(paths, "acme").public_key
        except StorageError:
            return None

    monkeypatch.setattr(Identity, "generate", together)
    with ThreadPoolExecutor(2) as pool:
        made = [key for key in pool.map(create, range(2)) if key is not None]
    assert made == [load_publisher(paths, "acme")[1].public_key]


def test_publishers_accepted_at_once_are_all_kept(paths: Paths) -> None:
    profiles = [PublisherProfile(f"p{number}", Identity.generate().public_key) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda profile: accept_publisher(paths, profile), profiles))
    assert {each.name for each in load_trust_store(paths).publishers} == {each.name for each in profiles}


def test_a_trust_store_that_others_can_write_is_refused(paths: Paths) -> None:
    accept_publisher(paths, PublisherProfile("acme", Identity.generate().public_key))
    paths.trust_store.chmod(0o666)
    with pytest.raises(ConfigError, match="can be changed by others"):
        load_trust_store(paths)


@pytest.mark.parametrize("name", ["", "../acme", "a b", ".hidden"])
def test_names(paths: Paths, name: str) -> None:
    with pytest.raises(UsageError, match="is no publisher name"):
        create_publisher(paths, name)
    create_publisher(paths, "acme")
    with pytest.raises(NotFoundError, match="There is no publisher"):
        load_publisher(paths, name)


def test_which_publisher(paths: Paths) -> None:
    with pytest.raises(NotFoundError, match=r"There is no publisher yet.*flare publisher create NAME"):
        load_publisher(paths, None)
    with pytest.raises(NotFoundError, match=r"There is no publisher acme.*flare publisher create NAME"):
        load_publisher(paths, "acme")
    acme = create_publisher(paths, "acme")
    name, found = load_publisher(paths, None)
    assert (name, found.public_key) == ("acme", acme.public_key)
    create_publisher(paths, "other")
    assert publisher_names(paths) == ["acme", "other"]
    with pytest.raises(UsageError, match="There are several publishers: acme, other"):
        load_publisher(paths, None)
    with pytest.raises(NotFoundError, match=r"There is no publisher third. There are acme, other"):
        load_publisher(paths, "third")


def test_acceptance_is_kept(paths: Paths) -> None:
    profile = PublisherProfile("acme", Identity.generate().public_key)
    assert load_trust_store(paths).publishers == ()
    assert accept_publisher(paths, profile) is True
    assert accept_publisher(paths, profile) is False
    assert load_trust_store(paths).publishers == (profile,)


def test_another_trust_store(paths: Paths, tmp_path: Path) -> None:
    profile = PublisherProfile("acme", Identity.generate().public_key)
    other = tmp_path / "folder" / "trust.toml"
    assert accept_publisher(paths, profile, other) is True
    assert load_trust_store(paths, other).publishers == (profile,)
    assert load_trust_store(paths).publishers == ()


@pytest.mark.parametrize(("content", "message"), [(b"\xff", "is not UTF-8 text"), (b"[[", "is not TOML")])
def test_a_damaged_trust_store_is_named_and_kept(paths: Paths, content: bytes, message: str) -> None:
    paths.config.mkdir(mode=0o700, parents=True)
    paths.trust_store.write_bytes(content)
    profile = PublisherProfile("acme", Identity.generate().public_key)
    for attempt in (lambda: load_trust_store(paths), lambda: accept_publisher(paths, profile)):
        with pytest.raises(ConfigError, match=f"trust.toml.*{message}"):
            attempt()
    assert paths.trust_store.read_bytes() == content
