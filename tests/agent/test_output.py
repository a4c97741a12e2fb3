"""Retained output and its followers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.agent.output import MAX_LINE_BYTES, RETAINED_BYTES, Line, LineSplitter, RankOutput, last_words


@given(st.lists(st.binary(max_size=40)))
def test_splitting_does_not_depend_on_how_bytes_arrive(pieces: list[bytes]) -> None:
    whole, parts = LineSplitter("stdout"), LineSplitter("stdout")
    data = b"".join(pieces)
    expected = whole.feed(data) + whole.finish()
    found = [line for piece in pieces for line in parts.feed(piece)] + parts.finish()
    assert found == expected
    assert "\n".join(line.text for line in found).count("\n") <= data.count(b"\n")


def test_invalid_utf8_is_replaced_and_carriage_returns_go() -> None:
    splitter = LineSplitter("stderr")
    assert splitter.feed(b"caf\xe9\r\nplain\n") == [Line("caf\ufffd", "stderr"), Line("plain", "stderr")]


@given(st.binary(min_size=1, max_size=4), st.integers(MAX_LINE_BYTES, 3 * MAX_LINE_BYTES))
def test_no_line_is_longer_than_the_protocol_allows(pattern: bytes, length: int) -> None:
    splitter = LineSplitter("stdout")
    lines = splitter.feed(pattern * (length // len(pattern))) + splitter.finish()
    assert lines
    assert all(len(line.text.encode()) <= MAX_LINE_BYTES for line in lines)


def test_retains_the_newest_lines_within_its_bound() -> None:
    async def scenario() -> None:
        output = RankOutput()
        for number in range(5000):
            output.append(Line(f"line {number} " + "x" * 60, "stdout"))
        assert sum(line.size for line in output.retained) <= RETAINED_BYTES
        assert output.retained[-1].text.startswith("line 4999 ")
        assert len(output.retained) > 500

    asyncio.run(scenario())


def test_follower_gets_retained_then_live_then_the_end() -> None:
    async def scenario() -> None:
        output = RankOutput()
        output.append(Line("before", "stdout"))
        seen: list[str] = []

        async def follow() -> None:
            async for line in output.follow():
                seen.append(line.text)

        task = asyncio.create_task(follow())
        await asyncio.sleep(0)
        output.append(Line("live", "stdout"))
        await asyncio.sleep(0)
        output.append(Line("last", "stdout"))
        output.end()
        await asyncio.wait_for(task, 5)
        assert seen == ["before", "live", "last"]
        late = [line.text async for line in output.follow()]
        assert late == seen

    asyncio.run(scenario())


def test_slow_follower_is_told_what_it_missed_and_delays_nobody() -> None:
    async def scenario() -> None:
        output = RankOutput(retained_bytes=100)
        output.append(Line("a" * 40, "stdout"))
        follower = output.follow()
        assert (await anext(follower)).text == "a" * 40
        for letter in "bcdefgh":
            output.append(Line(letter * 40, "stdout"))
        output.end()
        rest = [line async for line in follower]
        assert rest[0].text == "flare: 5 lines were not shown: this reader is too slow."
        assert [line.text[0] for line in rest[1:]] == ["g", "h"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((), None),
        ((" ", "stderr"), None),
        (("loading", "stdout", "", "stdout"), "loading"),
        (("a warning", "stderr", "working", "stdout"), "a warning"),
        (("Traceback:", "stderr", "KeyError: 'x'", "stderr"), "KeyError: 'x'"),
        (
            (
                "flare: warning: old",
                "stderr",
                "flare: error: config.toml: no.",
                "stderr",
                "Mend it.",
                "stderr",
            ),
            "config.toml: no. Mend it.",
        ),
    ],
)
def test_what_a_program_said_at_last(lines: tuple[str, ...], words: str | None) -> None:
    pairs = zip(lines[::2], lines[1::2], strict=True)
    assert last_words([Line(text, stream) for text, stream in pairs]) == words
