from __future__ import annotations

from pathlib import Path

import pytest

from flare.cores.reference import LocalReference, NodeReference
from flare.errors import ConfigError, NotFoundError, UsageError
from flare.identity import Identity
from flare.orbit.orbit_records import GroupDefinition, NodeEntry, OrbitFile
from flare.orbit.request import RunOptions, parse_indices, parse_names, plan_request

NODES = tuple(
    NodeEntry(name, Identity.from_seed(bytes([number]) * 32).public_key, f"{name}:29900")
    for number, name in enumerate(("maxwell", "hertz", "volta"), start=1)
)


def orbit(*groups: GroupDefinition) -> OrbitFile:
    return OrbitFile(
        Path("orbit.toml"),
        nodes=NODES,
        clusters={"sparks": ("hertz", "maxwell")},
        groups={group.name: group for group in groups},
    )


def names(nodes: tuple[NodeEntry, ...]) -> list[str]:
    return [node.name for node in nodes]


SAVED = GroupDefinition(
    "glm53",
    core="maxwell:/data/glm53.safetensors",
    nodes=("volta", "hertz"),
    gpus=(1,),
    serving=("--max-concurrency", "16", "--context-length", "4096"),
    rank_zero=("--port", "9000"),
    transfer_streams=4,
)


def test_candidates_come_from_nodes_then_cluster_then_saved_group_then_everything() -> None:
    everything = plan_request(orbit(), RunOptions(core="/a.safetensors"))
    assert names(everything.candidates) == ["maxwell", "hertz", "volta"]
    assert not everything.listed
    saved = plan_request(orbit(SAVED), RunOptions(name="glm53"))
    assert (names(saved.candidates), saved.listed) == (["volta", "hertz"], True)
    cluster = plan_request(orbit(SAVED), RunOptions(name="glm53", cluster="sparks"))
    assert (names(cluster.candidates), cluster.listed) == (["hertz", "maxwell"], True)
    listed = plan_request(orbit(SAVED), RunOptions(name="glm53", nodes=("maxwell",)))
    assert (names(listed.candidates), listed.listed) == (["maxwell"], True)


def test_run_never_takes_the_only_cluster_by_itself() -> None:
    assert len(plan_request(orbit(), RunOptions(core="/a.safetensors")).candidates) == 3


def test_the_command_line_wins_over_the_saved_group() -> None:
    request = plan_request(
        orbit(SAVED),
        RunOptions(
            core="./other.safetensors",
            name="glm53",
            gpus=(0,),
            serving=("--max-concurrency", "2", "--host", "0.0.0.0"),
            transfer_streams=9,
        ),
    )
    assert request.reference == LocalReference("./other.safetensors")
    assert request.gpus == (0,)
    assert request.streams == 9
    words = ("--max-concurrency", "2", "--context-length", "4096")
    assert request.definition.serving == words
    assert request.options.serving_words() == (*words, "--transfer-streams", "9")  # what ranks hear
    assert request.options.rank_zero_words() == ("--host", "0.0.0.0", "--port", "9000")


def test_a_saved_group_brings_everything() -> None:
    request = plan_request(orbit(SAVED), RunOptions(name="glm53"))
    assert request.reference == NodeReference("maxwell", "/data/glm53.safetensors")
    assert (request.name, request.gpus, request.streams) == ("glm53", (1,), 4)


def test_what_is_saved_is_absolute_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = plan_request(
        orbit(), RunOptions(core="a.safetensors", name="mine", cluster="sparks", persistent=True)
    )
    assert request.definition.core == str(tmp_path / "a.safetensors")
    assert request.definition.nodes == ("hertz", "maxwell")


def test_the_group_takes_the_name_of_an_explicit_cluster() -> None:
    assert plan_request(orbit(), RunOptions(core="/a.safetensors", cluster="sparks")).name == "sparks"
    assert plan_request(orbit(), RunOptions(core="/a.safetensors")).name is None


REFUSED = {
    "no core": (RunOptions(), UsageError, r"Name a core, or a saved group with --name"),
    "no such saved group": (RunOptions(name="x"), NotFoundError, r"No saved group is named x, so name a"),
    "both": (RunOptions(core="/a", cluster="sparks", nodes=("hertz",)), UsageError, "give one of them"),
    "persistent": (RunOptions(core="/a", persistent=True), UsageError, r"give it one with --name"),
    "name": (RunOptions(core="/a", name="-x"), UsageError, r'"-x" is no group name'),
    "streams": (RunOptions(core="/a", transfer_streams=65), UsageError, r"--transfer-streams takes"),
    "node": (RunOptions(core="/a", nodes=("nobody",)), NotFoundError, r"--nodes names the node nobody"),
    "twice": (RunOptions(core="/a", nodes=("hertz", "hertz")), UsageError, r"the node hertz twice"),
    "cluster": (RunOptions(core="/a", cluster="nobody"), NotFoundError, r"no cluster named nobody"),
    "port": (RunOptions(core="/a", serving=("--port", "0")), UsageError, r"--port 0 lets .* such as --port"),
    "option": (RunOptions(core="/a", serving=("--core-cache", "/")), UsageError, r"is no serving option"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_any_node_is_asked(name: str) -> None:
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        plan_request(orbit(), options)


def test_a_saved_group_that_says_what_cannot_be_is_named() -> None:
    for group, message in (
        (
            GroupDefinition("a", core="/a", serving=("--port", "1")),
            "The saved group a: --port is no serving option",
        ),
        (GroupDefinition("a", core="/a", rank_zero=("--threads", "1")), "The saved group a: --threads is no"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_request(orbit(group), RunOptions(name="a"))


def test_lists_on_the_command_line() -> None:
    assert parse_indices("0, 2") == (0, 2)
    assert parse_names("maxwell, hertz,", "--nodes") == ("maxwell", "hertz")
    for nobody in ("", " ", ","):
        with pytest.raises(UsageError, match="--to takes node names such as maxwell,hertz"):
            parse_names(nobody, "--to")
    for wrong in ("", "a", "-1", "0,,1"):
        with pytest.raises(UsageError, match="--gpus takes device indices"):
            parse_indices(wrong)
