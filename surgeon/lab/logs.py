"""Reads the log of the lab's server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.errors import SurgeonError
from surgeon.lab import lifecycle, server
from surgeon.lab.paths import paths

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S = 0.3


def lines(*, count: int, follow: bool = False) -> Iterator[str]:
    """The end of the log of the server that runs, or ran last.

    Args:
        count: lines from the end.
        follow: go on for ever with what is written next.

    Yields:
        Lines without their ends.

    Raises:
        SurgeonError: there is no log.
    """
    log = _log()
    yield from server.last_lines(log, count)
    if not follow:
        return
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(0, 2)
        pending = ""
        while True:
            pending += file.read()
            *whole, pending = pending.split("\n")
            yield from whole
            time.sleep(_POLL_S)


def _log() -> Path:
    description = lifecycle.read()
    if description is not None and Path(description.log).exists():
        return Path(description.log)
    found = sorted(paths().logs.glob("sglang-*.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SurgeonError(
            "The lab has no log yet.", advice="Bring the lab up: surgeon lab up", where=str(paths().logs)
        )
    return found[-1]
