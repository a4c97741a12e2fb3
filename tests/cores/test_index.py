from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.cores import index as index_module
from flare.cores.index import CoreIndex, export_of, fold, model_file
from flare.errors import CoreError
from flare.strict_json import canonical
from flare_workers.ranges import Ranges
from tests.cores.making import MIB, members

TWO_FILES = {"model/a": b"", "model/b": b""}


def described(**changes: Any) -> dict[str, Any]:
    """An index's members over two files of 5 MiB + 10 and 100 bytes, for two ranks."""
    body = {
        **members({"model/a.gguf": b"", "model/b": b""}, ranks=2),
        "block_digests_sha256": "00" * 32,
        "tensor_table_sha256": "11" * 32,
    }
    body["files"][0]["size"] = 5 * MIB + 10
    body["files"][1]["size"] = 100
    return {**body, **changes}


def text_of(**changes: Any) -> str:
    """The index's text with a right export, whatever else is wrong."""
    body = {"format": 1, **described(**changes)}
    return json.dumps({**body, "export": export_of(body)})


def file(path: str, offset: int = 0, size: int = 5, **more: Any) -> dict[str, Any]:
    return {"path": path, "offset": offset, "size": size, "sha256": "22" * 32, **more}


def test_create_and_parse_agree() -> None:
    created, text = CoreIndex.create(described())
    parsed = CoreIndex.from_text(text)
    assert parsed == created
    assert parsed.index_sha256 == hashlib.sha256(text.encode()).digest()
    assert text == canonical(json.loads(text))


def test_export_is_the_digest_of_the_rest_in_canonical_form() -> None:
    body = {"format": 1, **described(model="Größe")}
    plain = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    text = json.dumps({"export": export_of(body), **body}, indent=3, ensure_ascii=False)
    index = CoreIndex.from_text(text)
    assert index.export.hex() == hashlib.sha256(plain).hexdigest()[:32]
    # The export does not depend on how the text is written, its digest does.
    other = CoreIndex.create(described(model="Größe"))[0]
    assert (index.export, index.model) == (other.export, "Größe")
    assert index.index_sha256 != other.index_sha256


def test_blocks_are_counted_in_index_order() -> None:
    index = CoreIndex.from_text(text_of())
    assert [each.blocks for each in index.files] == [6, 1]
    assert [index.first_block(number) for number in (0, 1)] == [0, 6]
    assert (index.block_count, index.digests_length) == (7, 224)
    assert index.total_bytes == 5 * MIB + 110


def test_rank_ranges() -> None:
    runs = [[0, MIB, 2 * MIB], [0, 5 * MIB, 10], [1, 0, 100]]
    index = CoreIndex.from_text(text_of(rank_ranges=[None, runs]))
    assert index.rank_ranges(0) is None
    assert index.wanted(0) == {0: Ranges.whole(5 * MIB + 10), 1: Ranges.whole(100)}
    assert index.wanted(1) == {0: Ranges.of([(MIB, 2 * MIB), (5 * MIB, 10)]), 1: Ranges.whole(100)}
    assert [index.rank_bytes(rank) for rank in (0, 1)] == [5 * MIB + 110, 2 * MIB + 110]
    for rank in (-1, 2):
        with pytest.raises(CoreError, match=f"no rank {rank}"):
            index.rank_ranges(rank)
        with pytest.raises(CoreError, match="has 2 ranks"):
            index.rank_bytes(rank)


