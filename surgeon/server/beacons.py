"""Decides whether the beacons prove that every rank of the running server runs the patch, as it was asked to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surgeon.server.model import Worker

SCHEMA: Final = "surgeon/beacon/1"
# How a worker tells decode from prefill, by its beacon: sglang's own forward mode, or the number of rows alone.
FORWARD_MODE: Final = "forward-mode"


def judge(
    beacons: Sequence[Mapping[str, Any]],
    workers: Sequence[Worker],
    *,
    patch_hash: str,
    generation: int | None = None,
    settings: Mapping[str, Any] | None = None,
    need_applied: bool = False,
) -> list[str]:
    """Say what is missing to believe that the patch runs in every worker.

    Only a beacon of a living worker counts: its pid and its start time must be that worker's. Those of other
    processes, dead or alive, say nothing about this server.

    Args:
        beacons: what the node holds.
        workers: the schedulers of the server in question.
        patch_hash: the hash of the patch that must run.
        generation: the generation of the settings that must be in force; None for any.
        settings: values that must be in force; None for any. Keys not named may have any value.
        need_applied: whether every worker must have re-routed a pass already.

    Returns:
        Problems, one line each; empty when the proof holds.
    """
    if not workers:
        return ["the server has no worker process that could run the patch"]
    problems = []
    forms = {}
    for worker in workers:
        name = f"{worker.title} (pid {worker.pid})"
        beacon = beacon_of(worker, beacons)
        if beacon is None:
            problems.append(f"{name} has written no beacon")
        else:
            problems += [f"{name} {fault}" for fault in _faults(beacon, patch_hash, generation, settings, need_applied)]
            if beacon.get("form"):
                forms[name] = str(beacon["form"])
    if len(set(forms.values())) > 1:
        # Their scores differ in the last digits, so that ranks could choose differently and corrupt every layer's sum.
        told = "; ".join(f"{name}: {form}" for name, form in forms.items())
        problems.append(f"the workers run different forms of the operator ({told})")
    return problems


def run_other_code(beacons: Sequence[Mapping[str, Any]], workers: Sequence[Worker], *, patch_hash: str) -> bool:
    """Whether a worker reported another patch: what a process has imported it keeps, so waiting mends nothing.

    Args:
        beacons: what the node holds.
        workers: the schedulers of the server in question.
        patch_hash: the hash of the patch that must run.
    """
    own = (beacon_of(worker, beacons) for worker in workers)
    return any(one is not None and one.get("patch_hash") != patch_hash for one in own)


@dataclass(frozen=True)
class Switch:
    """How far one worker has come with settings that are changed while it runs.

    Attributes:
        name: the worker's title and pid.
        passes: forward passes that it has counted.
        generation: of the settings in force; None if its runtime cannot change them while it runs.
        from_pass: the pass from which on they hold.
        settings: those in force.
        armed: the generation that waits for its pass, and that pass; None if none waits.
        refused: the generation that it refused last, and why; None if it refused none.
    """

    name: str
    passes: int
    generation: int | None
    from_pass: int
    settings: Mapping[str, Any]
    armed: tuple[int, int] | None
    refused: tuple[int, str] | None


def switches(beacons: Sequence[Mapping[str, Any]], workers: Sequence[Worker]) -> list[Switch]:
    """How far each worker has come, in the order of the workers; those that wrote no beacon are left out."""
    found = []
    for worker in workers:
        beacon = beacon_of(worker, beacons)
        if beacon is None:
            continue
        forced, armed, refused = (beacon.get(name) or {} for name in ("in_force", "armed", "refused"))
        exact = beacon.get("gate") == FORWARD_MODE and bool(forced)
        found.append(
            Switch(
                name=f"{worker.title} (pid {worker.pid})",
                passes=int(beacon.get("pass") or 0),
                generation=int(forced.get("generation") or 0) if exact else None,
                from_pass=int(forced.get("from_pass") or 0),
                settings=beacon.get("settings") or {},
                armed=(int(armed.get("generation") or 0), int(armed.get("at_pass") or 0)) if armed else None,
                refused=(int(refused.get("generation") or 0), str(refused.get("why") or "")) if refused else None,
            )
        )
    return found


def beacon_of(worker: Worker, beacons: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The beacon that this very process wrote; None if it wrote none."""
    own = [
        one
        for one in beacons
        if one.get("pid") == worker.pid and one.get("start_ticks") == worker.start_ticks and one.get("alive")
    ]
    # A server whose settings moved to another folder may have left an older one behind.
    return max(own, key=lambda one: float(one.get("written") or 0.0), default=None)


def _faults(
    beacon: Mapping[str, Any],
    patch_hash: str,
    generation: int | None,
    settings: Mapping[str, Any] | None,
    need_applied: bool,  # noqa: FBT001 - handed through from a keyword
) -> list[str]:
    if beacon.get("schema") != SCHEMA:
        return [f"wrote a beacon of schema {beacon.get('schema')!r}; expected {SCHEMA!r}"]
    faults = []
    if beacon.get("patch_hash") != patch_hash:
        faults.append(f"runs patch {_short(beacon.get('patch_hash'))}; expected {_short(patch_hash)}")
    if beacon.get("settings_problem"):
        faults.append(f"refused its settings: {beacon['settings_problem']}")
    if generation is not None and beacon.get("generation") != generation:
        faults.append(f"has settings of generation {beacon.get('generation')}; expected {generation}")
    in_force = beacon.get("settings") or {}
    for key, value in (settings or {}).items():
        if in_force.get(key) != value:
            source = f" (from {beacon['settings_source']})" if beacon.get("settings_source") else ""
            faults.append(f"runs with {key} = {in_force.get(key)}{source}; expected {value}")
    if need_applied and beacon.get("applied") is not True:
        why = f": {beacon['skipped']}" if beacon.get("skipped") else ""
        faults.append(f"has re-routed no pass yet{why}")
    return faults


def _short(value: object) -> str:
    return str(value)[:12] if value else "(none)"
