"""Text from elsewhere, made safe for a terminal and a log.

A rank's output, a node's name and a peer's error message are data. Printed as they are,
they could move the cursor, hide lines or reverse the reading direction.
"""

from __future__ import annotations

import re

# C0 with DEL, C1, the bidirectional controls and isolates, the line and paragraph separators, and
# the byte order mark: everything that changes what a terminal shows elsewhere than at this place.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str, *, keep_newlines: bool = False) -> str:
    """Return `text` with every control character written out as an escape such as \\x1b.

    Args:
        text: anything, as it came from a peer, a process or a file.
        keep_newlines: leave newlines and tabs alone, for texts of several lines that we wrote ourselves.

    Returns:
        Text that stays where it is printed.
    """

    def escape(match: re.Match[str]) -> str:
        character = match.group()
        if keep_newlines and character in "\n\t":
            return character
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return _UNSAFE.sub(escape, text)
