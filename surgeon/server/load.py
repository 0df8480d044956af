"""How many requests a server is at work on, as its own endpoints tell.

``GET /v1/loads`` is there from sglang 0.5.8 on; ``GET /get_load`` from 0.4.7 to 0.5.20, first as one number of tokens
(to 0.5.2 or so), then as a list with requests per rank. A prefill that is under way is in neither, and from 0.5.21 on
the answer is a snapshot that the scheduler publishes now and then, so a quiet answer alone does not prove that nothing
runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PATHS: Final = ("/v1/loads", "/get_load")
_OK: Final = 200


@dataclass(frozen=True)
class Load:
    """What a server is at work on.

    Attributes:
        requests: running or waiting; 1 where only tokens are told and there are some.
        path: the endpoint that said so.
    """

    requests: int
    path: str


def read(path: str, answer: Mapping[str, Any]) -> Load | None:
    """The load that one answer tells; None if this release does not tell it there.

    Args:
        path: one of ``PATHS``.
        answer: ``status`` and ``body`` of GET that path.
    """
    if answer.get("status") != _OK:
        return None
    try:
        said = json.loads(str(answer.get("body")))
    except ValueError:
        return None
    found = _requests(said)
    return Load(found, path) if found is not None else None


def _requests(said: Any) -> int | None:
    if isinstance(said, dict) and isinstance(said.get("loads"), list):
        ranks = said["loads"]
        names: tuple[str, ...] = ("num_running_reqs", "num_waiting_reqs")
    elif isinstance(said, list):
        # num_reqs counts the waiting ones too.
        ranks, names = said, ("num_reqs",)
    elif isinstance(said, dict) and isinstance(said.get("load"), int):
        return int(said["load"] > 0)
    else:
        return None
    try:
        return sum(int(rank[name]) for rank in ranks for name in names)
    except (KeyError, TypeError, ValueError):
        return None
