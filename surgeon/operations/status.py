"""The stories of ``surgeon status``, ``history`` and ``diff``: what is on the node now, and how it came to be so."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.operations import lease as leases
from surgeon.operations import plan, settle, survey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surgeon.ledger.records import Lease, Record
    from surgeon.ledger.state import Verdict
    from surgeon.node.client import Node
    from surgeon.node.target import Target
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
    problems: tuple[Mapping[str, Any], ...] = ()


def run(node: Node, target: Target, patch: Patch) -> Status:
    """Look at the node, in one round trip."""
    seen = survey.take(node, target, module=patch.module, http=False)
    findings = plan.examine(seen, patch)
    beacons = {int(b["pid"]): b for b in seen.beacons if b.get("alive") and "pid" in b}
    workers = seen.server.workers if seen.server else ()
    return Status(
        hostname=str(seen.node.get("hostname", "")),
        version=seen.installed.version,
        path=seen.file.path,
        sha256=seen.file.sha256,
        state=findings.state,
        server=seen.server,
        settings=_settings((seen.beside.get("settings") or {}).get("text")),
        ranks=tuple(Rank(w.pid, w.title, beacons.get(w.pid)) for w in workers),
        lease=seen.ledger.lease if leases.lives(seen.ledger.lease, float(seen.node.get("time") or 0.0)) else None,
        unfinished=settle.unfinished(seen),
        problems=seen.problems,
    )


def history(node: Node, target: Target) -> tuple[Record, ...]:
    """Every revision of this node's sglang, oldest first."""
    return survey.take(node, target, http=False).ledger.records


@dataclass(frozen=True)
class Diff:
    """What differs from the original, as a unified diff; empty if nothing does."""

    path: str
    text: str
    compared_with: str


def diff(node: Node, target: Target, patch: Patch) -> Diff:
    """The difference between the file on the node and the one that its package installed.

    The original is the one that the ledger keeps; without one, the file itself less the graft.
    """
    from surgeon import surgery

    seen = survey.take(node, target, module=patch.module, http=False)
    file = seen.file
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
    if isinstance(surgery.locate(file.source), surgery.AlreadyGrafted):
        text = surgery.unified_diff(surgery.ungraft(file.source), file.source, file.path.lstrip("/"))
        return Diff(file.path, text, "the file without the graft")
    from surgeon.errors import ForeignEditError

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
