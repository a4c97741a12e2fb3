from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_workers import cipher
from flare_workers.cipher import COUNTER_LIMIT, MAX_PLAINTEXT, MAX_RECORD, CipherError, RecordCipher
from tests.workers import parts

KEY = bytes(range(0x80, 0xA0))


def test_a_record_is_what_the_rfc_says() -> None:
    # RFC 8439 in plain Python: an implementation that shares nothing with the library.
    plaintext = bytes(100)
    record = RecordCipher(KEY, 0x0102030405060708).seal(plaintext)
    nonce = bytes(4) + (0x0102030405060708).to_bytes(8, "little")
    keystream = b"".join(chacha20_block(KEY, counter, nonce) for counter in (1, 2))
    assert record[2 : 2 + 100] == keystream[:100]
    one_time_key = chacha20_block(KEY, 0, nonce)[:32]
    assert record[:2] == (100 + 16).to_bytes(2, "big")
    lengths = bytes(8) + (100).to_bytes(8, "little")
    assert record[102:] == poly1305(one_time_key, record[2:102] + bytes(12) + lengths)


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    def words(data: bytes) -> list[int]:
        return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]

    def rotate(value: int, count: int) -> int:
        return ((value << count) | (value >> (32 - count))) & 0xFFFFFFFF

    start = [*words(b"expand 32-byte k"), *words(key), counter, *words(nonce)]
    state = list(start)
    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for a, b, c, d in (columns + diagonals) * 10:
        for first, second, third, count in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[first] = (state[first] + state[second]) & 0xFFFFFFFF
            state[third] = rotate(state[third] ^ state[first], count)
    return b"".join(
        ((now + before) & 0xFFFFFFFF).to_bytes(4, "little") for now, before in zip(state, start, strict=True)
    )


def poly1305(key: bytes, message: bytes) -> bytes:
    r = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    total = 0
    for start in range(0, len(message), 16):
        total = (total + int.from_bytes(message[start : start + 16] + b"\x01", "little")) * r % (2**130 - 5)
    return ((total + int.from_bytes(key[16:], "little")) % 2**128).to_bytes(16, "little")


@pytest.mark.parametrize("into", [True, False])
@given(plaintext=st.binary(min_size=1, max_size=500), counter=st.integers(0, COUNTER_LIMIT - 1))
def test_every_way_gives_the_same_bytes(into: bool, plaintext: bytes, counter: int) -> None:
    before = cipher._HAS_INTO
    cipher._HAS_INTO = into and before
    try:
        record = RecordCipher(KEY, counter).seal(plaintext)
        buffer = memoryview(bytearray(len(plaintext) + 30))
        assert RecordCipher(KEY, counter).seal_into(memoryview(plaintext), buffer) == len(record)
        assert bytes(buffer[: len(record)]) == record == parts.seal(plaintext, counter, KEY)
        assert RecordCipher(KEY, counter).open(record[2:]) == plaintext
        opened = RecordCipher(KEY, counter)
        assert opened.open_into(memoryview(record)[2:], buffer) == len(plaintext)
        assert bytes(buffer[: len(plaintext)]) == plaintext
        assert opened.counter == counter + 1
    finally:
        cipher._HAS_INTO = before


def test_counters_follow_each_other() -> None:
    sealer, opener = RecordCipher(KEY), RecordCipher(KEY)
    records = [sealer.seal(b"same") for _ in range(3)]
    assert len(set(records)) == 3
    assert [opener.open(record[2:]) for record in records] == [b"same"] * 3
    assert sealer.counter == opener.counter == 3


def test_the_longest_record() -> None:
    record = RecordCipher(KEY).seal(bytes(MAX_PLAINTEXT))
    assert len(record) == MAX_RECORD == 65537
    assert RecordCipher(KEY).open(record[2:]) == bytes(MAX_PLAINTEXT)


@pytest.mark.parametrize("flaw", ["bit", "counter", "key", "cut"])
def test_a_record_that_does_not_open_ends_the_direction(flaw: str) -> None:
    ciphertext = bytearray(RecordCipher(KEY).seal(b"weights")[2:])
    opener = RecordCipher(bytes(32) if flaw == "key" else KEY, 1 if flaw == "counter" else 0)
    if flaw == "bit":
        ciphertext[3] ^= 1
    if flaw == "cut":
        del ciphertext[-1]
    with pytest.raises(CipherError, match="does not open: it was altered or belongs elsewhere"):
        opener.open(bytes(ciphertext))
    with pytest.raises(CipherError, match="given away or its session ended"):
        opener.open_into(memoryview(ciphertext), memoryview(bytearray(100)))
    with pytest.raises(CipherError, match="given away"):
        _ = opener.key


def test_open_into_refuses_what_was_altered() -> None:
    record = bytearray(RecordCipher(KEY).seal(b"weights"))
    record[-1] ^= 1
    with pytest.raises(CipherError, match="record 0 does not open"):
        RecordCipher(KEY).open_into(memoryview(record)[2:], memoryview(bytearray(100)))


def test_a_counter_never_wraps() -> None:
    sealer = RecordCipher(KEY, COUNTER_LIMIT - 1)
    record = sealer.seal(b"last")
    for use in (lambda: sealer.seal(b"one more"), lambda: RecordCipher(KEY, COUNTER_LIMIT).open(record[2:])):
        with pytest.raises(CipherError, match="the record counter would wrap"):
            use()


def test_closing_forgets_the_key() -> None:
    sealer = RecordCipher(KEY, 3)
    assert sealer.key == KEY
    assert repr(sealer) == "<RecordCipher counter=3>"
    sealer.close()
    assert repr(sealer) == "<RecordCipher counter=3 closed>"
    with pytest.raises(CipherError, match="given away"):
        sealer.seal(b"x")


def test_sizes_are_checked() -> None:
    sealer = RecordCipher(KEY)
    for size in (0, MAX_PLAINTEXT + 1):
        with pytest.raises(CipherError, match=f"a record carries 1 to 65519 bytes, not {size}"):
            sealer.seal(bytes(size))
        with pytest.raises(CipherError, match="a record carries"):
            sealer.seal_into(memoryview(bytes(size)), memoryview(bytearray(MAX_RECORD)))
    for size in (16, 65536):
        with pytest.raises(CipherError, match=f"17 to 65535 bytes, not {size}"):
            sealer.open(bytes(size))
        with pytest.raises(CipherError, match="17 to 65535"):
            sealer.open_into(memoryview(bytes(size)), memoryview(bytearray(MAX_RECORD)))
    with pytest.raises(CipherError, match="a record of 28 bytes does not fit a buffer of 27"):
        sealer.seal_into(memoryview(bytes(10)), memoryview(bytearray(27)))
    with pytest.raises(CipherError, match="10 bytes of plaintext do not fit a buffer of 9"):
        sealer.open_into(memoryview(bytes(26)), memoryview(bytearray(9)))
    assert sealer.counter == 0


def test_keys_and_counters_are_checked() -> None:
    with pytest.raises(CipherError, match="a record key has 32 bytes, not 31"):
        RecordCipher(bytes(31))
    for counter in (-1, 2**64):
        with pytest.raises(CipherError, match="a record counter is at least 0"):
            RecordCipher(KEY, counter)
