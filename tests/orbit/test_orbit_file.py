from __future__ import annotations

import json
import threading
import tomllib
from pathlib import Path

import pytest

from flare.errors import BusyError, ConfigError, ConflictError, NotFoundError
from flare.identity import Identity
from flare.orbit.orbit_file import edit_orbit_file, load_orbit_file
from flare.orbit.orbit_records import GroupDefinition, NodeEntry
from flare.trust.signed import SignedRecord, sign

KEYS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 8)]


def node(number: int, name: str) -> NodeEntry:
    return NodeEntry(name, KEYS[number].public_key, f"{name}:29900")


def record(revision: int) -> SignedRecord:
    return sign(KEYS[0], {"kind": "controllers", "revision": revision})


def node_text(number: int, name: str) -> str:
    entry = node(number, name)
    return (
        f'[[node]]\nname = "{name}"\nfingerprint = "{entry.fingerprint}"\n'
        f'public_key = "{entry.public_key.hex()}"\naddress = "{name}:29900"\n'
    )


HAND_WRITTEN = f"""# My orbit, kept by hand.
[controllers]
body = '{record(1).body}' # do not edit
signer = "{record(1).signer.hex()}"
signature = "{record(1).signature.hex()}"

# the big one
{node_text(1, "maxwell")}
# the small one
{node_text(2, "hertz")}
# both of them, in cable order
[cluster.sparks]
nodes = ["maxwell", "hertz"]  # maxwell is rank zero

[[group]]
name = "glm53" # the model of the house
core = "maxwell:/data/glm53.safetensors"
serving = ["--max-concurrency", "16"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orbit.toml"


def comments(text: str) -> list[str]:
    return [line.split("#", 1)[1].strip() for line in text.splitlines() if "#" in line]


def test_a_file_that_others_can_write_is_refused(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    path.chmod(0o664)
    with pytest.raises(ConfigError, match=f"The orbit file {path} can be changed by others .*chmod go-w"):
        load_orbit_file(path)


def test_a_missing_file_is_an_empty_orbit(path: Path) -> None:
    orbit = load_orbit_file(path)
    assert orbit.nodes == ()
    with pytest.raises(NotFoundError, match="No node is paired yet"):
        orbit.scope(None)


def test_the_first_pairing_writes_the_documented_layout(path: Path) -> None:
    with edit_orbit_file(path) as edit:
        edit.set_controllers((record(1),))
        edit.add_node(node(1, "maxwell"))
        edit.add_node(node(2, "hertz"))
    document = tomllib.loads(path.read_text())
    assert list(document) == ["controllers", "node"]
    assert document["controllers"] == {
        "body": record(1).body,
        "signer": record(1).signer.hex(),
        "signature": record(1).signature.hex(),
    }
    assert [entry["name"] for entry in document["node"]] == ["maxwell", "hertz"]
    assert list(document["node"][0]) == ["name", "fingerprint", "public_key", "address"]
    # A literal string keeps the JSON readable.
    assert f"body = '{record(1).body}'" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "\n\n\n" not in path.read_text()


def test_every_signed_revision_is_kept_newest_first_in_the_file_oldest_first_when_read(path: Path) -> None:
    path.write_text(HAND_WRITTEN)
    chain = [record(1)]
    for revision in (2, 3, 4):
        chain.append(record(revision))
        with edit_orbit_file(path) as edit:
            edit.set_controllers(tuple(chain))
        assert load_orbit_file(path).controllers == tuple(chain)
    document = tomllib.loads(path.read_text())
    assert json.loads(document["controllers"]["body"])["revision"] == 4
    assert [json.loads(entry["body"])["revision"] for entry in document["controllers"]["history"]] == [
        1,
        2,
        3,
    ]
    assert comments(path.read_text()) == comments(HAND_WRITTEN)


def test_comments_and_order_stay_through_every_edit(path: Path) -> None:
    path.write_text(HAND_WRITTEN)
    with edit_orbit_file(path) as edit:
        edit.add_node(node(3, "volta"))
        edit.save_group(
            GroupDefinition("glm-a", core="volta:/data/a.safetensors", nodes=("volta",), gpus=(0, 1))
        )
        edit.save_group(
            GroupDefinition("glm53", core="hertz:/b.safetensors", roce_ring=False, transfer_streams=4)
        )
        edit.replace_address("hertz", "10.0.0.2:29900")
    text = path.read_text()
    assert comments(text) == comments(HAND_WRITTEN)
    assert (
        text.index("maxwell:29900")
        < text.index("volta:29900")
        < text.index("# both of them")
        < text.index("[cluster")
    )
    orbit = load_orbit_file(path)
    assert [entry.name for entry in orbit.nodes] == ["maxwell", "hertz", "volta"]
    assert orbit.node("hertz").address == "10.0.0.2:29900"
    assert orbit.groups["glm53"] == GroupDefinition(
        "glm53", core="hertz:/b.safetensors", roce_ring=False, transfer_streams=4
    )
    assert orbit.groups["glm-a"].gpus == (0, 1)
    with edit_orbit_file(path) as edit:
        edit.remove_group("glm-a")
        edit.remove_node("volta")
    assert comments(path.read_text()) == comments(HAND_WRITTEN)


@pytest.mark.parametrize("order", [["maxwell", "hertz"], ["hertz", "maxwell"]])
def test_forgetting_every_node_leaves_the_comments(path: Path, order: list[str]) -> None:
    path.write_text(HAND_WRITTEN)
    for name in order:
        with edit_orbit_file(path) as edit:
            edit.remove_node(name)
        assert comments(path.read_text()) == comments(HAND_WRITTEN)
    orbit = load_orbit_file(path)
    assert orbit.nodes == ()
    assert orbit.clusters["sparks"] == ("maxwell", "hertz")
    with pytest.raises(NotFoundError, match="cluster sparks names the node maxwell, which is not paired"):
        orbit.cluster("sparks")


def test_removing_the_last_table_of_the_file_keeps_what_follows_it(path: Path) -> None:
    path.write_text(node_text(1, "maxwell") + "\n# the end\n")
    with edit_orbit_file(path) as edit:
        edit.remove_node("maxwell")
    assert comments(path.read_text()) == ["the end"]
    assert load_orbit_file(path).nodes == ()


def test_a_file_without_a_final_newline_is_edited(path: Path) -> None:
    path.write_text(node_text(1, "maxwell").rstrip("\n"))
    with edit_orbit_file(path) as edit:
        edit.add_node(node(2, "hertz"))
        edit.set_controllers((record(1), record(2)))
    assert [entry.name for entry in load_orbit_file(path).nodes] == ["maxwell", "hertz"]


def test_a_block_that_fails_writes_nothing(path: Path) -> None:
    path.write_text(HAND_WRITTEN)
    with pytest.raises(ZeroDivisionError), edit_orbit_file(path) as edit:
        edit.remove_node("maxwell")
        raise ZeroDivisionError
    assert path.read_text() == HAND_WRITTEN


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "dotfiles.toml"
    target.write_text(HAND_WRITTEN)
    path.symlink_to(target)
    with edit_orbit_file(path) as edit:
        edit.remove_node("hertz")
    assert path.is_symlink()
    assert [entry.name for entry in load_orbit_file(target).nodes] == ["maxwell"]


def test_two_commands_at_once_take_turns(path: Path) -> None:
    def add(number: int) -> None:
        with edit_orbit_file(path) as edit:
            edit.add_node(node(number, f"node{number}"))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.name for entry in load_orbit_file(path).nodes} == {f"node{number}" for number in range(6)}


def test_a_command_that_never_lets_go_is_named(path: Path) -> None:
    with (
        edit_orbit_file(path),
        pytest.raises(BusyError, match=r"Another flare command is changing .*orbit\.toml"),
        edit_orbit_file(path, lock_wait=0.1),
    ):
        pass


def test_an_editor_that_saved_meanwhile_is_not_overwritten(path: Path) -> None:
    path.write_text(HAND_WRITTEN)
    with pytest.raises(ConflictError, match="was changed by another program"), edit_orbit_file(path) as edit:
        edit.remove_node("hertz")
        path.write_text(HAND_WRITTEN + "# saved by an editor\n")
    assert path.read_text().endswith("# saved by an editor\n")


def test_what_another_command_removed_is_named(path: Path) -> None:
    path.write_text(HAND_WRITTEN)
    with (
        pytest.raises(NotFoundError, match="volta is not in the orbit file any more"),
        edit_orbit_file(path) as edit,
    ):
        edit.remove_node("volta")


def test_clusters_choose_the_nodes(path: Path) -> None:
    path.write_text(HAND_WRITTEN)
    orbit = load_orbit_file(path)
    assert [entry.name for entry in orbit.scope(None)] == ["maxwell", "hertz"]
    path.write_text(HAND_WRITTEN + '[cluster.other]\nnodes = ["hertz"]\n')
    orbit = load_orbit_file(path)
    assert [entry.name for entry in orbit.scope("other")] == ["hertz"]
    with pytest.raises(
        ConfigError, match=r"Several clusters are defined \(sparks, other\): name one with --cluster"
    ):
        orbit.scope(None)
    with pytest.raises(NotFoundError, match="no cluster named spark in"):
        orbit.scope("spark")
    with pytest.raises(ConfigError, match="--nodes names the node hertz twice"):
        orbit.named(["hertz", "hertz"], "--nodes")
    with pytest.raises(NotFoundError, match=r"No node named volta is paired\. Known nodes: maxwell, hertz\."):
        orbit.node("volta")


WRONG = {
    "syntax": ("[controllers]\nbody == 1\n", r"orbit\.toml:2:7: Invalid value\."),
    "unfinished": ('[controllers]\nbody = "', r"orbit\.toml:2:1: .*there the file ends"),
    "unknown section": (
        "[[nodes]]\n",
        r"orbit\.toml:1: unknown key nodes in orbit\.toml\. Did you mean node\?",
    ),
    "unknown node key": (
        node_text(1, "maxwell") + 'adress = "x"\n',
        r"orbit\.toml:6: unknown key adress in node maxwell\. Did you mean address\?",
    ),
    "unknown group key": (
        '[[group]]\nname = "a"\n\n[[group]]\nname = "b"\nzzz = 1\n',
        r"orbit\.toml:6: unknown key zzz in group b\. Known here: name, core",
    ),
    "unknown cluster key": (
        '[cluster.a]\nnodes = []\nnode = ["x"]\n',
        r"orbit\.toml:3: unknown key node in cluster a\. Did you mean nodes\?",
    ),
    "unknown record key": (
        "[controllers]\nbodi = 1\n",
        r"orbit\.toml:2: unknown key bodi in \[controllers\]",
    ),
    "node name twice": (
        node_text(1, "maxwell") + node_text(2, "maxwell"),
        r"orbit\.toml:7: the node name maxwell is there twice",
    ),
    "key twice": (node_text(1, "maxwell") + node_text(1, "hertz"), r"node hertz has the key of maxwell"),
    "fingerprint of another": (
        node_text(1, "maxwell").replace(node(1, "x").fingerprint, "ab" * 32),
        r"orbit\.toml:3: the fingerprint of node maxwell is not that of its public_key",
    ),
    "no key": (
        '[[node]]\nname = "a"\nfingerprint = "x"\naddress = "a:1"\n',
        r"orbit\.toml:2: public_key of node a is",
    ),
    "bad key": (
        '[[node]]\nname = "a"\nfingerprint = "x"\naddress = "a:1"\npublic_key = "zz"\n',
        r"orbit\.toml:5: public_key of node a: A public key is written as 64 hex digits",
    ),
    "bad address": (
        node_text(1, "maxwell") + node_text(2, "hertz").replace("hertz:29900", "hertz:abc"),
        r"orbit\.toml:10: address of node hertz: \"hertz:abc\" is no address: a port is a whole number",
    ),
    "bad node name": ('[[node]]\nname = "-a"\n', r"orbit\.toml:2: \"-a\" is no node name"),
    "name of wrong kind": (
        "[[node]]\nname = 3\n",
        r"orbit\.toml:2: name of \[\[node\]\] number 1 must be a text",
    ),
    "node as table": ('[node]\nname = "a"\n', r"node is written as \[\[node\]\]"),
    "cluster as text": ('cluster = "x"\n', r"a cluster is written as \[cluster\.NAME\]"),
    "cluster without table": ("[cluster]\na = 3\n", r"orbit\.toml:2: cluster a is written as \[cluster\.a\]"),
    "cluster nodes of numbers": (
        "[cluster.a]\nnodes = [1]\n",
        r"orbit\.toml:2: nodes of cluster a must be a list of texts",
    ),
    "cluster without nodes": ("[cluster.a]\n", r"cluster a has no nodes"),
    "cluster name": ('[cluster."a b"]\nnodes = []\n', r'"a b" is no'),
    "group twice": (
        '[[group]]\nname = "a"\n[[group]]\nname = "a"\n',
        r"orbit\.toml:4: the group name a is there twice",
    ),
    "group gpus": (
        '[[group]]\nname = "a"\ngpus = ["0"]\n',
        r"orbit\.toml:3: gpus of group a must be a list of whole numbers",
    ),
    "group gpus below zero": ('[[group]]\nname = "a"\ngpus = [-1]\n', r"gpus of group a are device indices"),
    "group ring": ('[[group]]\nname = "a"\nroce_ring = 1\n', r"roce_ring of group a must be true or false"),
    "group streams": (
        '[[group]]\nname = "a"\ntransfer_streams = 65\n',
        r"transfer_streams of group a must be .* 1 to 64",
    ),
    "controllers as text": ('controllers = "x"\n', r"controllers is written as a table"),
    "history as text": (
        HAND_WRITTEN.replace("signer =", "history = 1\nsigner ="),
        r"history is written as \[\[controllers\.history\]\]",
    ),
    "damaged record": (
        HAND_WRITTEN.replace(record(1).signature.hex(), "00"),
        r"orbit\.toml:4: this signed record is damaged .* restore the file from a backup",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_line(path: Path, name: str) -> None:
    text, expected = WRONG[name]
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_orbit_file(path)


def test_several_faults_are_told_at_once(path: Path) -> None:
    path.write_text('[[node]]\nname = "-a"\n[cluster.x]\nnode = []\n')
    with pytest.raises(ConfigError) as caught:
        load_orbit_file(path)
    assert len(caught.value.message.splitlines()) >= 3


def test_bytes_that_are_no_text_are_named(path: Path) -> None:
    path.write_bytes(b"[controllers]\n# \xff\n")
    with pytest.raises(ConfigError, match=r"orbit\.toml:2: the file is not UTF-8 text"):
        load_orbit_file(path)


def test_a_layout_that_cannot_be_edited_safely_is_left_alone(path: Path) -> None:
    path.write_text('group = [{name = "a"}]\n' + node_text(1, "maxwell"))
    with pytest.raises(ConfigError, match="cannot be edited safely") as caught, edit_orbit_file(path) as edit:
        edit.save_group(GroupDefinition("b", core="/x"))
    assert "nothing was changed" in caught.value.message
    path.write_text(f"{node_text(1, 'maxwell')}[cluster.a]\nnodes = []\n{node_text(2, 'hertz')}")
    with edit_orbit_file(path) as edit:
        edit.add_node(node(3, "volta"))
    assert [entry.name for entry in load_orbit_file(path).nodes] == ["maxwell", "hertz", "volta"]
