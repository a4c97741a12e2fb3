"""The golden vectors: made again, they are the same bytes, and they read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flare.trust.signed import SignedRecord, open_record
from flare.wire.frames import DataPiece, DataStart, Frame, FrameParser
from flare.wire.messages import Hello
from flare_workers.cipher import RecordCipher
from tests.vectors import make


def load(name: str) -> Any:
    return json.loads((make.FOLDER / name).read_text(encoding="ascii"))


@pytest.mark.parametrize(
    "name", ["handshake.json", "records.json", "frames.json", "stream.json", "signed.json"]
)
def test_making_them_again_gives_the_same_bytes(name: str) -> None:
    assert make.build()[name] == Path(make.FOLDER, name).read_text(encoding="ascii")


def test_records_open() -> None:
    for vector in load("records.json"):
        record = bytes.fromhex(vector["record"])
        cipher = RecordCipher(bytes.fromhex(vector["key"]), vector["counter"])
        assert cipher.open(record[2:]).hex() == vector["plaintext"]
        assert int.from_bytes(record[:2], "big") == len(record) - 2


def test_every_tag_has_a_vector() -> None:
    assert {vector["tag"] for vector in load("frames.json")} == set(range(1, 26))


@pytest.mark.parametrize("side", ["initiator", "responder"])
def test_the_stream_reads_back(side: str) -> None:
    keys, stream = load("handshake.json"), load("stream.json")
    other = {"initiator": "responder", "responder": "initiator"}[side]
    parser = FrameParser(RecordCipher(bytes.fromhex(keys[f"{side}_to_{other}_key"]), 1))
    parser.feed(bytes.fromhex(stream[f"{side}_sends"]))
    for entry in (entry for entry in stream["exchange"] if entry["from"] == side):
        event = parser.next_event()
        if entry["frame"] == "DATA":
            assert event == DataStart(5)
            assert parser.next_event() == DataPiece(b"hello", last=True)
        else:
            assert isinstance(event, Frame)
            assert (event.tag.name, event.body.decode()) == (entry["frame"], entry["body"])
    assert parser.next_event() is None
    parser.end_of_stream()


def test_a_hello_of_the_stream_is_read() -> None:
    entry = load("stream.json")["exchange"][0]
    assert Hello.from_body(entry["body"].encode()).download_progress


def test_signed_records_verify() -> None:
    for vector in load("signed.json"):
        record = SignedRecord.from_json(vector["record"])
        assert record.signer == make.Identity.from_seed(bytes.fromhex(vector["signer_private"])).public_key
        open_record(record, vector["kind"], "a vector")
