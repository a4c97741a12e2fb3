"""Edits and line numbers of a TOML text that a person keeps by hand.

tomlkit keeps comments and order, but it counts the comment above a table to the table before it. Appending or
removing a table therefore has to move that trailing block, or a comment would end up above the wrong table.
Every edit is checked by the caller against an ordinary parse of the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)((?:\s*\.\s*[^=\s]+)*)\s*=""")
# The four quotes of TOML; the triple ones first, because each starts like a single one.
_QUOTES = ('"""', "'''", '"', "'")


@dataclass(slots=True)
class TableLines:
    """Where one table stands: dotted header, place among tables of that header, the line of each key."""

    header: str
    index: int
    line: int
    keys: dict[str, int] = field(default_factory=dict)


def table_lines(text: str) -> list[TableLines]:
    """Find each table's header and keys.

    Args:
        text: a TOML document that parses.

    Returns:
        One entry a table, in the text's order; the first is the document itself (header "").
    """
    tables = [TableLines("", 0, 1)]
    seen: dict[str, int] = {}
    for number, line in _statements(text):
        header = _HEADER.match(line)
        if header is not None:
            name = ".".join(_bare(part) for part in header.group(2).split("."))
            tables.append(TableLines(name, seen.get(name, 0), number))
            seen[name] = seen.get(name, 0) + 1
            continue
        key = _KEY.match(line)
        if key is not None:
            tables[-1].keys.setdefault(_bare(key.group(1)), number)
    return tables


def line_of(text: str, header: str, index: int, key: str) -> int | None:
    """The line of a key in the index-th table with this header, or None when it is written in another way."""
    for table in table_lines(text):
        if table.header == header and table.index == index and key in table.keys:
            return table.keys[key]
    return None


def _bare(part: str) -> str:
    return part.strip().strip("\"'")


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Lines that begin a statement, with their number from 1: not those inside a string or an array."""
    inside: str | None = None
    depth = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if inside is None and depth == 0:
            yield number, line
            header = _HEADER.match(line)
            if header is not None:
                continue
        position = 0
        while position < len(line):
            rest = line[position:]
            if inside is not None:
                if rest.startswith("\\") and inside.startswith('"'):
                    position += 2
                elif rest.startswith(inside):
                    position += len(inside)
                    inside = None
                else:
                    position += 1
                continue
            quote = next((quote for quote in _QUOTES if rest.startswith(quote)), None)
            if quote is not None:
                inside = quote
                position += len(quote)
            elif rest.startswith("#"):
                break
            else:
                depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(rest[0], 0)
                position += 1
        if inside is not None and len(inside) == 1:
            inside = None


def append_table(document: Any, name: str, values: Mapping[str, object]) -> None:
    """Add a [[name]] table after the last one of that name.

    Args:
        document: a tomlkit document, changed in place.
        name: the array's name, such as "node".
        values: the table's keys, in order; None is left out.
    """
    import tomlkit

    table = tomlkit.table()
    set_values(table, values)
    array = document.get(name)
    if not array:
        # A new section keeps a blank line's distance from what stands before it.
        if document.as_string().strip():
            document.add(tomlkit.nl())
        array = tomlkit.aot()
        array.append(table)
        document[name] = array
        return
    last = array[-1]
    trailing = _take_trailing(last)
    last.add(tomlkit.nl())
    array.append(table)
    for item in trailing:
        table.add(item)
    if not trailing and array is not _last_item(document):
        table.add(tomlkit.nl())


def remove_table(document: Any, name: str, index: int) -> None:
    """Remove the index-th [[name]] table and leave the comments that follow it where they are."""
    import tomlkit

    array = document[name]
    trailing = _take_trailing(array[index])
    text = "".join(item.as_string() for item in trailing)
    if index > 0:
        before = array[index - 1]
        for item in trailing:
            before.add(item)
        del array[index]
        return
    follower = array[1] if len(array) > 1 else _after(document, name)
    del array[0]
    if not array:
        del document[name]
    if follower is None:
        for item in trailing:
            document.add(item)
    elif "#" in text:
        follower.trivia.indent = text + follower.trivia.indent
    elif isinstance(follower, tomlkit.items.Table):
        follower.trivia.indent = follower.trivia.indent.lstrip("\n")


def set_values(table: Any, values: Mapping[str, object]) -> None:
    """Set keys in place, so that the comments beside them stay; None removes the key."""
    import tomlkit

    for key, value in values.items():
        if value is None:
            table.pop(key, None)
            continue
        item: Any
        if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
            # JSON is full of double quotes: a literal string keeps a record readable.
            item = tomlkit.string(value, literal=True)
        else:
            item = tomlkit.item(list(value) if isinstance(value, tuple) else value)
        if key in table and table[key] == item:
            continue
        table[key] = item


def _take_trailing(table: Any) -> list[Any]:
    """Remove and return the comments and blank lines behind a table's last key."""
    body = table.value.body
    taken: list[Any] = []
    while body and body[-1][0] is None:
        taken.append(body.pop()[1])
    taken.reverse()
    return taken


def _last_item(document: Any) -> Any:
    keyed = [item for key, item in document.body if key is not None]
    return keyed[-1] if keyed else None


def _after(document: Any, name: str) -> Any:
    """The first table behind the whole array `name`, or None when the array is the last thing in the file."""
    import tomlkit

    found = False
    for key, item in document.body:
        if key is not None and key.key == name:
            found = True
        elif found and isinstance(item, tomlkit.items.AoT) and len(item):
            return item[0]
        elif found and isinstance(item, tomlkit.items.Table):
            # [cluster.sparks] alone is a table inside an implicit one, which has no header of its own.
            inner: Any = item
            while inner.is_super_table() and inner.value.body:
                inner = inner.value.body[0][1]
            return inner
    return None
