"""What the ranks say first: the peer's hello, and the reasons in refusals."""

from __future__ import annotations

from typing import Any

from flare.printable import printable
from flare.strict_json import Reader
from flare.values import dataclass


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What a peer says of itself.

    Args:
        index_sha256: of the core that it was told to expect; None where nobody told it.
        ranks: likewise.
        version: of its flare.
        engines: engine -> version.
    """

    index_sha256: bytes | None
    ranks: int | None
    version: str
    engines: dict[str, str]


def hello_message(facts: PeerFacts) -> dict[str, Any]:
    """Return the hello that says `facts`."""
    return {
        "type": "hello",
        "index_sha256": None if facts.index_sha256 is None else facts.index_sha256.hex(),
        "ranks": facts.ranks,
        "version": facts.version,
        "engines": facts.engines,
    }


def parse_hello(message: dict[str, Any]) -> PeerFacts:
    """Return what a hello says.

    Raises:
        RemoteProtocolError: it is none.
    """
    reader = Reader(message, "The hello")
    if reader.text("type") != "hello":
        reader.fail("type", "is not hello")
    engines = reader.object("engines", default={})
    if len(engines) > 16 or not all(isinstance(item, str) and len(item) < 200 for item in engines.values()):
        reader.fail("engines", "is no table of versions")
    return PeerFacts(
        index_sha256=reader.hex("index_sha256", 32, default=None),
        ranks=reader.count("ranks", default=None),
        version=reader.text("version", limit=100),
        engines=dict(engines),
    )


def words_of(message: dict[str, Any]) -> str:
    """Return why a peer refused or failed, safe for a terminal."""
    text = message.get("message")
    return printable(text, keep_newlines=True)[:2000] if isinstance(text, str) else "it does not say why."
