"""Keys: where they lie, who may read them, and which are none."""

from __future__ import annotations

import hashlib
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from flare.errors import IdentityError
from flare.identity import (
    _SMALL_ORDER_Y,
    Identity,
    check_public_key,
    fingerprint,
    public_key_from_hex,
    verify,
)

FIELD = 2**255 - 19


def test_made_once_then_read(tmp_path: Path) -> None:
    path = tmp_path / "agent" / "node.key"
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).public_key == made.public_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")


def test_first_uses_at_once_agree_on_one_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "flare" / "agent" / "node.key"
    start = threading.Barrier(4)
    generate = Identity.generate

    def together() -> Identity:
        start.wait(10)  # all four have seen that there is no key
        return generate()

    monkeypatch.setattr(Identity, "generate", together)
    with ThreadPoolExecutor(4) as pool:
        found = {each.public_key for each in pool.map(Identity.load_or_create, [path] * 4)}
    assert found == {Identity.load(path).public_key}
    assert list(path.parent.iterdir()) == [path]


def test_the_fingerprint_is_the_sha256_of_the_public_key() -> None:
    identity = Identity.from_seed(bytes(range(32)))
    assert identity.fingerprint == hashlib.sha256(identity.public_key).hexdigest()
    assert fingerprint(identity.public_key) == identity.fingerprint
    assert identity.fingerprint[:8] in repr(identity)


def test_signatures() -> None:
    ada, eve = Identity.generate(), Identity.generate()
    signature = ada.sign(b"message")
    assert verify(ada.public_key, signature, b"message")
    assert not verify(ada.public_key, signature, b"massage")
    assert not verify(eve.public_key, signature, b"message")
    assert not verify(ada.public_key, signature[:-1], b"message")


def test_a_key_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(b"rubbish")
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="not an unencrypted Ed25519 key"):
        Identity.load(path)
    other = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(IdentityError, match="not an unencrypted Ed25519 key"):
        Identity.load(path)


def test_a_key_that_others_can_read_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)
    assert path.read_bytes() == before


def _multiply(scalar: int, point: tuple[int, int]) -> tuple[int, int]:
    """Plain curve arithmetic (RFC 8032, section 5.1.4), to check the table by computing it."""
    d = -121665 * pow(121666, FIELD - 2, FIELD) % FIELD

    def add(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        (x1, y1), (x2, y2) = left, right
        k = d * x1 * x2 * y1 * y2 % FIELD
        return (
            (x1 * y2 + x2 * y1) * pow(1 + k, FIELD - 2, FIELD) % FIELD,
            (y1 * y2 + x1 * x2) * pow(1 - k, FIELD - 2, FIELD) % FIELD,
        )

    result = (0, 1)
    while scalar:
        if scalar & 1:
            result = add(result, point)
        point = add(point, point)
        scalar >>= 1
    return result


def _x_of(y: int) -> int | None:
    d = -121665 * pow(121666, FIELD - 2, FIELD) % FIELD
    square = (y * y - 1) * pow(d * y * y + 1, FIELD - 2, FIELD) % FIELD
    x = pow(square, (FIELD + 3) // 8, FIELD)
    if (x * x - square) % FIELD:
        x = x * pow(2, (FIELD - 1) // 4, FIELD) % FIELD
    return x if (x * x - square) % FIELD == 0 else None


def test_the_table_of_small_order_is_complete() -> None:
    group_order = 2**252 + 27742317777372353535851937790883648493
    found: set[int] = set()
    y = 2
    while len(found) < 5:
        x = _x_of(y)
        if x is not None:
            torsion = _multiply(group_order, (x, y))
            found |= {_multiply(count, torsion)[1] for count in range(8)}
        y += 1
    assert found == set(_SMALL_ORDER_Y)


@pytest.mark.parametrize("y", sorted(_SMALL_ORDER_Y))
@pytest.mark.parametrize("sign", [0, 1])
def test_keys_of_small_order_are_refused(y: int, sign: int) -> None:
    with pytest.raises(IdentityError, match="small order"):
        check_public_key((y | sign << 255).to_bytes(32, "little"))


def test_keys_that_are_not_canonical_are_refused() -> None:
    for y in (FIELD, FIELD + 1, 2**255 - 1):
        with pytest.raises(IdentityError, match="not canonical"):
            check_public_key(y.to_bytes(32, "little"))


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, "0" * 63])
def test_public_keys_in_hex(text: str) -> None:
    with pytest.raises(IdentityError, match="64 hex digits"):
        public_key_from_hex(text)


def test_a_short_public_key() -> None:
    with pytest.raises(IdentityError, match="has 32 bytes, not 3"):
        check_public_key(b"abc")
