from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.errors import ConfigError
from flare.identity import Identity
from flare.trust.publishers import PublisherProfile, TrustStore

ACME = PublisherProfile("acme", Identity.from_seed(b"\x01" * 32).public_key)
OTHER = PublisherProfile("other", Identity.from_seed(b"\x02" * 32).public_key)


def test_a_profile_comes_back() -> None:
    assert PublisherProfile.from_text(ACME.to_text()) == ACME
    assert ACME.fingerprint == hashlib.sha256(ACME.public_key).hexdigest()
    assert ACME.fingerprint in ACME.to_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "The publisher profile is not TOML"),
        ("a = " + "[" * 5000, "The publisher profile is not TOML"),
        ("", 'The publisher profile needs a "name" and a "public_key"'),
        ('name = "x"', 'needs a "name" and a "public_key"'),
        (f'name = 1\npublic_key = "{"00" * 32}"', 'needs a "name" and a "public_key"'),
        (f'name = "a b"\npublic_key = "{ACME.public_key.hex()}"', '"a b" is no publisher name'),
        ('name = "a"\npublic_key = "xyz"', "The publisher profile: A public key is written as 64 hex digits"),
        (f'name = "a"\npublic_key = "{"00" * 32}"', "not a sound Ed25519 key"),
        (
            ACME.to_text().replace(ACME.fingerprint, OTHER.fingerprint),
            "The publisher profile of acme states a fingerprint that is not its key's",
        ),
    ],
)
def test_what_is_no_profile(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PublisherProfile.from_text(text)
    assert message in caught.value.message


def test_a_trust_store_grows_and_comes_back() -> None:
    store = TrustStore()
    assert not store.accepts(ACME.fingerprint)
    store = store.with_accepted(ACME).with_accepted(OTHER).with_accepted(ACME)
    assert store.publishers == (ACME, OTHER)
    assert TrustStore.from_text(store.to_text()) == store
    assert TrustStore.from_text("") == TrustStore()
    assert store.find(OTHER.fingerprint) == OTHER
    assert store.find("00" * 32) is None


def test_two_publishers_may_have_one_name() -> None:
    twin = PublisherProfile("acme", OTHER.public_key)
    store = TrustStore((ACME,)).with_accepted(twin)
    assert [store.accepts(each.fingerprint) for each in (ACME, twin)] == [True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[", "The trust store is not TOML"),
        ("publisher = 1", r'needs its publishers as "\[\[publisher\]\]" tables'),
        ("publisher = [1]", r'needs its publishers as "\[\[publisher\]\]" tables'),
        ('[[publisher]]\nname = "a"', 'The trust store, publisher 0 needs a "name"'),
    ],
)
def test_what_is_no_trust_store(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrustStore.from_text(text)


@given(st.text(max_size=60))
def test_parse_it_or_config_error(text: str) -> None:
    for parse in (PublisherProfile.from_text, TrustStore.from_text):
        try:
            parse(text)
        except ConfigError:
            continue
