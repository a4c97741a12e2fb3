"""What orbit.toml says, as values, and the strict reading of it.

Reading uses the standard library's parser, which is exact about lines and columns; `orbit_file` writes.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from flare.errors import ConfigError, FlareError, NotFoundError
from flare.identity import fingerprint, public_key_from_hex
from flare.limits import MAX_STREAMS
from flare.orbit.toml_text import line_of
from flare.paths import check_name
from flare.printable import printable
from flare.session.addresses import parse_address
from flare.trust.signed import SignedRecord
from flare.values import dataclass

_RECORD_KEYS = ("body", "signer", "signature")
_KEYS: dict[str, tuple[str, ...]] = {
    "": ("controllers", "node", "cluster", "group"),
    "controllers": (*_RECORD_KEYS, "history"),
    "controllers.history": _RECORD_KEYS,
    "node": ("name", "fingerprint", "public_key", "address"),
    "cluster": ("nodes",),
    "group": (
        "name",
        "core",
        "nodes",
        "gpus",
        "serving",
        "rank_zero",
        "roce_ring",
        "roce_chain",
        "transfer_streams",
        "executable",
        "publisher_keys",
        "trust_store",
    ),
}
_TOML_PLACE = re.compile(r"^(.*) \(at line (\d+), column (\d+)\)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A paired node: how it is named here, who it is, where it answers ("host:port")."""

    name: str
    public_key: bytes
    address: str

    @property
    def fingerprint(self) -> str:
        """The hex SHA-256 of the node's public key."""
        return fingerprint(self.public_key)


@dataclass(frozen=True, slots=True)
class GroupDefinition:
    """A saved group: what `flare orbit run --name NAME` starts when the command line says no more.

    Empty tuples and None mean that the definition leaves that to the command line or to placement.
    """

    name: str
    core: str | None = None
    nodes: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    serving: tuple[str, ...] = ()
    rank_zero: tuple[str, ...] = ()
    roce_ring: bool | None = None
    roce_chain: bool | None = None
    transfer_streams: int | None = None
    executable: str | None = None
    publisher_keys: tuple[str, ...] = ()
    trust_store: str | None = None

    def to_table(self) -> dict[str, object]:
        """The keys of its [[group]] table in the order of the documentation; None where nothing is said."""
        values = {key: getattr(self, key) for key in _KEYS["group"]}
        return {key: None if value == () else value for key, value in values.items()}


