"""JSON as this project reads and writes it: bounded, without ambiguity, with errors that name the member.

Two parsers that disagree about a duplicate key, a NaN or a lone surrogate can be made to see two
different documents behind one signature, so all of these are refused (docs/protocol.md, "JSON").
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from flare.errors import FlareError, RemoteProtocolError

MAX_DEPTH = 32  # deeper nesting has no use in what we write and costs recursion
MAX_COUNT = 2**53 - 1  # the largest integer that every JSON reader keeps exactly
DEFAULT_TEXT_LIMIT = 64 * 1024  # characters in one string member unless its reader says otherwise

ErrorClass = Callable[[str], FlareError]
Item = TypeVar("Item")
Convert = Callable[[object, str], Item]  # (value, where it stands) -> item; may raise
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
# Outside strings only brackets decide how deep a text is nested, and here either kind counts the same.
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")
# Every value but the outermost stands behind one of these, and so does every member's name.
_NOT_BEFORE_VALUES = bytes(code for code in range(256) if code not in b"[{,:")
_HEX = re.compile(r"[0-9a-f]*\Z")
_MISSING: Any = object()


def canonical(value: object) -> str:
    """Return `value` as JSON with sorted keys, no spaces and only ASCII: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def loads(
    data: bytes | str,
    *,
    limit: int,
    what: str,
    error: ErrorClass = RemoteProtocolError,
    values: int | None = None,
    depth: int = MAX_DEPTH,
) -> dict[str, Any]:
    """Parse one JSON object under all rules.

    Args:
        data: UTF-8 bytes, or text.
        limit: the most bytes (characters, for text) that are looked at.
        what: names the document in an error, such as "STATUS" or "the core index".
        error: the class that is raised; a parser of a peer's bytes keeps the default.
        values: the most commas, colons and opening brackets outside strings: what parsing costs depends on
            those and not on the bytes. None for no bound.
        depth: the most levels of nesting.

    Raises:
        error: what is wrong, beginning with `what`.
    """
    if len(data) > limit:
        raise error(f"{what} has {len(data)} bytes; at most {limit} are allowed.")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except UnicodeDecodeError as problem:
        raise error(f"{what} is not UTF-8 (byte {problem.start}).") from None
    try:
        _check_shape(data if isinstance(data, bytes) else text.encode(), what, error, values, depth)
    except UnicodeEncodeError:
        raise error(f"{what} has a lone surrogate in a string.") from None

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            times = Counter(key for key, _ in pairs)
            twice = next(key for key, _ in pairs if times[key] > 1)
            raise error(f'{what} has the key "{twice[:80]}" twice.')
        return result

    def refuse_constant(text: str) -> NoReturn:
        raise error(f"{what} has {text}, which is no JSON number.")

    def finite(text: str) -> float:
        number = float(text)
        if not -math.inf < number < math.inf:
            raise error(f"{what} has {text[:80]}, which is too large for a number.")
        return number

    try:
        value = json.loads(
            text, object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant, parse_float=finite
        )
    except json.JSONDecodeError as problem:
        raise error(f"{what} is not JSON: {problem.msg} at character {problem.pos}.") from None
    except (RecursionError, ValueError):  # ValueError: an integer of thousands of digits
        raise error(f"{what} is not JSON that can be read: a number is too long.") from None
    if not isinstance(value, dict):
        raise error(f"{what} is not a JSON object.")
    if _SURROGATE_ESCAPE.search(text):
        _refuse_surrogates(value, what, error)
    return value


def _check_shape(data: bytes, what: str, error: ErrorClass, values: int | None, depth: int) -> None:
    """Count how deep brackets are nested before the parser recurses, and how much it would have to build.

    Strangers may send megabytes, so this works on the whole text at once and not byte by byte: what stands
    in strings goes, then every pass removes the innermost pairs. What is no JSON is left to the parser.
    """
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    too_many = values is not None and unescaped.count(b'"') > 2 * values + 2  # more strings than can be
    outside = b"" if too_many else b"".join(unescaped.split(b'"')[::2])
    if too_many or (values is not None and len(outside.translate(None, _NOT_BEFORE_VALUES)) > values):
        raise error(f"{what} has more than {values} members and items.")
    brackets = outside.translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(depth):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    if b"[]" in brackets or b"[" * (depth + 1) in brackets:
        raise error(f"{what} is nested deeper than {depth} levels.")


def _refuse_surrogates(value: object, what: str, error: ErrorClass) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise error(f"{what} has a lone surrogate in a string.") from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key, what, error)
            _refuse_surrogates(item, what, error)
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item, what, error)


