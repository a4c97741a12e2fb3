"""Make the golden vectors of docs/protocol.md again: `python tests/vectors/make.py` writes them here.

Every key is the SHA-256 of a phrase, so the files come out the same on every machine. They change only
when the protocol does: its version with them, unless all that is new are members that may be absent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flare.identity import Identity
from flare.wire import frames, handshake
from flare.wire import messages as m
from flare_workers.cipher import RecordCipher
from tests.vectors.examples import (
    CONTROLLER,
    CONTROLLERS,
    EXAMPLES,
    FACTS,
    MAXWELL,
    SIGNED_RUN,
    SIGNED_TRANSFER,
    seed,
)

FOLDER = Path(__file__).resolve().parent


def handshaken() -> tuple[handshake.Initiator, handshake.Responder, dict[str, Any]]:
    """Return both finished roles, and the handshake's vector."""
    initiator = handshake.Initiator(
        CONTROLLER.sign, CONTROLLER.public_key, ephemeral=seed("initiator ephemeral")
    )
    responder = handshake.Responder(MAXWELL.sign, MAXWELL.public_key, ephemeral=seed("responder ephemeral"))
    message_1 = initiator.to_send()
    responder.receive(message_1)
    message_2 = responder.to_send()
    initiator.receive(message_2)
    message_3 = initiator.to_send()
    responder.receive(message_3)
    assert initiator.handshake_hash == responder.handshake_hash
    to_responder, to_initiator = initiator.ciphers()
    vector = {
        "initiator_ephemeral_private": seed("initiator ephemeral").hex(),
        "responder_ephemeral_private": seed("responder ephemeral").hex(),
        "initiator_identity_private": seed("controller").hex(),
        "responder_identity_private": seed("maxwell").hex(),
        "initiator_public_key": CONTROLLER.public_key.hex(),
        "responder_public_key": MAXWELL.public_key.hex(),
        "message1": message_1.hex(),
        "message2": message_2.hex(),
        "message3": message_3.hex(),
        "handshake_hash": initiator.handshake_hash.hex(),
        "initiator_to_responder_key": to_responder.key.hex(),
        "responder_to_initiator_key": to_initiator.key.hex(),
    }
    return initiator, responder, vector


def records() -> list[dict[str, Any]]:
    """Records of several lengths and counters."""
    key = seed("record key")
    made = []
    for counter, plaintext in (
        (0, b"\x00"),
        (1, b"flare"),
        (255, bytes(range(256))),
        (2**32, b"counter of 33 bits"),
        (2**64 - 2, b"the last counter"),
        (7, b"\xa5" * frames.MAX_PLAINTEXT),
    ):
        record = RecordCipher(key, counter).seal(plaintext)
        made.append(
            {"key": key.hex(), "counter": counter, "plaintext": plaintext.hex(), "record": record.hex()}
        )
    return made


def frame_vector(message: m.Message) -> dict[str, Any]:
    """One frame: an OK also says which body it is."""
    vector: dict[str, Any] = {"tag": int(message.TAG), "name": message.TAG.name}
    if message.TAG is frames.Tag.OK:
        vector["answers"] = ANSWERS[type(message).__name__]
    body = message.to_body()
    return vector | {"body": body.decode("ascii"), "encoded": message.to_frame().hex()}


STRANGERS_HELLO = m.Hello(7, MAXWELL.public_key)  # has fewer members than the table of bodies says

ANSWERS = {
    **{request.REPLY.__name__: request.TAG.name for request in m.REQUESTS if request.REPLY is not None},
    "FetchReply": "FETCH",
    "PutDone": "PUT done",
}


def frame_vectors() -> list[dict[str, Any]]:
    """Every frame; DATA's body is hex."""
    data = b"hello"
    encoded = frames.encode_header(frames.Tag.DATA, len(data)) + data
    return [
        *(frame_vector(message) for message in EXAMPLES if message != STRANGERS_HELLO),
        {"tag": 24, "name": "DATA", "body": data.hex(), "encoded": encoded.hex()},
    ]


def stream() -> dict[str, Any]:
    """Every byte that each side sends after the handshake of handshake.json."""
    initiator, responder, _ = handshaken()
    ciphers = {"initiator": initiator.ciphers()[0], "responder": responder.ciphers()[0]}
    status = next(message for message in EXAMPLES if isinstance(message, m.StatusReply))
    data = b"hello"
    exchange: list[tuple[str, m.Message | bytes]] = [
        ("initiator", m.Hello(7, CONTROLLER.public_key, 2, download_progress=True)),
        ("responder", m.Hello(7, MAXWELL.public_key, 2, FACTS, "/home/flare/.local/bin/flare")),
        ("initiator", m.Status()),
        ("responder", status),
        ("initiator", m.Get("/data/core.safetensors", 8, len(data))),
        ("responder", m.GetReply(len(data))),
        ("responder", data),
    ]
    sent = []
    for side, message in exchange:
        if isinstance(message, bytes):
            plaintext = frames.encode_header(frames.Tag.DATA, len(message)) + message
            entry = {"from": side, "frame": "DATA", "body": message.hex()}
        else:
            plaintext = message.to_frame()
            entry = {"from": side, "frame": message.TAG.name, "body": message.to_body().decode("ascii")}
        sent.append({**entry, "bytes": frames.seal(ciphers[side], plaintext).hex()})
    return {
        "exchange": sent,
        **{
            f"{side}_sends": "".join(entry["bytes"] for entry in sent if entry["from"] == side)
            for side in ciphers
        },
    }


def signed() -> list[dict[str, Any]]:
    """Signed records of every kind."""
    return [
        *(
            {"record": record.to_json(), "kind": "controllers", "signer_private": seed("controller").hex()}
            for record in CONTROLLERS.chain
        ),
        {
            "record": SIGNED_TRANSFER.to_json(),
            "kind": "transfer_grant",
            "signer_private": seed("controller").hex(),
        },
        {"record": SIGNED_RUN.to_json(), "kind": "run_grant", "signer_private": seed("controller").hex()},
    ]


def build() -> dict[str, str]:
    """Return every file's name and text."""
    assert Identity.from_seed(seed("controller")).public_key == CONTROLLER.public_key
    vectors = {
        "handshake.json": handshaken()[2],
        "records.json": records(),
        "frames.json": frame_vectors(),
        "stream.json": stream(),
        "signed.json": signed(),
    }
    return {name: json.dumps(vector, indent=1) + "\n" for name, vector in vectors.items()}


if __name__ == "__main__":
    for name, text in build().items():
        (FOLDER / name).write_text(text, encoding="ascii")
        print(f"wrote {name}, {len(text)} bytes")