@dataclass(frozen=True, slots=True)
class OrbitFile:
    """One reading of orbit.toml.

    Attributes:
        path: where it stands, for messages.
        controllers: every signed controller-set record, oldest first; empty before the first pairing.
        nodes, clusters, groups: in the file's order.
    """

    path: Path
    controllers: tuple[SignedRecord, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()
    clusters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: Mapping[str, GroupDefinition] = field(default_factory=dict)

    def node(self, name: str) -> NodeEntry:
        """Return the node of that name.

        Raises:
            NotFoundError: there is none; the message lists what there is.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise NotFoundError(
            f"No node named {printable(name)} is paired. "
            f"{_known('nodes', [node.name for node in self.nodes])} Pair it with `flare orbit pair HOST`, or "
            "look at `flare orbit status`."
        )

    def node_of_key(self, public_key: bytes) -> NodeEntry | None:
        """Return the node with that key, or None."""
        return next((node for node in self.nodes if node.public_key == public_key), None)

    def named(
        self, names: Sequence[str], where: str, *, wrong: type[FlareError] = ConfigError
    ) -> tuple[NodeEntry, ...]:
        """Return the nodes of those names, in that order.

        Args:
            names: as the operator wrote them.
            where: what names them, such as "cluster sparks" or "--nodes", for the message.
            wrong: the error for a name that is there twice: whose words they are decides.

        Raises:
            ConfigError, or `wrong`: one is named twice.
            NotFoundError: one is not paired.
        """
        found = []
        for position, name in enumerate(names):
            if name in names[:position]:
                raise wrong(f"{where} names the node {printable(name)} twice; each may be there once.")
            node = next((node for node in self.nodes if node.name == name), None)
            if node is None:
                raise NotFoundError(
                    f"{where} names the node {printable(name)}, which is not paired. "
                    f"{_known('nodes', [node.name for node in self.nodes])} Pair it with `flare orbit pair`, "
                    f"or correct {where}."
                )
            found.append(node)
        return tuple(found)

    def cluster(self, name: str) -> tuple[NodeEntry, ...]:
        """Return a cluster's nodes in their order.

        Raises:
            NotFoundError: there is no such cluster, or it names a node that is not paired.
        """
        if name not in self.clusters:
            raise NotFoundError(
                f"There is no cluster named {printable(name)} in {self.path}. "
                f"{_known('clusters', list(self.clusters))} A cluster is written there as "
                f'[cluster.{printable(name)}] with nodes = ["...", "..."].'
            )
        return self.named(self.clusters[name], f"cluster {printable(name)}")

    def scope(self, cluster: str | None) -> tuple[NodeEntry, ...]:
        """Return the nodes that status, ls, cores, dashboard, attach and stop work on.

        Args:
            cluster: what --cluster says, or None.

        Returns:
            That cluster's nodes; else the sole cluster's, or every paired node where none is defined.

        Raises:
            ConfigError: several clusters are defined and none was named.
            NotFoundError: nothing is paired, or there is no such cluster.
        """
        if cluster is not None:
            return self.cluster(cluster)
        if len(self.clusters) > 1:
            raise ConfigError(
                f"Several clusters are defined ({', '.join(self.clusters)}): name one with --cluster NAME."
            )
        for name in self.clusters:
            return self.cluster(name)
        return self.all_nodes()

    def all_nodes(self) -> tuple[NodeEntry, ...]:
        """Return every paired node.

        Raises:
            NotFoundError: nothing is paired yet.
        """
        if not self.nodes:
            raise NotFoundError(
                "No node is paired yet. Run `flare agent install` on each serving host, then `flare orbit "
                "pair HOST...` here."
            )
        return self.nodes


def _known(what: str, names: Sequence[str]) -> str:
    return f"Known {what}: {', '.join(names)}." if names else f"There are no {what} yet."


def suggestion(word: str, choices: Sequence[str]) -> str:
    """Return " Did you mean ...?" when one of the choices is close to the word, else the list of them."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f" Did you mean {close[0]}?" if close else f" Known here: {', '.join(choices)}."


def parse_orbit_file(path: Path, data: bytes) -> OrbitFile:
    """Read orbit.toml strictly.

    Args:
        path: for the messages.
        data: its bytes.

    Raises:
        ConfigError: one line for each thing that is wrong, with file, line and a way to mend it.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise ConfigError(f"{path}:{line}: the file is not UTF-8 text. Save it as UTF-8.") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{path}:{_place(problem, text)} Correct it, then run the command again.") from None
    return _Reading(path, text).orbit_file(document)


def _place(problem: tomllib.TOMLDecodeError, text: str) -> str:
    match = _TOML_PLACE.match(str(problem))
    if match is not None:
        return f"{match.group(2)}:{match.group(3)}: {printable(match.group(1))}."
    # "at end of document" carries no numbers.
    reason = str(problem).removesuffix(" (at end of document)")
    return f"{text.count(chr(10)) + 1}:1: {printable(reason)}, and there the file ends."


class _Reading:
    """One strict pass over the parsed document that gathers every complaint before it raises."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.problems: list[str] = []

    def orbit_file(self, document: dict[str, Any]) -> OrbitFile:
        self.check_keys(document, "", 0, "orbit.toml")
        controllers = self.controllers(document.get("controllers", {}))
        nodes = self.nodes(self.tables(document, "node"))
        clusters = self.clusters(document.get("cluster", {}))
        groups = self.groups(self.tables(document, "group"))
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        return OrbitFile(self.path, controllers, nodes, clusters, groups)

    def complain(self, header: str, index: int, key: str, sentence: str) -> None:
        line = line_of(self.text, header, index, key)
        self.problems.append(f"{self.path}{f':{line}' if line else ''}: {sentence}")

    def check_keys(self, table: dict[str, Any], header: str, index: int, where: str, kind: str = "") -> None:
        known = _KEYS[kind or header]
        for key in table:
            if key not in known:
                # The first key of a top-level table is a header, not a "key =" line.
                sentence = f"unknown key {printable(key)} in {where}.{suggestion(key, known)}"
                line = line_of(self.text, header, index, key) or self.header_line(key)
                self.problems.append(f"{self.path}{f':{line}' if line else ''}: {sentence}")

    def header_line(self, key: str) -> int | None:
        for number, line in enumerate(self.text.split("\n"), start=1):
            if re.match(rf"\s*\[\[?\s*[\"']?{re.escape(key)}\b", line):
                return number
        return None

    def tables(self, document: dict[str, Any], name: str) -> list[dict[str, Any]]:
        value = document.get(name, [])
        if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
            return value
        self.complain("", 0, name, f"{name} is written as [[{name}]], one table for each {name}.")
        return []

    def text_value(
        self, table: dict[str, Any], header: str, index: int, key: str, where: str, required: bool = True
    ) -> str | None:
        value = table.get(key)
        if value is None and not required:
            return None
        if not isinstance(value, str) or not value:
            missing = "is missing" if value is None else "must be a text that is not empty"
            line_key = key if value is not None else "name"
            self.complain(header, index, line_key, f"{key} of {where} {missing}.")
            return None
        return value

    def list_value(
        self, table: dict[str, Any], header: str, index: int, key: str, where: str, kind: type
    ) -> tuple[Any, ...]:
        value = table.get(key, [])
        if not isinstance(value, list) or any(type(entry) is not kind for entry in value):
            noun = "texts" if kind is str else "whole numbers"
            self.complain(header, index, key, f"{key} of {where} must be a list of {noun}.")
            return ()
        return tuple(value)

    def name_value(self, table: dict[str, Any], header: str, index: int) -> str | None:
        name = self.text_value(table, header, index, "name", f"[[{header}]] number {index + 1}")
        if name is None:
            return None
        try:
            check_name(name, f"{header} name")
        except FlareError as problem:
            self.complain(header, index, "name", problem.message)
            return None
        return name

    def controllers(self, table: Any) -> tuple[SignedRecord, ...]:
        if not isinstance(table, dict):
            self.complain("", 0, "controllers", "controllers is written as a table, [controllers].")
            return ()
        if not table:
            return ()
        self.check_keys(table, "controllers", 0, "[controllers]")
        history = table.get("history", [])
        if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
            self.complain(
                "controllers", 0, "history", "history is written as [[controllers.history]] tables."
            )
            history = []
        records = []
        for index, entry in enumerate(history):
            self.check_keys(entry, "controllers.history", index, "[[controllers.history]]")
            records.append(self.record(entry, "controllers.history", index))
        records.append(self.record(table, "controllers", 0))
        return tuple(record for record in records if record is not None)

    def record(self, table: dict[str, Any], header: str, index: int) -> SignedRecord | None:
        values = [self.text_value(table, header, index, key, f"[{header}]") for key in _RECORD_KEYS]
        body, signer, signature = values
        if body is None or signer is None or signature is None:
            return None
        try:
            return SignedRecord.from_json({"body": body, "signer": signer, "signature": signature})
        except FlareError as problem:
            self.complain(
                header,
                index,
                "signer",
                f"this signed record is damaged ({problem.message}) Records are written by Flare: restore "
                "the file from a backup or from another controller.",
            )
            return None

    def nodes(self, tables: list[dict[str, Any]]) -> tuple[NodeEntry, ...]:
        found: list[NodeEntry] = []
        for index, table in enumerate(tables):
            where = f"node {printable(str(table.get('name', index + 1)))}"
            self.check_keys(table, "node", index, where)
            name = self.name_value(table, "node", index)
            key_text = self.text_value(table, "node", index, "public_key", where)
            address = self.text_value(table, "node", index, "address", where)
            printed = self.text_value(table, "node", index, "fingerprint", where)
            if name is None or key_text is None or address is None or printed is None:
                continue
            try:
                entry = NodeEntry(name, public_key_from_hex(key_text), address)
            except FlareError as problem:
                self.complain("node", index, "public_key", f"public_key of {where}: {problem.message}")
                continue
            try:
                parse_address(address)
            except FlareError as problem:
                self.complain("node", index, "address", f"address of {where}: {problem.message}")
            if entry.fingerprint != printed:
                self.complain(
                    "node",
                    index,
                    "fingerprint",
                    f"the fingerprint of {where} is not that of its public_key. One of them was changed: "
                    f"compare with `flare agent status` on the host, or `flare orbit forget {name}` and "
                    "pair it again.",
                )
            for other in found:
                if other.name == name:
                    self.complain("node", index, "name", f"the node name {name} is there twice; rename one.")
                elif other.public_key == entry.public_key:
                    self.complain(
                        "node",
                        index,
                        "public_key",
                        f"node {name} has the key of {other.name}; remove one of them.",
                    )
            found.append(entry)
        return tuple(found)

    def clusters(self, table: Any) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        if not isinstance(table, dict):
            self.complain(
                "", 0, "cluster", 'a cluster is written as [cluster.NAME] with nodes = ["...", "..."].'
            )
            return found
        for name, content in table.items():
            header = f"cluster.{name}"
            if not isinstance(content, dict):
                self.complain(
                    "cluster", 0, name, f"cluster {printable(name)} is written as [cluster.{name}]."
                )
                continue
            try:
                check_name(name, "cluster name")
            except FlareError as problem:
                self.problems.append(f"{self.path}: {problem.message}")
            self.check_keys(content, header, 0, f"cluster {printable(name)}", kind="cluster")
            nodes = self.list_value(content, header, 0, "nodes", f"cluster {printable(name)}", str)
            if not nodes and "nodes" not in content:
                self.problems.append(f'{self.path}: cluster {printable(name)} has no nodes = ["...", "..."].')
            found[name] = nodes
        return found

    def groups(self, tables: list[dict[str, Any]]) -> dict[str, GroupDefinition]:
        found: dict[str, GroupDefinition] = {}
        for index, table in enumerate(tables):
            where = f"group {printable(str(table.get('name', index + 1)))}"
            self.check_keys(table, "group", index, where)
            name = self.name_value(table, "group", index)
            values: dict[str, Any] = {
                key: self.text_value(table, "group", index, key, where, required=False)
                for key in ("core", "executable", "trust_store")
            }
            for key in ("nodes", "serving", "rank_zero", "publisher_keys"):
                values[key] = self.list_value(table, "group", index, key, where, str)
            values["gpus"] = self.list_value(table, "group", index, "gpus", where, int)
            for key in ("roce_ring", "roce_chain"):
                values[key] = table.get(key)
                if not isinstance(values[key], bool | None):
                    self.complain("group", index, key, f"{key} of {where} must be true or false.")
            if values["roce_ring"] is True and values["roce_chain"] is True:
                sentence = f"roce_ring and roce_chain of {where} are both true; nodes are cabled one way."
                self.complain("group", index, "roce_chain", sentence)
            streams = values["transfer_streams"] = table.get("transfer_streams")
            if streams is not None and (type(streams) is not int or not 1 <= streams <= MAX_STREAMS):
                self.complain(
                    "group",
                    index,
                    "transfer_streams",
                    f"transfer_streams of {where} must be a whole number from 1 to {MAX_STREAMS}.",
                )
            if any(number < 0 for number in values["gpus"]):
                self.complain("group", index, "gpus", f"gpus of {where} are device indices, from 0 upward.")
            if name is None:
                continue
            if name in found:
                self.complain("group", index, "name", f"the group name {name} is there twice; rename one.")
            found[name] = GroupDefinition(name=name, **values)
        return found
