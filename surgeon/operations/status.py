"""The stories of ``surgeon status``, ``history`` and ``diff``: what is on the node now, and how it came to be so."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.errors import ForeignEditError
from surgeon.operations import lease as leases
from surgeon.operations import plan, settle, survey
from surgeon.surgery.outcomes import AlreadyGrafted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surgeon.ledger.records import Lease, Record
    from surgeon.ledger.state import Verdict
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.grafts import DecodeGate
    from surgeon.operations.survey import Survey, TargetFile
    from surgeon.patches import Patch
    from surgeon.server.model import Server


@dataclass(frozen=True)
class Rank:
    """What one worker's beacon says; ``beacon`` is None if it wrote none."""

    pid: int
    title: str
    beacon: Mapping[str, Any] | None


@dataclass(frozen=True)
class Status:
    """What is on the node now.

    Attributes:
        settings: the settings file beside the runtime, as it lies there; None if there is none.
        ranks: every worker of the running server with what it reported from inside its process.
        in_force: the settings that every rank runs with; None if they report none, or differ.
        differs: how what the ranks run with differs from the file, or between them; empty if it does not.
        gate: how the runtime tells decode from prefill, by the files.
        runner_path: model_runner.py, if it holds a graft.
        problems: what the survey found odd.
    """

    hostname: str
    version: str
    path: str
    sha256: str
    state: Verdict
    server: Server | None
    settings: Mapping[str, Any] | None
    ranks: tuple[Rank, ...]
    lease: Lease | None
    unfinished: str
    gate: DecodeGate
    in_force: Mapping[str, Any] | None = None
    differs: str = ""
    runner_path: str = ""
    problems: tuple[Mapping[str, Any], ...] = ()


def run(node: Node, target: Target, patch: Patch) -> Status:
    """Look at the node, in one round trip."""
    seen = survey.take(node, target, patch, http=False)
    findings = plan.examine(seen, patch)
    beacons = {int(b["pid"]): b for b in seen.beacons if b.get("alive") and "pid" in b}
    workers = seen.server.workers if seen.server else ()
    settings = _settings((seen.beside.get("settings") or {}).get("text"))
    ranks = tuple(Rank(w.pid, w.title, beacons.get(w.pid)) for w in workers)
    in_force, differs = _compare(ranks, settings, patch)
    return Status(
        hostname=str(seen.node.get("hostname", "")),
        version=seen.installed.version,
        path=seen.file.path,
        sha256=seen.file.sha256,
        state=findings.state,
        server=seen.server,
        settings=settings,
        ranks=ranks,
        lease=seen.ledger.lease if leases.lives(seen.ledger.lease, float(seen.node.get("time") or 0.0)) else None,
        unfinished=settle.unfinished(seen),
        gate=findings.gate,
        in_force=in_force,
        differs=differs,
        runner_path=seen.runner.path if seen.runner and isinstance(findings.runner, AlreadyGrafted) else "",
        problems=seen.problems,
    )


def _compare(
    ranks: tuple[Rank, ...], settings: Mapping[str, Any] | None, patch: Patch
) -> tuple[Mapping[str, Any] | None, str]:
    """The settings that every rank has in force, and how they differ from the file or between ranks."""
    told = [rank.beacon for rank in ranks if rank.beacon is not None]
    if not told:
        return None, ""
    forced = [{name: one.get("settings", {}).get(name) for name in patch.settings} for one in told]
    generations = [one.get("generation") for one in told]
    if any((one, number) != (forced[0], generations[0]) for one, number in zip(forced, generations, strict=True)):
        listed = ", ".join(f"rank {one.get('rank')} has generation {one.get('generation')}" for one in told)
        return None, f"the ranks run with different settings: {listed}; `surgeon restart` starts all with the file's"
    if settings is None:
        return forced[0], "the processes run with settings whose file is gone, until they are restarted"
    changed = [name for name in patch.settings if settings.get(name, patch.settings[name]) != forced[0][name]]
    if changed:
        wanted = ", ".join(f"{name} = {settings.get(name)}" for name in changed)
        return forced[0], f"the file says {wanted}; the processes take it over when they are restarted"
    return forced[0], ""


def history(node: Node, target: Target) -> tuple[Record, ...]:
    """Every revision of this node's sglang, oldest first."""
    return survey.take(node, target, http=False).ledger.records


@dataclass(frozen=True)
class Diff:
    """What differs from the original in one file, as a unified diff; empty if nothing does."""

    path: str
    text: str
    compared_with: str


def diff(node: Node, target: Target, patch: Patch) -> tuple[Diff, ...]:
    """The difference between each file that is cut, as it is on the node, and the one that its package installed.

    The original is the one that the ledger keeps; without one, the file itself less the graft.
    """
    seen = survey.take(node, target, patch, http=False)
    found = [_difference(node, seen, seen.file)]
    if seen.runner is not None and patch.announce:
        found.append(_difference(node, seen, seen.runner))
    return tuple(found)


def _difference(node: Node, seen: Survey, file: TargetFile) -> Diff:
    from surgeon import surgery

    known = seen.ledger.original(file.path, file.sha256)
    if known is None:
        known = next(
            (c.original for r in reversed(seen.ledger.records) if (c := r.change(file.path)) and c.original), None
        )
    if known == file.sha256:
        return Diff(file.path, "", "the original that the ledger keeps")
    if known is not None:
        place = f"{seen.state_dir}/{seen.installed.site_id}/objects/{known}"
        original = base64.b64decode(node.call("read", {"path": place, "max_bytes": 8 << 20})["b64"])
        text = surgery.unified_diff(original, file.source, file.path.lstrip("/"))
        return Diff(file.path, text, "the original that the ledger keeps")
    if file.record_sha256 == file.sha256:
        return Diff(file.path, "", "the package's RECORD")
    if isinstance(surgery.locate(file.source), AlreadyGrafted):
        text = surgery.unified_diff(surgery.ungraft(file.source), file.source, file.path.lstrip("/"))
        return Diff(file.path, text, "the file without the graft")
    raise ForeignEditError(
        f"{file.path} is not what the package's RECORD says, and no original is kept to compare it with",
        advice="unpack the same release's wheel beside it and compare by hand",
        where=file.path,
    )


def _settings(text: str | None) -> Mapping[str, Any] | None:
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return {"unreadable": text[:200]}
    return value if isinstance(value, dict) else {"unreadable": text[:200]}
