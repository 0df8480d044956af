"""Reads the end of a log, and what was added to it since."""

from __future__ import annotations

import os
from typing import Any, Dict, Tuple

from . import masking
from .protocol import AgentError, Context, verb

# More than this of a log at once is of no use to anybody.
CHUNK = 256 * 1024
DEFAULT_LINES = 50


def size(path: str) -> int:
    """Return how long a file is; 0 when it is not there."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def since(path: str, offset: int) -> Tuple[str, int]:
    """Return what a log holds from ``offset`` on, the last 256 KiB of it, and the offset of its end.

    A log that is shorter than ``offset`` was cut or replaced: then it is read from its beginning.
    """
    end = size(path)
    begin = offset if 0 <= offset <= end else 0
    begin = max(begin, end - CHUNK)
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError:
        return "", end
    return data.decode("utf-8", "replace"), begin + len(data)


@verb("tail")
def tail(args: Dict[str, Any], _context: Context) -> Dict[str, Any]:
    """Return the last lines of a log, secrets masked.

    Args:
        args: ``path``; ``lines`` (50 unless said).
        _context: not needed.

    Returns:
        ``path``, ``text``, ``size`` in bytes.

    Raises:
        AgentError: there is no such file.
    """
    path = str(args["path"])
    if not os.path.isfile(path):
        raise AgentError("failed", "Expected a log at {}; there is no such file.".format(path), where=path)
    text, end = since(path, 0)
    lines = text.splitlines(keepends=True)[-int(args.get("lines") or DEFAULT_LINES) :]
    return {"path": path, "text": masking.text("".join(lines)), "size": end}
