"""Source as people read it: a diff, and the lines around a place."""

from __future__ import annotations

import difflib
import io
import tokenize
from typing import TYPE_CHECKING

from surgeon.surgery.text import split_bom, split_lines

if TYPE_CHECKING:
    from collections.abc import Iterator


def unified_diff(before: bytes, after: bytes, name: str) -> str:
    r"""The change as a unified diff, decoded by the file's own coding cookie.

    A file with one kind of line end is shown without it, so that CRLF does not clutter the screen. Where line ends
    are mixed or change, ``\r`` is shown as ``␍``, so that a difference in line ends alone is visible.

    Args:
        before: the file as it was.
        after: the file as it will be.
        name: shown after ``a/`` and ``b/``.

    Returns:
        Empty if nothing changes; else lines that end with ``\n``.
    """
    old, new = _decoded(before), _decoded(after)
    ends = {line[len(line.rstrip("\r\n")) :] for line in (*old, *new)} - {""}
    show = _with_ends if len(ends) > 1 else _without_ends
    body = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="\n")
    return "".join(f"{shown}\n" for line in body for shown in show(line))


def excerpt(source: bytes, line: int, context: int = 3, *, last: int | None = None) -> tuple[tuple[int, str], ...]:
    """The lines around one line, or around several.

    Args:
        source: the file.
        line: counted from 1.
        context: how many lines to show above and below.
        last: the last of several; None for one.

    Returns:
        Line numbers, counted from 1, and text without line ends.
    """
    lines = _decoded(source)
    first = max(1, line - context)
    end = min(len(lines), (last or line) + context)
    return tuple((number, lines[number - 1].rstrip("\r\n")) for number in range(first, end + 1))


def _decoded(source: bytes) -> list[str]:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    except (SyntaxError, UnicodeDecodeError):
        encoding = "utf-8"
    return [line.decode(encoding, "replace") for line in split_lines(split_bom(source)[1])]


def _without_ends(line: str) -> Iterator[str]:
    yield line.rstrip("\r\n")
    if not line.endswith(("\n", "\r")):
        yield r"\ No newline at end of file"


def _with_ends(line: str) -> Iterator[str]:
    yield line.removesuffix("\n").replace("\r", "␍")
    if not line.endswith(("\n", "\r")):
        yield r"\ No newline at end of file"
