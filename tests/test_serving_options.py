from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.engines.arguments import RESERVED_ARGUMENTS, SAFE_ARGUMENTS, check_engine_arguments, gives
from flare.errors import UsageError
from flare.serving_options import (
    FLAGS,
    MAX_WORD_LENGTH,
    MAX_WORDS,
    RANK_ZERO_OPTIONS,
    SERVING_OPTIONS,
    VALUED,
    ServingOptions,
    parse_grant_words,
    parse_serving,
)

EVERYTHING = ServingOptions(
    host="0.0.0.0",
    port=8080,
    max_concurrency=16,
    context_length=8192,
    threads=4,
    memory_limit=24 * 1024**3,
    drain_timeout=1.5,
    api_key_file="/etc/keys",
    verify_weights=True,
    served_name="org/model:1",
    engine_arguments=("--flash-attn", "on", "-b=512"),
    allow_unsafe_engine_arguments=True,
    transfer_streams=4,
)


def test_options_become_words_and_options_again() -> None:
    assert parse_grant_words(EVERYTHING.serving_words(), EVERYTHING.rank_zero_words()) == EVERYTHING
    assert parse_serving([]) == ServingOptions()
    assert (ServingOptions().serving_words(), ServingOptions().rank_zero_words()) == ((), ())


def test_defaults_are_the_documented_ones() -> None:
    options = ServingOptions()
    assert (options.http_host, options.http_port, options.drain_seconds) == ("127.0.0.1", 8000, 120.0)
    assert EVERYTHING.http_host == "0.0.0.0"
    assert (EVERYTHING.http_port, EVERYTHING.drain_seconds) == (8080, 1.5)


def test_later_words_win_and_engine_words_add_up() -> None:
    options = parse_serving(
        ["--port", "1", "--port=2", "--engine-arg=-b=1", "--host", "[::1]", "--engine-arg", "--mlock"]
    )
    assert options.port == 2
    assert options.host == "::1"
    assert options.engine_arguments == ("-b=1", "--mlock")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--core-cache", "/x"], "--core-cache is no serving option"),
        (["stray"], "stray is no serving option"),
        (["--evil\x1b"], "--evil\\\\x1b is no serving option"),
        (["--port"], "--port needs a value"),
        (["--verify-weights=yes"], "takes no value"),
        (["--port", "x"], "from 1 to 65535, or with `flare run` 0 for one that the system chooses, not 'x'"),
        (["--port", "65536"], "whole number"),
        (["--port", "-1"], "whole number"),
        (["--max-concurrency", "0"], "whole number from 1 to 4096"),
        (["--context-length", "8"], "whole number from 16"),
        (["--threads", "2000"], "whole number from 1 to 1024"),
        (["--memory-limit", "much"], "a size such as 24GiB"),
        (["--memory-limit", "0"], "a size such as 24GiB"),
        (["--memory-limit", "9999999TB"], "a size such as 24GiB"),
        (["--drain-timeout", "1e3"], "seconds from 0"),
        (["--drain-timeout", "86401"], "seconds from 0"),
        (["--api-key-file", "keys"], "absolute path"),
        (["--api-key-file", "/a\0b"], "absolute path"),
        (["--served-name", "-x"], "--served-name takes"),
        (["--served-name", "a b"], "--served-name takes"),
        (["--host", "a b"], "an address or a host name"),
        (["--host", "-x"], "an address or a host name"),
        (["--engine-arg="], "one word for the engine"),
        (["--engine-arg=a\nb"], "one word for the engine"),
        (["--verify-weights"] * (MAX_WORDS + 1), f"at most {MAX_WORDS} words"),
        (["--host=" + "a" * MAX_WORD_LENGTH], "longer than"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_serving(words)


def test_a_grants_lists_are_kept_apart() -> None:
    with pytest.raises(UsageError, match="--port is no serving option"):
        parse_grant_words(["--port", "1"], [])
    with pytest.raises(UsageError, match="--threads is no serving option"):
        parse_grant_words([], ["--threads", "1"])
    assert parse_grant_words(["--transfer-streams", "64"], []).transfer_streams == 64
    with pytest.raises(UsageError, match="--transfer-streams takes a whole number from 1 to 64"):
        parse_grant_words(["--transfer-streams", "65"], [])
    with pytest.raises(UsageError, match="--transfer-streams is no serving option"):
        parse_serving(["--transfer-streams", "4"])
    assert RANK_ZERO_OPTIONS < SERVING_OPTIONS == FLAGS | VALUED


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("24GiB", 24 * 1024**3), ("24GB", 24 * 10**9)])
def test_a_memory_limit(text: str, size: int) -> None:
    assert parse_serving(["--memory-limit", text]).memory_limit == size


