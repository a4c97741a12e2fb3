from __future__ import annotations

from pathlib import Path

import pytest

from flare.cores.reference import LocalReference, NodeReference
from flare.errors import (
    BusyError,
    CoreError,
    EngineError,
    PlacementError,
    UnreachableError,
    UnsupportedError,
)
from flare.orbit.candidates import (
    check_executables,
    check_memory_limit,
    check_name_free,
    check_port_free,
    check_servable,
    describe_placement,
    needs_of,
    place_core,
)
from flare.orbit.client import Answer
from flare.orbit.resolve import Core, resolve_local
from flare.serving_options import parse_serving
from flare.wire.messages import CachedFile, CoreReport, StatusReply
from tests.cores.making import write_core, write_packed_core
from tests.orbit.builders import answer, gpu, group_report, node_entry

MAXWELL, HERTZ = node_entry(1, "maxwell"), node_entry(2, "hertz")


@pytest.fixture
def core(tmp_path: Path) -> Core:
    primary = write_core(
        tmp_path,
        {"model/Tiny.gguf": b"x" * 3000},
        engine="llama.cpp",
        ranks=2,
        parallel={"tensor": 1, "pipeline": 2},
        rank_ranges=[None, []],
    )
    return resolve_local(LocalReference(str(primary)))


def entry(
    core: Core, suffix: str = "", *, verified: bool = True, index: str | None = None, files: bool = False
) -> CoreReport:
    return CoreReport(
        name=core.entry + suffix,
        export=core.export,
        index_sha256=index or core.primary.index_sha256.hex(),
        files=tuple(CachedFile(path, size, size) for path, size in core.files) if files else (),
        verified=verified,
        bytes=1,
    )


def test_a_port_on_which_another_group_serves(core: Core) -> None:
    def served(url: str | None, state: str = "running", front: str | None = None) -> StatusReply:
        report = group_report("glm-1", name="glm", state=state, url=url, front=front)
        reply = answer(MAXWELL, groups=(report,)).reply
        assert reply is not None
        return reply

    for url, words in (
        ("http://127.0.0.1:8000", ()),
        ("http://0.0.0.0:8000", ()),
        ("http://[::1]:8000", ("--host", "::")),
        ("http://10.0.0.1:8123", ("--host", "10.0.0.1", "--port", "8123")),
        ("http://10.0.0.1:8000", ("--host", "0.0.0.0")),
        ("http://[::ffff:10.0.0.1]:8000", ("--host", "10.0.0.1")),
        ("http://localhost:8000", ()),
        ("http://[::1]:8000", ("--host", "localhost")),
        ("http://maxwell.local:8000", ("--host", "10.0.0.1")),
    ):
        with pytest.raises(BusyError, match=r"The group glm has port \d+ of maxwell already \(glm-1\)"):
            check_port_free(MAXWELL, parse_serving(words), served(url))
    # What the launch asked for counts also before it serves, and where the rank's own URL says less.
    for front, served_at, words in (
        ("127.0.0.1:8000", None, ()),
        ("0.0.0.0:8000", None, ("--host", "10.0.0.5")),
        ("0.0.0.0:8000", "http://127.0.0.1:8000", ("--host", "10.0.0.5")),
        ("[::]:8000", "http://[::1]:8000", ("--host", "fe80::1")),
    ):
        with pytest.raises(BusyError, match="The group glm has port 8000"):
            check_port_free(MAXWELL, parse_serving(words), served(served_at, front=front))
    for front in ("127.0.0.1:8001", "10.0.0.5:8000", "[::]:8000", "no address"):
        check_port_free(MAXWELL, parse_serving(()), served(None, front=front))
    for url, words, state in (
        ("http://127.0.0.1:8000", ("--port", "8001"), "running"),
        ("http://127.0.0.1:8000", (), "exited"),
        ("http://10.0.0.1:8000", (), "running"),
        ("http://127.0.0.1:8000", ("--port", "0"), "running"),
        ("http://[8000", (), "running"),
        ("http://127.0.0.1:99999999", (), "running"),
        ("http://[::1]:8000", ("--host", "0.0.0.0"), "running"),
    ):
        check_port_free(MAXWELL, parse_serving(words), served(url, state))


def test_a_memory_limit_below_the_weights(core: Core) -> None:
    check_memory_limit(core, None)
    largest = max(core.primary.index.device_bytes)
    check_memory_limit(core, largest)
    with pytest.raises(PlacementError, match=rf"--memory-limit allows {largest - 1:,} bytes, but rank 0 of"):
        check_memory_limit(core, largest - 1)


def test_a_core_that_no_rank_can_load_is_refused_before_anything_is_sent(core: Core, tmp_path: Path) -> None:
    check_servable(core)
    foreign = write_core(tmp_path / "foreign", {"model/a": b"x"}, engine="vllm")
    words = r"does not run vllm cores; it distributes them \(`flare orbit push`\)"
    with pytest.raises(UnsupportedError, match=words):
        check_servable(resolve_local(LocalReference(str(foreign))))
    packed = write_packed_core(tmp_path / "packed", b"x" * 100, engine="llama.cpp")
    with pytest.raises(CoreError, match=r"is packed, and llama\.cpp reads only GGUF files"):
        check_servable(resolve_local(LocalReference(str(packed))))


