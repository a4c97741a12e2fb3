"""The frame parser: every frame three ways, every limit, every refusal, and any input whatever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import ForbiddenError, LocalProtocolError, RemoteProtocolError
from flare.wire.frames import (
    BODY_LIMITS,
    HEADER_LENGTH,
    MAX_JSON,
    MAX_REPORT,
    MIB,
    DataPiece,
    DataStart,
    Event,
    Frame,
    FrameParser,
    Tag,
    encode_frame,
    encode_header,
    seal,
)
from flare.wire.messages import Message
from flare_workers.cipher import MAX_PLAINTEXT, MAX_RECORD, RecordCipher
from tests.vectors.examples import EXAMPLES

KEY = bytes(range(32))


def pair() -> tuple[RecordCipher, FrameParser]:
    """What seals, and the parser of what it sealed."""
    return RecordCipher(KEY), FrameParser(RecordCipher(KEY))


def events(parser: FrameParser) -> list[Event]:
    found = []
    while (event := parser.next_event()) is not None:
        found.append(event)
    return found


# Three ways


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_frame_at_once(message: Message) -> None:
    cipher, parser = pair()
    parser.feed(seal(cipher, message.to_frame()))
    assert events(parser) == [Frame(message.TAG, message.to_body())]
    assert parser.between_frames
    parser.end_of_stream()


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_frame_byte_by_byte(message: Message) -> None:
    cipher, parser = pair()
    sealed = seal(cipher, message.to_frame())
    for position in range(len(sealed) - 1):
        parser.feed(sealed[position : position + 1])
        assert parser.next_event() is None
    parser.feed(sealed[-1:])
    assert events(parser) == [Frame(message.TAG, message.to_body())]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_follows_a_frame_stays_unopened(message: Message) -> None:
    cipher, parser = pair()
    following = b""
    sealed = seal(cipher, message.to_frame())
    following = seal(cipher, encode_frame(Tag.LOG, b"{}"))
    parser.feed(sealed + following)
    assert parser.next_event() == Frame(message.TAG, message.to_body())
    assert parser.unopened() == following
    assert parser.between_frames


@pytest.mark.parametrize("size", [0, 1, 5, MAX_PLAINTEXT - HEADER_LENGTH, MAX_PLAINTEXT, 3 * MAX_PLAINTEXT])
def test_data_of_every_size(size: int) -> None:
    cipher, parser = pair()
    body = bytes(size)
    parser.feed(seal(cipher, encode_header(Tag.DATA, size) + body))
    found = events(parser)
    assert found[0] == DataStart(size)
    pieces = [event for event in found[1:] if isinstance(event, DataPiece)]
    assert b"".join(piece.data for piece in pieces) == body
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    assert parser.between_frames


def test_data_with_its_header_alone_in_a_record() -> None:
    cipher, parser = pair()
    parser.feed(cipher.seal(encode_header(Tag.DATA, 3)) + cipher.seal(b"ab") + cipher.seal(b"c"))
    assert events(parser) == [DataStart(3), DataPiece(b"ab", last=False), DataPiece(b"c", last=True)]


def test_a_body_may_be_cut_anywhere() -> None:
    cipher, parser = pair()
    frame = encode_frame(Tag.STATUS, b'{"toward":"10.0.0.1"}')
    parser.feed(cipher.seal(frame[:HEADER_LENGTH]))
    for byte in frame[HEADER_LENGTH:]:
        parser.feed(cipher.seal(bytes((byte,))))
    assert events(parser) == [Frame(Tag.STATUS, frame[HEADER_LENGTH:])]


def test_receiving_in_place() -> None:
    cipher, parser = pair()
    body = b" " * (2 * MAX_PLAINTEXT)
    sealed = memoryview(seal(cipher, encode_frame(Tag.STATUS, body)))
    found: list[Event] = []
    while sealed or not found:
        with parser.room() as room:
            assert room  # never without space while a frame is incomplete
            count = min(len(room), len(sealed), 50_000)
            room[:count] = sealed[:count]
        parser.received(count)
        sealed = sealed[count:]
        found += events(parser)
    assert found == [Frame(Tag.STATUS, body)]


def test_the_buffer_stays_at_one_record() -> None:
    cipher, parser = pair()
    parser.feed(seal(cipher, encode_header(Tag.DATA, 2 * MIB)))
    assert events(parser) == [DataStart(2 * MIB)]
    for _ in range(2 * MIB // 32_768):
        record = cipher.seal(bytes(32_768))
        with parser.room() as room:
            room[: len(record)] = record
        parser.received(len(record))
        events(parser)
    assert len(parser._buffer) == MAX_RECORD


def test_more_than_there_was_room_for_is_our_own_bug() -> None:
    _, parser = pair()
    with pytest.raises(LocalProtocolError, match="cannot have been received"):
        parser.received(MAX_RECORD + 1)


def test_ciphertext_from_a_handover_comes_first() -> None:
    cipher = RecordCipher(KEY)
    sealed = seal(cipher, encode_frame(Tag.EXIT, b"{}"))
    opener = RecordCipher(KEY)
    parser = FrameParser(opener, ciphertext=sealed[:7])
    parser.feed(sealed[7:])
    assert events(parser) == [Frame(Tag.EXIT, b"{}")]
    assert opener.counter == 1


# Limits


@pytest.mark.parametrize("tag", [tag for tag in Tag if tag is not Tag.DATA])
def test_the_longest_body_of_each_tag(tag: Tag) -> None:
    cipher, parser = pair()
    parser.feed(cipher.seal(encode_header(tag, BODY_LIMITS[tag])))
    assert events(parser) == []
    cipher, parser = pair()
    parser.feed(cipher.seal(encode_header(tag, BODY_LIMITS[tag] + 1)))
    with pytest.raises(RemoteProtocolError, match=f"{tag.name} announces .* at most"):
        parser.next_event()


def test_the_limits_are_the_pages() -> None:
    kib, mib = 1024, 1024 * 1024
    assert BODY_LIMITS[Tag.HELLO] == BODY_LIMITS[Tag.PAIR] == 64 * kib
    large = {Tag.TRANSFER, Tag.FETCH, Tag.FETCH_FABRIC, Tag.RUN, Tag.STATUS, Tag.METRICS}
    assert {tag for tag in Tag if BODY_LIMITS[tag] == 4 * mib} == large
    ordinary = set(Tag) - large - {Tag.HELLO, Tag.PAIR, Tag.DATA}
    assert {BODY_LIMITS[tag] for tag in ordinary} == {mib}


def test_a_tag_that_is_not_expected_is_refused_by_its_header() -> None:
    cipher, parser = pair()
    parser.allowed = {Tag.OK: MAX_REPORT, Tag.ERROR: MAX_JSON}
    parser.feed(cipher.seal(encode_header(Tag.STATUS, 10)))
    with pytest.raises(RemoteProtocolError, match="STATUS came where ERROR or OK was expected"):
        parser.next_event()


def test_an_announced_body_costs_nothing_until_it_comes() -> None:
    cipher, parser = pair()
    parser.feed(cipher.seal(encode_header(Tag.RUN, 4 * MIB)))
    assert parser.next_event() is None
    assert len(parser._body) == 0


# Refusals


def refused(plaintexts: list[bytes], sentence: str) -> None:
    cipher, parser = pair()
    for plaintext in plaintexts:
        parser.feed(cipher.seal(plaintext))
    with pytest.raises(RemoteProtocolError, match=sentence):
        events(parser)
    with pytest.raises(RemoteProtocolError, match=sentence):  # it sticks
        parser.next_event()
    with pytest.raises(RemoteProtocolError, match=sentence):
        parser.end_of_stream()
    assert not parser.between_frames


def test_an_unknown_tag() -> None:
    refused([b"\x00" + bytes(8)], "unknown tag 0")
    refused([b"\x1a" + bytes(8)], "unknown tag 26")


def test_a_header_in_two_records() -> None:
    refused([b"\x14" + bytes(4)], "header does not fit into the record")


def test_two_frames_in_one_record() -> None:
    refused(
        [encode_frame(Tag.STATUS, b"{}") + encode_frame(Tag.STATUS, b"{}")], "STATUS has bytes after its end"
    )
    refused([encode_header(Tag.STATUS, 4) + b"{}", b"  x"], "STATUS has bytes after its end")


def test_bytes_after_the_end_of_data() -> None:
    refused([encode_header(Tag.DATA, 1) + b"ab"], "DATA has bytes after its end")
    refused([encode_header(Tag.DATA, 3) + b"ab", b"cd"], "DATA has bytes after its end")


def test_a_record_that_was_changed() -> None:
    cipher, parser = pair()
    sealed = bytearray(seal(cipher, encode_frame(Tag.STATUS, b"{}")))
    sealed[5] ^= 1
    parser.feed(sealed)
    with pytest.raises(RemoteProtocolError, match="does not open"):
        parser.next_event()


def test_a_record_that_is_repeated() -> None:
    cipher, parser = pair()
    sealed = seal(cipher, encode_frame(Tag.STATUS, b"{}"))
    parser.feed(sealed + sealed)
    assert isinstance(parser.next_event(), Frame)
    with pytest.raises(RemoteProtocolError, match="does not open"):
        parser.next_event()


@pytest.mark.parametrize("length", range(17))
def test_a_record_without_a_byte_in_it(length: int) -> None:
    _, parser = pair()
    parser.feed(length.to_bytes(2, "big") + bytes(length))
    with pytest.raises(RemoteProtocolError, match=f"record of {length} bytes came; the shortest has 17"):
        parser.next_event()


def test_the_end_inside_a_record() -> None:
    cipher, parser = pair()
    parser.feed(seal(cipher, encode_frame(Tag.STATUS, b"{}"))[:-1])
    assert parser.next_event() is None
    with pytest.raises(RemoteProtocolError, match="ended inside a record"):
        parser.end_of_stream()


def test_the_end_inside_a_frame() -> None:
    cipher, parser = pair()
    parser.feed(cipher.seal(encode_header(Tag.DATA, 10) + b"abc"))
    events(parser)
    with pytest.raises(RemoteProtocolError, match="ended inside a frame: DATA lacks 7 bytes"):
        parser.end_of_stream()


def test_a_body_of_ours_that_is_too_long() -> None:
    with pytest.raises(LocalProtocolError, match="HELLO of 65537 bytes"):
        encode_frame(Tag.HELLO, bytes(65_537))


# Any input whatever


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_any_bytes_give_a_remote_protocol_error_or_nothing(pieces: list[bytes]) -> None:
    _, parser = pair()
    try:
        for piece in pieces:
            parser.feed(piece)
            assert parser.next_event() is None  # nothing opens under a key that nobody else has
        parser.end_of_stream()
    except RemoteProtocolError:
        pass


HEADERS = st.builds(
    lambda tag, length: bytes((tag,)) + length.to_bytes(8, "little"),
    st.integers(0, 30),
    st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)),
)
PLAINTEXTS = st.one_of(
    st.binary(min_size=1, max_size=60),
    HEADERS,
    st.builds(lambda a, b: a + b, HEADERS, st.binary(max_size=60)),
)
INPUTS = st.lists(st.one_of(PLAINTEXTS, st.just("end")), max_size=12)


@settings(max_examples=500)
@given(INPUTS)
def test_any_opened_bytes_give_events_or_a_remote_protocol_error(inputs: list[bytes | str]) -> None:
    """State and input in every combination: between frames, inside a frame, inside DATA, failed, ended."""
    cipher, parser = pair()
    inside = False
    failed = False
    for item in inputs:
        try:
            if item == "end":
                parser.end_of_stream()
                assert not inside
                assert not failed
                return
            assert isinstance(item, bytes)
            parser.feed(cipher.seal(item))
            for event in events(parser):
                assert not failed
                assert inside or not isinstance(event, DataPiece)
                inside = isinstance(event, DataStart | DataPiece)
            inside = not parser.between_frames
            assert len(parser._body) <= 4 * MIB
        except RemoteProtocolError:
            failed = True
            assert not parser.between_frames


def test_a_screen_is_asked_before_a_body_is_taken() -> None:
    asked = []

    def screen(tag: Tag, length: int) -> None:
        asked.append((tag, length))
        if tag is Tag.RUN:
            raise ForbiddenError("not you")

    cipher, parser = pair()
    parser.screen = screen
    parser.feed(seal(cipher, encode_frame(Tag.STATUS, b"{}")))
    assert events(parser) == [Frame(Tag.STATUS, b"{}")]
    parser.feed(seal(cipher, encode_header(Tag.RUN, 4 * MIB)))
    for _ in range(2):  # it stays refused
        with pytest.raises(ForbiddenError, match="not you"):
            parser.next_event()
    assert asked == [(Tag.STATUS, 2), (Tag.RUN, 4 * MIB)]
    assert not parser.between_frames
