"""Text from elsewhere, made safe for a terminal and for a line of a log."""

from __future__ import annotations

import re

# C0 without the line feed, DEL, C1, the two Unicode separators that some viewers break lines at,
# what reorders text around it, and halves of surrogate pairs, which no encoder takes.
_UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_INDENT = "\n    "


def printable(text: str) -> str:
    """`text` with control characters as escapes and every further line indented.

    A terminal obeys nothing in it, and no line of it begins where a log's own lines do.

    Example:
        `printable("a\\x1b[2J\\nERROR forged")` is `"a\\\\x1b[2J\\n    ERROR forged"`.
    """
    return _UNSAFE.sub(_escape, text).replace("\n", _INDENT)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
