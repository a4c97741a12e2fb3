"""orbit.toml: the controller's memory. Nothing else writes it.

Pairing and `flare orbit controllers` write it beside the operator's own edits, so an edit changes what it
must and leaves comments and order alone. Two commands at once take turns by a lock; an editor that saved in
between is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flare.errors import ConfigError, ConflictError, NotFoundError
from flare.files import LOCK_WAIT, ensure_private_folder, locked, read_trusted, write_atomic
from flare.orbit.orbit_records import GroupDefinition, NodeEntry, OrbitFile, parse_orbit_file
from flare.orbit.toml_text import append_table, remove_table, set_values
from flare.trust.signed import SignedRecord

MAX_ORBIT_FILE = 16 * 1024 * 1024  # thousands of controller revisions of 64 keys each stay below this


def load_orbit_file(path: Path) -> OrbitFile:
    """Read orbit.toml; a file that does not exist is an empty orbit.

    Raises:
        ConfigError: it says something that cannot be meant, and the message names lines; or others can
            change it.
    """
    return parse_orbit_file(path, _read(path))


def _read(path: Path) -> bytes:
    try:
        # It names the keys that grants are made for, and programs that are uploaded.
        return read_trusted(path, MAX_ORBIT_FILE, "The orbit file", ConfigError)
    except NotFoundError:
        return b""


class OrbitEdit:
    """Changes to orbit.toml that become visible together, when the `edit_orbit_file` block ends.

    Attributes:
        before: the file as it was when the block began; decisions are taken on it, under the lock.
    """

    def __init__(self, path: Path, data: bytes) -> None:
        import tomlkit

        self.before = parse_orbit_file(path, data)
        self._path = path
        self._data = data
        self._text = data.decode("utf-8")
        self._parse: Callable[[str], Any] = tomlkit.parse

    @property
    def now(self) -> OrbitFile:
        """The file as it would be written now."""
        return parse_orbit_file(self._path, self._text.encode())

    def set_controllers(self, records: tuple[SignedRecord, ...]) -> None:
        """Store a chain of controller-set records, oldest first; the newest becomes [controllers] itself."""
        import tomlkit

        document = self._open()
        table = document.get("controllers")
        if table is None:
            if not document.body:
                document.add(
                    tomlkit.comment("The orbit of this controller: paired nodes, clusters, saved groups.")
                )
            table = tomlkit.table()
            document["controllers"] = table
        set_values(table, _record_table(records[-1]))
        history = tomlkit.aot()
        for record in records[:-1]:
            entry = tomlkit.table()
            set_values(entry, _record_table(record))
            history.append(entry)
        had_history = table.pop("history", None) is not None
        if len(history):
            if had_history or "node" in document:
                history[-1].add(tomlkit.nl())
            table["history"] = history
        self._accept(document, controllers=records)

    def add_node(self, node: NodeEntry) -> None:
        """Add a node behind the others."""
        document = self._open("node")
        append_table(document, "node", _node_table(node))
        self._accept(document, nodes=(*self.now.nodes, node))

    def replace_address(self, name: str, address: str) -> None:
        """Write another address for a node that is already there."""
        nodes = self.now.nodes
        index = _index([node.name for node in nodes], name)
        changed = NodeEntry(name, nodes[index].public_key, address)
        document = self._open("node")
        set_values(document["node"][index], {"address": address})
        self._accept(document, nodes=(*nodes[:index], changed, *nodes[index + 1 :]))

    def remove_node(self, name: str) -> None:
        """Remove a node; clusters and groups that name it stay as the operator wrote them."""
        nodes = self.now.nodes
        index = _index([node.name for node in nodes], name)
        document = self._open("node")
        remove_table(document, "node", index)
        self._accept(document, nodes=(*nodes[:index], *nodes[index + 1 :]))

    def save_group(self, group: GroupDefinition) -> None:
        """Add a saved group, or change the one of that name in place."""
        groups = dict(self.now.groups)
        document = self._open("group")
        if group.name in groups:
            set_values(document["group"][_index(list(groups), group.name)], group.to_table())
        else:
            append_table(document, "group", group.to_table())
        groups[group.name] = group
        self._accept(document, groups=groups)

    def remove_group(self, name: str) -> None:
        """Remove a saved group."""
        groups = dict(self.now.groups)
        document = self._open("group")
        remove_table(document, "group", _index(list(groups), name))
        del groups[name]
        self._accept(document, groups=groups)

    def _accept(self, document: Any, **changed: object) -> None:
        """Take an edited document when it says exactly what was meant; tomlkit can misplace odd layouts."""
        text = document.as_string()
        old = self.now
        try:
            new: OrbitFile | None = parse_orbit_file(self._path, text.encode())
        except ConfigError:
            new = None
        for name in ("controllers", "nodes", "clusters", "groups"):
            if new is None or getattr(new, name) != changed.get(name, getattr(old, name)):
                raise self._unsafe()
        self._text = text

    def _open(self, name: str = "") -> Any:
        """Parse for one edit; a [[name]] section in another notation cannot be edited."""
        import tomlkit

        document = self._parse(self._text)
        if name and name in document and not isinstance(document[name], tomlkit.items.AoT):
            raise self._unsafe()
        return document

    def _unsafe(self) -> ConfigError:
        return ConfigError(
            f"{self._path} is laid out in a way that cannot be edited safely; nothing was changed. Write "
            "every table under a header of its own and those of one kind one after the other "
            "([controllers], [[node]], [cluster.NAME], [[group]]), then run the command again."
        )

    def write(self) -> None:
        """Write the file, unless somebody else changed it since it was read."""
        if self._text.encode() == self._data:
            return
        # A link (a person's dotfiles, say) stays a link: the file that it names is replaced.
        target = self._path.resolve()
        if _read(target) != self._data:
            raise ConflictError(
                f"{self._path} was changed by another program just now. Run the command again."
            )
        write_atomic(target, self._text.encode())


@contextmanager
def edit_orbit_file(path: Path, *, lock_wait: float = LOCK_WAIT) -> Iterator[OrbitEdit]:
    """Change orbit.toml: `with edit_orbit_file(path) as edit: edit.add_node(...)`.

    The block runs under a lock and is written when it ends without an error.

    Args:
        path: orbit.toml.
        lock_wait: seconds to wait for another command that edits it.

    Raises:
        BusyError: another command holds the file for too long.
        ConflictError: an editor saved it meanwhile.
        ConfigError: it cannot be read, or not edited safely.
        StorageError: it cannot be written.
    """
    ensure_private_folder(path.parent)
    with locked(path, wait=lock_wait):
        edit = OrbitEdit(path, _read(path))
        yield edit
        edit.write()


def _index(names: list[str], name: str) -> int:
    if name not in names:
        raise NotFoundError(f"{name} is not in the orbit file any more: another command removed it.")
    return names.index(name)


def _record_table(record: SignedRecord) -> dict[str, object]:
    return {"body": record.body, "signer": record.signer.hex(), "signature": record.signature.hex()}


def _node_table(node: NodeEntry) -> dict[str, object]:
    return {
        "name": node.name,
        "fingerprint": node.fingerprint,
        "public_key": node.public_key.hex(),
        "address": node.address,
    }