@given(st.lists(st.text(max_size=20), max_size=8))
def test_any_words_parse_or_are_a_usage_error(words: list[str]) -> None:
    try:
        options = parse_serving(words)
    except UsageError:
        return
    assert parse_grant_words(options.serving_words(), options.rank_zero_words()) == options


@pytest.mark.parametrize(
    "words",
    [
        ["--tools", "all"],
        ["--trust-remote-code"],
        ["--trust-remote"],
        ["--trust_remote_code"],
        ["--lora", "/x"],
        ["--chat-template-file", "/etc/passwd"],
        ["--slot-save-path", "/"],
        ["--media-path=/"],
        ["--mcp-servers-config", "/x"],
        ["-hf", "org/model"],
        ["value"],
        ["--mlock", "value"],
    ],
)
def test_what_could_load_code_files_or_tools_needs_the_operators_word(words: list[str]) -> None:
    with pytest.raises(UsageError, match="--allow-unsafe-engine-args"):
        check_engine_arguments(words, allow_unsafe=False)
    check_engine_arguments(words, allow_unsafe=True)


@pytest.mark.parametrize("word", ["--host", "--port=1", "-m", "--rpc=evil:1", "--api-key", "--ctx-size"])
def test_what_flare_sets_is_never_passed_on(word: str) -> None:
    for allow in (False, True):
        with pytest.raises(UsageError, match="is set by flare itself"):
            check_engine_arguments([word], allow_unsafe=allow)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mlock=1"], "takes no value"),
        (["-b"], "needs a value"),
        (["-b", "/etc/passwd"], "plain word or number"),
        (["-b=--tools"], "plain word or number"),
        (["-b", "$(x)"], "plain word or number"),
    ],
)
def test_harmless_options_take_harmless_values(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_engine_arguments(words, allow_unsafe=False)


def test_harmless_options_pass() -> None:
    check_engine_arguments(
        ["--mlock", "-b", "512", "--flash-attn=on", "--seed", "-1", "-ts", "1,3"], allow_unsafe=False
    )
    assert not set(SAFE_ARGUMENTS) & RESERVED_ARGUMENTS


def test_whether_an_option_was_given_is_seen_in_both_spellings() -> None:
    assert gives(["-ngl=3"], "-ngl", "--gpu-layers")
    assert gives(["--gpu-layers", "3"], "-ngl", "--gpu-layers")
    assert not gives(["-b", "3"], "-ngl")


@pytest.mark.parametrize(
    ("words", "who"),
    [
        ((), None),
        (("--host", "localhost"), None),
        (("--host", "::1"), None),
        (("--host", "0.0.0.0", "--api-key-file", "/key"), None),
        (("--host", "0.0.0.0"), "on 0.0.0.0 without a key: every machine that reaches maxwell can"),
        (("--host", "::"), "on :: without a key: every machine that reaches maxwell can"),
        (("--host", "10.0.0.5"), "on 10.0.0.5 without a key: whoever reaches 10.0.0.5 can"),
    ],
)
def test_who_can_reach_the_front_without_a_key_is_said(words: tuple[str, ...], who: str | None) -> None:
    warning = parse_serving(words).exposure("maxwell")
    assert (warning is None) == (who is None)
    assert who is None or (warning is not None and who in warning and "--api-key-file" in warning)
