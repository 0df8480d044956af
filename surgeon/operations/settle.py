"""Finish or undo what an earlier surgeon began and never closed.

A pending revision without a living lease means that a client died or its connection was cut. What the node shows
decides: nothing written: the revision is closed as failed. Written, and every worker of a server that was started
afterwards proves it: it is closed as applied; so is a change of settings that every worker has in force. A rollback
that was begun is finished. Anything else is undone: the bytes from before come back, and a server that surgeon had
stopped, or that already runs the half-finished change, is started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from surgeon.errors import LockedError
from surgeon.operations import lease as leases
from surgeon.operations import proof
from surgeon.server import beacons

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.ledger.records import FileChange, Record
    from surgeon.node.client import Node
    from surgeon.operations.observer import Observer
    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch

DOWN: Final = "the server that surgeon stopped, or started and saw die, is not running"


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
        return f"{said + '; ' if said else ''}{DOWN}; {hint}"
    return f"{said}; {hint}"


def unsteady(survey: Survey) -> bool:
    """Whether an earlier run left something, or may still be at work by an agent whose client is gone.

    What a survey found is then old by the time the lease is held.
    """
    return survey.ledger.pending is not None or survey.ledger.lease is not None or is_down(survey)


def is_down(survey: Survey) -> bool:
    """Whether no server runs because of surgeon: it stopped it, or what it started for an open revision has died."""
    launch, pending = survey.launch, survey.ledger.pending
    if not launch or survey.server is not None:
        return False
    if launch.get("phase") in {"stopping", "stopped"}:
        return True
    return pending is not None and float(launch.get("changed") or 0.0) >= pending.started


def settle(node: Node, survey: Survey, patch: Patch, observer: Observer) -> Settled | None:
    """Close the last pending revision, if there is one. The lease must be held.

    Args:
        node: where.
        survey: a look at it that was taken under the lease: an agent whose client is gone finishes what it is at.
        patch: whose beacons prove it.
        observer: is told.

    Raises:
        LockedError: another surgeon took the lease.
        ForeignEditError: the files are neither what was before nor what the revision wrote.
    """
    pending = survey.ledger.pending
    if pending is None:
        return None
    name = f"revision {pending.revision}"
    down = is_down(survey)
    if pending.kind == "rollback":
        _complete(node, survey, pending, observer)
        restart = down or _started(survey) < pending.started
        return Settled(pending.revision, "applied", f"{name}, a rollback, had been cut short; finished", restart)
    if not _written(survey, pending):
        undone = _undone_by(survey, pending)
        if undone is None:
            _close(node, survey, pending, "failed", "cut short before anything was written")
            said = f"{name} had been cut short before anything was written; closed"
            return Settled(pending.revision, "failed", said, down)
        _close(node, survey, pending, "rolled-back", f"undone by revision {undone.revision}")
        ran = pending.started <= _started(survey) < undone.started
        said = f"{name} had been undone by revision {undone.revision}, which was cut short; closed"
        return Settled(pending.revision, "rolled-back", said, ran or down)
    if _proved(survey, patch, pending):
        _close(node, survey, pending, "applied", "finished by a later run")
        said = f"{name} had been cut short; finished: every worker proves it"
        return Settled(pending.revision, "applied", said)
    with observer.step(f"Undoing revision {pending.revision}, which was cut short"):
        # Backwards: the file that calls the runtime goes first, so that whoever imports finds a whole pair.
        back = [(f, f.before) for f in reversed(pending.files)]
        number = _put(node, survey, pending, back, of=pending.revision)
        _close_number(node, survey, number, "applied", f"revision {pending.revision} was cut short")
        _close(node, survey, pending, "rolled-back", f"cut short; undone by revision {number}")
    ran = survey.server is not None and _started(survey) >= pending.started
    if pending.kind == "set":
        ran = _in_force_somewhere(survey, pending)
    said = f"{name} had been cut short; undone, the bytes from before are back"
    return Settled(pending.revision, "rolled-back", said, ran or down)


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
    present = survey.hashes
    return any(present.get(f.path) == f.after != f.before for f in pending.files)


def _complete(node: Node, survey: Survey, pending: Record, observer: Observer) -> None:
    """Bring every file of a rollback to where it was to go, and close it."""
    present = survey.hashes
    if all(present.get(f.path) == f.after for f in pending.files):
        _close(node, survey, pending, "applied", "finished by a later run")
        return
    with observer.step(f"Finishing revision {pending.revision}, a rollback that was cut short"):
        number = _put(node, survey, pending, [(f, f.after) for f in pending.files], of=pending.of)
        _close_number(node, survey, number, "applied", f"finished what revision {pending.revision} began")
        _close(node, survey, pending, "failed", f"cut short; finished by revision {number}")


def _put(
    node: Node, survey: Survey, pending: Record, wanted: Sequence[tuple[FileChange, str | None]], *, of: int | None
) -> int:
    """Give each file of a pending revision the wanted one of its two contents; return the new revision's number."""
    user, host = leases.whoami()
    answer = node.call(
        "restore",
        {
            "site_id": survey.installed.site_id,
            "record": {
                "kind": "rollback",
                "of": of,
                "patch": pending.patch,
                "patch_version": pending.patch_version,
                "version": pending.version,
                "who": user,
                "from": host,
                "originals": {f.path: f.original for f in pending.files},
            },
            "files": [{"path": f.path, "present": [f.after, f.before], "restore": sha} for f, sha in wanted],
            "interpreter": survey.installed.python,
        },
        deadline_s=60.0,
    )
    return int(answer["revision"])


def _close(node: Node, survey: Survey, pending: Record, status: str, note: str) -> None:
    _close_number(node, survey, pending.revision, status, note)


def _close_number(node: Node, survey: Survey, number: int, status: str, note: str) -> None:
    node.call(
        "finish", {"site_id": survey.installed.site_id, "revision": number, "status": status, "gates": [], "note": note}
    )


def _undone_by(survey: Survey, pending: Record) -> Record | None:
    """The rollback that had already brought back what was before this revision."""
    undoing = (r for r in survey.ledger.records if r.kind == "rollback" and r.of == pending.revision)
    return next((r for r in undoing if r.status == "applied"), None)


def _started(survey: Survey) -> float:
    """When the running server was started; never, if none runs."""
    return survey.server.started if survey.server is not None else float("inf")


def _in_force_somewhere(survey: Survey, pending: Record) -> bool:
    """Whether a rank of the running server already obeys settings that were written and are now taken back."""
    workers = survey.server.workers if survey.server is not None else ()
    ranks = beacons.switches(survey.beacons, workers)
    written, _ = proof.present_settings((survey.beside.get("settings") or {}).get("text"), {})
    return pending.kind == "set" and any(rank.generation == written for rank in ranks)


def _proved(survey: Survey, patch: Patch, pending: Record) -> bool:
    complete = survey.server is not None and (pending.kind == "set" or survey.server.started >= pending.started)
    return complete and not proof.beacon_problems(survey, patch)