def test_the_index_says_what_is_needed(core: Core) -> None:
    needs = needs_of(core)
    assert (needs.revision, needs.layout, needs.ranks, needs.engine) == ("cpu", "multi_host", 2, "llama.cpp")
    assert needs.bytes_of(1) == 1100


def test_a_core_with_code_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    primary = write_core(tmp_path, {"model/a.gguf": b"a", "model/tool.py": b"1"}, engine="llama.cpp")
    core = resolve_local(LocalReference(str(primary)))
    with pytest.raises(CoreError, match=r'1 file\(s\) that can run code .* first "model/tool\.py"'):
        place_core(core, [answer(MAXWELL)], listed=False, gpu_indices=None)


def test_a_node_that_holds_the_verified_core_becomes_rank_zero(core: Core) -> None:
    for report, first in (
        (entry(core), "hertz"),
        (entry(core, verified=False), "maxwell"),
        (entry(core, verified=False, files=True), "hertz"),
        (entry(core, index="ab" * 32), "maxwell"),
        (entry(core, "-rank1"), "maxwell"),
    ):
        answers = [
            answer(MAXWELL, gpus=(gpu(free=1 << 35),)),
            answer(HERTZ, cores=(report,), gpus=(gpu(free=1 << 34),)),
        ]
        placement = place_core(core, answers, listed=False, gpu_indices=None)
        assert placement.members[0].node.name == first, report


def test_the_node_that_a_reference_names_becomes_rank_zero_and_reads_in_place(core: Core) -> None:
    held = Core(NodeReference("hertz", "/data/a.safetensors"), core.primary, HERTZ, "/data/a.safetensors")
    placement = place_core(held, [answer(MAXWELL), answer(HERTZ)], listed=False, gpu_indices=None)
    assert describe_placement(held, placement) == [
        "rank 0  hertz  the CPU (cpu)  reads /data/a.safetensors in place",
        "rank 1  maxwell  the CPU (cpu)  needs no core data",
    ]


def test_lines_say_what_must_be_received(core: Core) -> None:
    placement = place_core(core, [answer(MAXWELL), answer(HERTZ)], listed=True, gpu_indices=None)
    assert describe_placement(core, placement)[0] == "rank 0  maxwell  the CPU (cpu)  receives 3,000 bytes"
    held = place_core(
        core, [answer(MAXWELL, cores=(entry(core),)), answer(HERTZ)], listed=True, gpu_indices=None
    )
    assert describe_placement(core, held)[0].endswith("holds its data already")
    whole = place_core(core, [answer(MAXWELL), answer(HERTZ)], listed=True, gpu_indices=())
    assert "the whole node" in describe_placement(core, whole)[0]


def test_nodes_that_did_not_answer_are_part_of_the_explanation(core: Core) -> None:
    gone: Answer[object] = Answer(HERTZ, None, None, UnreachableError("hertz is off."))
    with pytest.raises(UnreachableError, match=r"Nodes that did not answer:\n  hertz is off\."):
        place_core(core, [answer(MAXWELL), gone], listed=False, gpu_indices=None)  # type: ignore[list-item]
    with pytest.raises(UnreachableError, match=r"No candidate node answered:\n  hertz is off\."):
        place_core(core, [gone], listed=False, gpu_indices=None)  # type: ignore[list-item]
    with pytest.raises(PlacementError) as caught:
        place_core(core, [answer(MAXWELL)], listed=False, gpu_indices=None)
    assert "did not answer" not in caught.value.message


def test_a_node_without_the_engine_is_refused_before_data_moves(core: Core) -> None:
    with pytest.raises(EngineError, match=r"llama\.cpp"):
        place_core(core, [answer(MAXWELL), answer(HERTZ, engines=())], listed=False, gpu_indices=None)


def test_a_whole_node_launch_keeps_others_out(core: Core) -> None:
    held = answer(HERTZ, groups=(group_report("other-1", name="other", gpus=()),))
    with pytest.raises(PlacementError, match="other-1"):
        place_core(core, [answer(MAXWELL), held], listed=False, gpu_indices=None)


def test_a_name_that_runs_is_refused() -> None:
    answers = [answer(MAXWELL), answer(HERTZ, groups=(group_report("glm-1"),))]
    with pytest.raises(BusyError, match=r"A group named glm runs already on hertz \(glm-1\)"):
        check_name_free("glm", answers)
    check_name_free("other", answers)
    check_name_free("glm", [answer(HERTZ, groups=(group_report("glm-1", state="exited"),))])


def test_an_agent_without_an_executable_is_refused(core: Core) -> None:
    answers = [answer(MAXWELL), answer(HERTZ, executable=None)]
    placement = place_core(core, answers, listed=True, gpu_indices=None)
    with pytest.raises(UnsupportedError, match="The agent on hertz does not say which executable"):
        check_executables(placement, answers)
    answers[1] = answer(HERTZ, executable="/opt/flare")
    assert check_executables(placement, answers) == {"maxwell": "/usr/bin/flare", "hertz": "/opt/flare"}