def test_a_rank_may_read_nothing() -> None:
    index = CoreIndex.from_text(text_of(rank_ranges=[None, []]))
    assert index.rank_ranges(1) == {}
    assert index.rank_bytes(1) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, '"model" is empty'),
        ({"model": "x\nengine  y"}, '"model" has a control character'),
        ({"model": "x\u202ey"}, '"model" has a control character'),
        ({"model": "x" * 201}, '"model" is longer than 200'),
        ({"engine": "tgi"}, "\"engine\" is 'tgi'; known are llama.cpp, vllm, sglang"),
        ({"revision": "a100"}, "\"revision\" is 'a100'; known are gb10, gb202, gb300, cpu"),
        ({"layout": "both"}, "\"layout\" is 'both'"),
        ({"ranks": 0}, '"ranks" is 0'),
        ({"ranks": 1025}, '"ranks" is not a whole number'),
        ({"ranks": True}, '"ranks" is not a whole number'),
        ({"parallel": {"tensor": 2, "pipeline": 2}}, '"parallel" gives 2 x 2 ranks, not 2'),
        ({"parallel": {"tensor": 2, "pipeline": 1, "data": 1}}, 'unknown member "data"'),
        ({"device_bytes": [1]}, '"device_bytes" has 1 entries for 2 ranks'),
        ({"device_bytes": [1, -1]}, "device_bytes[1] is not a whole number"),
        ({"serving_reserve": None}, '"serving_reserve" is missing'),
        ({"decode_weight_bytes": "many"}, '"decode_weight_bytes" is not a whole number'),
        ({"block_digests_sha256": "00"}, '"block_digests_sha256" is not 64 lower-case hex digits'),
        ({"tensor_table_sha256": "AA" * 32}, '"tensor_table_sha256" is not 64 lower-case hex digits'),
        ({"surprise": 1}, 'unknown member "surprise"'),
        ({"files": []}, '"files" is empty'),
        ({"files": [file("model/a", size=0)]}, '"files" hold no bytes at all'),
        ({"files": [file("model/a", extra=1)]}, 'unknown member "extra"'),
        ({"files": [file("model/a", size=2**53 - 1), file("model/b")]}, "larger together than any disk"),
        ({"files": [file("model/a"), file("")]}, "[1] has an empty path"),
        ({"files": [file("model/a", offset=8)]}, 'has "model/a" with offset 8; a companion begins at 0'),
        ({"files": [file("", offset=31)]}, "begin at offset 31, not behind the digest table"),
        ({"files": [file("a/b"), file("a/b")]}, 'has "a/b" twice'),
        ({"files": [file("a/b"), file("A/B")]}, 'has "A/B" and "a/b", which differ by case alone'),
        ({"files": [file("a/ü"), file("a/U\u0308")]}, "differ by case alone"),
        ({"files": [file("a"), file("A/b")]}, 'has "a" both as a file and as a folder'),
        ({"files": [file("/etc/passwd")]}, "could leave its folder"),
        ({"files": [file("a/../../b")]}, "could leave its folder"),
        ({"files": [file("a/./b")]}, "could leave its folder"),
        ({"files": [file("a//b")]}, "could leave its folder"),
        ({"files": [file("a/")]}, "could leave its folder"),
        ({"files": [file("a\nb")]}, "control character"),
        ({"files": [file("a\\b")]}, "backslash"),
        ({"files": [file("x" * 256)]}, "longer than 255 bytes"),
        ({"files": [file("ü" * 128)]}, "longer than 255 bytes"),
        ({"files": [file("model.safetensors")]}, '"model.safetensors" is reserved'),
        ({"files": [file("Model.safetensors")]}, '"Model.safetensors" is reserved'),
        ({"files": [file("33" * 32 + ".safetensors")]}, "is named by a SHA-256 that is not its own"),
        ({"files": [file(".verified")]}, '".verified" is reserved'),
        ({"rank_ranges": [None]}, "is not a list of 2 entries"),
        ({"rank_ranges": None}, '"rank_ranges" is missing'),
        ({"rank_ranges": {}}, "is not a list of 2 entries"),
        ({"rank_ranges": [[], None]}, "does not give rank 0 the complete core"),
        ({"rank_ranges": [None, {}]}, "[1] is neither null nor a list"),
        ({"rank_ranges": [None, [[0, 0]]]}, "[1][0] is not [file number, offset, length]"),
        ({"rank_ranges": [None, [[0, 0, True]]]}, "[1][0] is not [file number, offset, length]"),
        ({"rank_ranges": [None, [[0, -MIB, MIB]]]}, "[1][0] is not [file number, offset, length]"),
        ({"rank_ranges": [None, [[2, 0, MIB]]]}, "[1][0] lies outside the core's files"),
        ({"rank_ranges": [None, [[0, 5 * MIB, MIB]]]}, "[1][0] lies outside the core's files"),
        ({"rank_ranges": [None, [[0, 0, 0]]]}, "[1][0] lies outside the core's files"),
        ({"rank_ranges": [None, [[0, 1, MIB]]]}, "[1][0] is not made of whole blocks"),
        ({"rank_ranges": [None, [[0, 0, 10]]]}, "[1][0] is not made of whole blocks"),
        ({"rank_ranges": [None, [[0, 0, 2 * MIB], [0, MIB, MIB]]]}, "[1][1] overlaps the run before it"),
        (
            {"rank_ranges": [None, [[1, 0, 100], [0, 0, MIB]]]},
            "[1][1] overlaps the run before it or is out of",
        ),
        ({"layout": "single_host", "rank_ranges": [None, []]}, "splits a single_host core"),
    ],
)
def test_each_rule_has_its_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CoreError) as caught:
        CoreIndex.from_text(text_of(**changes))
    assert message in caught.value.message


