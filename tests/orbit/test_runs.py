from __future__ import annotations

import pytest

from flare.cli.orbit_ls import print_runs
from flare.errors import NotFoundError, UnreachableError
from flare.orbit.client import Answer
from flare.orbit.orbit_records import GroupDefinition
from flare.orbit.runs import collect_runs, saved_states, select_runs
from tests.orbit.builders import answer, gpu, group_report, node_entry

MAXWELL, HERTZ = node_entry(1, "maxwell"), node_entry(2, "hertz")


def away(node: object) -> Answer[object]:
    return Answer(node, None, None, UnreachableError("no"))  # type: ignore[arg-type]


def test_the_ranks_of_one_launch_become_one_run() -> None:
    answers = [
        answer(HERTZ, groups=(group_report("glm-1", rank=1, ranks=2, phase="receiving"),)),
        answer(
            MAXWELL,
            gpus=(gpu(3, "CPU-0"),),
            groups=(
                group_report("old-1", name="old", state="exited", uptime=90),
                group_report("glm-1", ranks=2, phase="loading", url="http://maxwell:8000", uptime=5),
            ),
        ),
    ]
    old, glm = collect_runs(answers)
    assert (old.state, glm.state, glm.phase, glm.url, glm.uptime) == (
        "exited",
        "running",
        "loading",
        "http://maxwell:8000",
        5,
    )
    assert [(rank.report.rank, rank.node.name, rank.devices) for rank in glm.ranks] == [
        (0, "maxwell", (3,)),
        (1, "hertz", (0,)),
    ]
    assert glm.missing == ()


@pytest.mark.parametrize(
    ("front", "url", "shown"),
    [
        ("0.0.0.0:8000", "http://127.0.0.1:8000", "http://maxwell:8000"),
        ("[::]:8000", "http://[::1]:8000", "http://maxwell:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("0.0.0.0:8000", None, None),
        ("no address", "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("0.0.0.0:8000", "http://[8000", "http://[8000"),
    ],
)
def test_a_front_on_every_address_is_reached_by_the_paired_one(
    front: str, url: str | None, shown: str | None
) -> None:
    (run,) = collect_runs([answer(MAXWELL, groups=(group_report("glm-1", url=url, front=front),))])
    assert run.url == shown


def test_a_failed_rank_makes_the_run_failed_once_nothing_runs() -> None:
    failed = group_report("glm-1", rank=1, ranks=2, state="failed", status=3, reason="out of memory")
    both = [answer(MAXWELL, groups=(group_report("glm-1", ranks=2),)), answer(HERTZ, groups=(failed,))]
    assert collect_runs(both)[0].state == "running"
    only = collect_runs([answer(HERTZ, groups=(failed,)), away(MAXWELL)])  # type: ignore[list-item]
    assert only[0].state == "failed"
    assert only[0].missing == (0,)
    assert only[0].to_json()["missing_ranks"] == [0]


def test_a_run_is_listed_with_its_ranks_their_devices_and_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = [
        answer(MAXWELL, gpus=(gpu(3, "CPU-0"),), groups=(group_report("glm-1", ranks=3),)),
        answer(HERTZ, groups=(group_report("glm-1", rank=2, ranks=3),)),
    ]
    print_runs(collect_runs(ranks))
    listed = capsys.readouterr()
    assert "  RANK NODE:DEVICE  " in listed.out
    assert "  0 maxwell:3, 1 missing, 2 hertz:0  " in listed.out
    assert "glm: no node that answered knows rank 1." in listed.err
    print_runs(collect_runs([answer(MAXWELL, groups=(group_report("glm-1", ranks=2, state="failed"),))]))
    assert "missing" not in capsys.readouterr().out  # its other rank ended well, and is forgotten


def test_what_is_said_of_one_launch_of_a_name_is_not_taken_for_anothers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    groups = (
        group_report("glm-1", state="failed", status=3, reason="out of memory", uptime=2.0),
        group_report("glm-2", ranks=2),
        group_report("other-1", name="other", state="failed", status=4, reason="no disk"),
    )
    print_runs(collect_runs([answer(MAXWELL, groups=groups)]))
    listed = capsys.readouterr()
    assert "  glm-1 rank 0 on maxwell failed with status 3: out of memory\n" in listed.out
    assert "  other rank 0 on maxwell failed with status 4: no disk\n" in listed.out
    assert "glm-2: no node that answered knows rank 1." in listed.err


def test_the_oldest_launch_comes_first_however_long_it_ran() -> None:
    times = {
        "b": ("20261130T120000Z", 3.0),
        "c": ("20261130T130000Z", 500.0),
        "a-1": ("20261129T235959Z", 1.0),
    }
    groups = [
        group_report(f"{name}-{time}-00ff", name=name, uptime=uptime)
        for name, (time, uptime) in times.items()
    ]
    runs = collect_runs([answer(MAXWELL, groups=(*groups, group_report("odd")))])
    assert [run.launch.split("-2026")[0] for run in runs] == ["odd", "a-1", "b", "c"]


def test_runs_are_chosen_by_name_or_launch() -> None:
    runs = collect_runs(
        [answer(MAXWELL, groups=(group_report("a-1", name="a"), group_report("a-2", name="a", uptime=0)))]
    )
    assert [run.launch for run in select_runs(runs, "a")] == ["a-1", "a-2"]
    assert [run.launch for run in select_runs(runs, "a-2")] == ["a-2"]
    assert len(select_runs(runs, None)) == 2
    with pytest.raises(NotFoundError, match=r"No run is called b on these nodes\. There: a\."):
        select_runs(runs, "b")
    with pytest.raises(NotFoundError, match="Nothing runs or is retained there"):
        select_runs([], "b")
    with pytest.raises(NotFoundError, match="No group runs or is retained on these nodes"):
        select_runs([], None)


def test_a_saved_group_is_unknown_while_a_node_of_it_is_away() -> None:
    groups = {
        "here": GroupDefinition("here", core="/a", nodes=("maxwell",)),
        "there": GroupDefinition("there", core="/a", nodes=("hertz",)),
        "anywhere": GroupDefinition("anywhere", core="/a"),
        "elsewhere": GroupDefinition("elsewhere", core="/a", nodes=("volta",)),
        "up": GroupDefinition("up", core="/a"),
    }
    answers = [answer(MAXWELL, groups=(group_report("up-1", name="up"),)), away(HERTZ)]
    states = saved_states(groups, collect_runs(answers), answers)  # type: ignore[arg-type]
    assert {state.definition.name: state.state for state in states} == {
        "here": "stopped",
        "there": "unknown",
        "anywhere": "unknown",
        "up": "running",
    }