class Reader:
    """Takes typed members out of one parsed object; every complaint names the member.

    A member with a `default` is optional: absent or null gives the default.
    """

    def __init__(self, value: object, what: str, error: ErrorClass = RemoteProtocolError) -> None:
        if not isinstance(value, dict):
            raise error(f"{what} is not a JSON object.")
        self._value: dict[str, Any] = value
        self._read: set[str] = set()
        self.what = what
        self.error = error

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise this reader's error about the member `name`."""
        raise self.error(f'{self.what}: "{name}" {problem}.')

    def _take(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self._value.get(name)
        if value is None:
            if default is _MISSING:
                self.fail(name, "is missing")
            return _MISSING
        return value

    def text(self, name: str, *, limit: int = DEFAULT_TEXT_LIMIT, default: Any = _MISSING) -> Any:
        """Return a string of at most `limit` characters."""
        value = self._take(name, default)
        if value is _MISSING:
            return default
        if not isinstance(value, str):
            self.fail(name, "is not a string")
        if len(value) > limit:
            self.fail(name, f"is longer than {limit} characters")
        return value

    def count(self, name: str, *, limit: int = MAX_COUNT, default: Any = _MISSING) -> Any:
        """Return an integer from 0 to `limit`."""
        value = self._take(name, default)
        if value is _MISSING:
            return default
        return self._check_count(name, value, limit)

    def _check_count(self, name: str, value: Any, limit: int = MAX_COUNT) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            self.fail(name, f"is not a whole number from 0 to {limit}")
        return value

    def number(self, name: str, *, default: Any = _MISSING) -> Any:
        """Return a finite number as a float."""
        value = self._take(name, default)
        if value is _MISSING:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
            self.fail(name, "is not a number")
        return float(value)

    def flag(self, name: str, *, default: Any = _MISSING) -> Any:
        """Return true or false."""
        value = self._take(name, default)
        if value is _MISSING:
            return default
        if not isinstance(value, bool):
            self.fail(name, "is not true or false")
        return value

    def hex(self, name: str, length: int, *, default: Any = _MISSING) -> Any:
        """Return the `length` bytes that a lower-case hex string stands for."""
        value = self._take(name, default)
        if value is _MISSING:
            return default
        if not isinstance(value, str) or len(value) != 2 * length or not _HEX.match(value):
            self.fail(name, f"is not {2 * length} lower-case hex digits")
        return bytes.fromhex(value)

    def object(self, name: str, *, default: Any = _MISSING) -> Any:
        """Return a nested object as it was parsed; wrap it in a Reader of its own."""
        value = self._take(name, default)
        if value is _MISSING:
            return default
        if not isinstance(value, dict):
            self.fail(name, "is not an object")
        return value

    def nested(self, name: str, *, default: Any = _MISSING) -> Any:
        """Return a Reader over a nested object."""
        value = self.object(name, default=default)
        return value if value is default else Reader(value, f"{self.what}, {name}", self.error)

    def list_of(
        self,
        name: str,
        convert: Convert[Item],
        *,
        limit: int,
        default: Any = _MISSING,
    ) -> Any:
        """Return a tuple of at most `limit` converted items; `convert(item, where)` may raise."""
        value = self._take(name, default)
        if value is _MISSING:
            return default
        if not isinstance(value, list):
            self.fail(name, "is not a list")
        if len(value) > limit:
            self.fail(name, f"has {len(value)} items; at most {limit} are allowed")
        return tuple(convert(item, f"{self.what}, {name}[{number}]") for number, item in enumerate(value))

    def texts(self, name: str, *, limit: int, default: Any = _MISSING) -> Any:
        """Return a tuple of at most `limit` strings."""

        def convert(item: Any, where: str) -> str:
            if not isinstance(item, str) or len(item) > DEFAULT_TEXT_LIMIT:
                raise self.error(f"{where} is not a string of at most {DEFAULT_TEXT_LIMIT} characters.")
            return item

        return self.list_of(name, convert, limit=limit, default=default)

    def counts(self, name: str, *, limit: int, default: Any = _MISSING) -> Any:
        """Return a tuple of at most `limit` whole numbers."""

        def convert(item: Any, where: str) -> int:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= MAX_COUNT:
                raise self.error(f"{where} is not a whole number from 0 to {MAX_COUNT}.")
            return item

        return self.list_of(name, convert, limit=limit, default=default)

    def raw(self, name: str, *, default: Any = _MISSING) -> Any:
        """Return the member as it was parsed, whatever its type."""
        value = self._take(name, default)
        return default if value is _MISSING else value

    def finish(self) -> None:
        """Refuse every member that nobody asked for: the rule of signed bodies."""
        unknown = sorted(set(self._value) - self._read)
        if unknown:
            raise self.error(f'{self.what} has the unknown member "{unknown[0][:80]}".')