def test_format_and_export() -> None:
    body = {"format": 2, **described()}
    with pytest.raises(CoreError, match='"format" is not 1'):
        CoreIndex.from_text(json.dumps({**body, "export": export_of(body)}))
    with pytest.raises(CoreError, match=r"its export 0{32} does not follow from its content"):
        CoreIndex.from_text(json.dumps({"format": 1, **described(), "export": "0" * 32}))
    with pytest.raises(CoreError, match='"export" is missing'):
        CoreIndex.from_text(json.dumps({"format": 1, **described()}))


def test_duplicate_keys() -> None:
    text = text_of()
    with pytest.raises(CoreError, match='has the key "model" twice'):
        CoreIndex.from_text(text[:-1] + ', "model": "other"}')


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_RUNS", 2)
    runs = [[0, number * 2 * MIB, MIB] for number in range(2)]
    CoreIndex.from_text(text_of(rank_ranges=[None, runs]))
    with pytest.raises(CoreError, match="has more than 2 runs"):
        CoreIndex.from_text(text_of(rank_ranges=[None, [*runs, [1, 0, 100]]]))
    monkeypatch.setattr(index_module, "MAX_FILES", 1)
    with pytest.raises(CoreError, match='"files" has 2 items; at most 1'):
        CoreIndex.from_text(text_of())
    monkeypatch.setattr(index_module, "MAX_INDEX", 100)
    with pytest.raises(CoreError, match="at most 100 are allowed"):
        CoreIndex.from_text(text_of())


def test_a_packed_core_begins_behind_its_digest_table() -> None:
    index = CoreIndex.from_text(text_of(files=[file("", offset=2 * 32, size=MIB + 1)]))
    assert index.packed
    assert not CoreIndex.from_text(text_of()).packed


def test_model_file() -> None:
    assert model_file(CoreIndex.from_text(text_of())) == "model"
    assert model_file(CoreIndex.from_text(text_of(engine="llama.cpp"))) == "model/a.gguf"
    with pytest.raises(CoreError, match="none of its files is a GGUF file"):
        model_file(CoreIndex.from_text(text_of(engine="llama.cpp", files=[file("model/a")])))


def test_code_is_refused_unless_allowed() -> None:
    files = [file("model/a.safetensors"), file("model/modeling.PY"), file("model/pytorch_model.bin")]
    index = CoreIndex.from_text(text_of(files=files))
    assert index.code_files() == ["model/modeling.PY", "model/pytorch_model.bin"]
    with pytest.raises(CoreError, match=r'2 file\(s\) that can run code .*first "model/modeling.PY"'):
        index.refuse_code(allow_code=False)
    index.refuse_code(allow_code=True)
    CoreIndex.from_text(text_of()).refuse_code(allow_code=False)


def test_fold_joins_what_file_systems_join() -> None:
    assert fold("Straße/ÉA") == fold("STRASSE/e\u0301a")


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**54) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
runs = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(-1, 7).map(lambda n: n * MIB), st.integers(0, 7).map(lambda n: n * MIB)
    ),
    max_size=4,
)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(described(), anything)),
    st.lists(st.none() | runs, min_size=1, max_size=3),
)
def test_parse_it_or_core_error(changes: dict[str, Any], rank_ranges: list[Any]) -> None:
    try:
        index = CoreIndex.from_text(text_of(**{"rank_ranges": rank_ranges, **changes}))
    except CoreError:
        return
    for rank in range(index.ranks):
        for number, ranges in index.wanted(rank).items():
            assert ranges.end <= index.files[number].size
            assert ranges == ranges.rounded_out(index.files[number].size)
        assert index.rank_bytes(rank) == sum(ranges.total for ranges in index.wanted(rank).values())


@given(st.text(max_size=300))
def test_any_text_is_an_index_or_core_error(text: str) -> None:
    with pytest.raises(CoreError):
        CoreIndex.from_text(text)
