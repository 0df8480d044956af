"""Finish or undo what an earlier surgeon began and never closed.

A pending revision without a living lease means that a client died or its connection was cut. What the node shows
decides: nothing written: the revision is closed as failed. Written, and every worker of a server that was started
afterwards proves it: it is closed as applied. Anything else is undone: the bytes from before come back, and a server
that surgeon had stopped, or that already runs the half-finished change, is started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.errors import LockedError
from surgeon.operations import lease as leases
from surgeon.operations import proof

if TYPE_CHECKING:
    from surgeon.ledger.records import Record
    from surgeon.node.client import Node
    from surgeon.operations.observer import Observer
    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch


@dataclass(frozen=True)
class Settled:
    """What became of a pending revision.

    Attributes:
        revision: its number.
        outcome: ``failed``, ``applied`` or ``rolled-back``.
        said: one line for people.
        restart: whether the server must now be started (again) for the node to be whole.
    """

    revision: int
    outcome: str
    said: str
    restart: bool = False


def unfinished(survey: Survey) -> str:
    """What an earlier run left, in one line for read-only commands; empty if nothing."""
    pending = survey.ledger.pending
    down = is_down(survey)
    if pending is None and not down:
        return ""
    said = f"revision {pending.revision} ({pending.kind}) was begun and never closed" if pending else ""
    if leases.lives(survey.ledger.lease, float(survey.node.get("time") or 0.0)) and survey.ledger.lease:
        return f"{said or 'a change is going on'}: {survey.ledger.lease.describe()} is at work"
    hint = "the next apply, rollback or restart finishes or undoes it"
    if down:
        return f"{said + '; ' if said else ''}the server was stopped by surgeon and is not running; {hint}"
    return f"{said}; {hint}"


def is_down(survey: Survey) -> bool:
    """Whether surgeon stopped the server and nothing serves in its place."""
    launch = survey.launch
    return (
        bool(launch) and launch.get("phase") in {"stopping", "stopped"} and survey.server is None if launch else False
    )


def settle(node: Node, survey: Survey, patch: Patch, observer: Observer) -> Settled | None:
    """Close a pending revision, if there is one. The lease must be held.

    Raises:
        LockedError: another surgeon is at work on it.
        ForeignEditError: the files are neither what was before nor what the revision wrote.
    """
    pending = survey.ledger.pending
    if pending is None:
        return None
    site_id = survey.installed.site_id
    written = _written(survey, pending)
    if not written:
        node.call("finish", {"site_id": site_id, "revision": pending.revision, "status": "failed", "note": "cut short"})
        return Settled(
            pending.revision, "failed", f"revision {pending.revision} was cut short before anything was written; closed"
        )
    if pending.kind == "rollback" or _proved(survey, patch, pending):
        node.call(
            "finish",
            {"site_id": site_id, "revision": pending.revision, "status": "applied", "note": "finished by a later run"},
        )
        why = "its bytes are in place" if pending.kind == "rollback" else "every worker proves it"
        restart = pending.kind == "rollback" and _older(survey, pending)
        return Settled(
            pending.revision, "applied", f"revision {pending.revision} had been cut short; finished: {why}", restart
        )
    with observer.step(f"Undoing revision {pending.revision}, which was cut short"):
        node.call(
            "restore",
            {
                "site_id": site_id,
                "record": {
                    "kind": "rollback",
                    "of": pending.revision,
                    "patch": pending.patch,
                    "patch_version": pending.patch_version,
                    "version": pending.version,
                    "who": leases.whoami()[0],
                    "from": leases.whoami()[1],
                    "originals": {f.path: f.original for f in pending.files},
                    "note": f"revision {pending.revision} was cut short",
                },
                "files": [
                    {"path": f.path, "present": [f.after, f.before], "restore": f.before}
                    for f in reversed(pending.files)
                ],
                "interpreter": survey.installed.python,
            },
        )
        node.call(
            "finish",
            {"site_id": site_id, "revision": pending.revision, "status": "rolled-back", "note": "cut short; undone"},
        )
    ran = survey.server is not None and survey.server.started >= pending.started
    return Settled(
        pending.revision,
        "rolled-back",
        f"revision {pending.revision} had been cut short; undone, the bytes from before are back",
        restart=ran or is_down(survey),
    )


def refuse_if_busy(survey: Survey) -> None:
    """Raise if another surgeon is at work here.

    Raises:
        LockedError: with whose lease it is and when it ends.
    """
    lease = survey.ledger.lease
    now = float(survey.node.get("time") or 0.0)
    if lease is not None and leases.lives(lease, now):
        raise LockedError(
            f"the node is locked by {lease.describe()} for up to {lease.expires - now:.0f} s more",
            advice="wait, or take it with --break-lock if you know that it is not at work",
            where="lease",
        )


def _written(survey: Survey, pending: Record) -> bool:
    """Whether any file of the revision holds its result."""
    present: dict[str, str | None] = {survey.file.path: survey.file.sha256}
    for entry in survey.beside.values():
        if entry:
            present[str(entry["path"])] = entry.get("sha256")
    return any(present.get(f.path) == f.after != f.before for f in pending.files)


def _proved(survey: Survey, patch: Patch, pending: Record) -> bool:
    complete = survey.server is not None and survey.server.started >= pending.started
    return complete and not proof.beacon_problems(survey, patch)


def _older(survey: Survey, pending: Record) -> bool:
    return survey.server is None or survey.server.started < pending.started
