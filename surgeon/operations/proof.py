"""What counts as proof that the patch runs: beacons of every worker, with the settings that were asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from surgeon.server import beacons

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch

# Rows of the passes that prove it, where settings let them count: requests that are sent together, and end soon.
_ROWS: Final = 8
# Keys of the settings file that say how it was written rather than what is wanted.
_BOOKKEEPING: Final = frozenset({"schema", "generation", "beacon_dir", "at_pass"})


def beacon_dir(survey: Survey) -> str:
    """Where the runtime writes its beacons: a folder that the server's own user can write."""
    return str(survey.node.get("beacon_dir") or f"{survey.state_dir}/beacons")


def present_settings(text: str | None, wanted: Mapping[str, Any]) -> tuple[int, bool]:
    """The generation of the settings on the node, and whether they are what is wanted."""
    found = read_settings(text)
    if not found:
        return 0, False
    asked = {k: v for k, v in wanted.items() if k not in _BOOKKEEPING}
    return int(found.get("generation") or 0), all(found.get(k) == v for k, v in asked.items())


def read_settings(text: str | None) -> dict[str, Any]:
    """The settings file on the node; empty if there is none, or it cannot be read."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def rows_that_count(patch: Patch, settings: Mapping[str, Any]) -> int:
    """How many rows a decode pass must have for the patch to act: where these settings keep the fewest experts."""
    for name, spec in patch.specs.items():
        if spec["type"] == "schedule" and settings.get(name):
            low, high, _ = min(settings[name], key=lambda part: int(part[2]))
            return min(max(int(low), _ROWS), int(high))
    low, high = (int(settings.get(name, patch.settings[name])) for name in ("min_rows", "max_rows"))
    return min(max(low, _ROWS), high)


def next_generation(survey: Survey) -> int:
    """A number for new settings that neither the file on the node nor any living process has seen."""
    told = [present_settings((survey.beside.get("settings") or {}).get("text"), {})[0]]
    for beacon in survey.beacons:
        if beacon.get("alive"):
            words = (beacon, *(beacon.get(name) or {} for name in ("armed", "refused", "in_force")))
            told += [int(word.get("generation") or 0) for word in words]
    return max(told) + 1


def beacon_problems(survey: Survey, patch: Patch) -> tuple[str, ...]:
    """Why the beacons of the running server do not prove that the patch runs; empty if they do."""
    if survey.server is None:
        return ("no server is running",)
    text = (survey.beside.get("settings") or {}).get("text")
    return judge(survey.beacons, survey.server.workers, patch, text)


def still_running(survey: Survey) -> bool:
    """Whether a worker of the running server says that it runs the patch, whatever the file says now."""
    if survey.server is None:
        return False
    alive = {(b.get("pid"), b.get("start_ticks")) for b in survey.beacons if b.get("alive") and b.get("applied")}
    return any((w.pid, w.start_ticks) in alive for w in survey.server.workers)


def judge(
    found: Sequence[Mapping[str, Any]],
    workers: Sequence[Any],
    patch: Patch,
    settings_text: str | None,
    *,
    need_applied: bool = False,
) -> tuple[str, ...]:
    """Problems of these beacons for these workers; see :func:`surgeon.server.beacons.judge`."""
    generation = present_settings(settings_text, {})[0]
    return tuple(beacons.judge(found, workers, patch_hash=patch.hash, generation=generation, need_applied=need_applied))
