"""The story of ``surgeon rollback``: the exact bytes come back, the server restarts and serves without the patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from surgeon.errors import ForeignEditError, UsageError
from surgeon.operations import apply, gates, lease, plan, proof, settle, survey, undo

if TYPE_CHECKING:
    from collections.abc import Callable

    from surgeon.bench.smoke import SmokeResult
    from surgeon.ledger.records import Gate, Ledger
    from surgeon.ledger.state import Verdict
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.observer import Observer
    from surgeon.operations.settle import Settled
    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch

ORIGINAL: Final = 0


@dataclass(frozen=True)
class FileBack:
    """One file that changes: from the sha256 it has to the one it gets (None: it is not there)."""

    path: str
    present: str | None
    restore: str | None


@dataclass(frozen=True)
class RollbackPlan:
    """What a rollback would do.

    Attributes:
        to: the revision whose state returns; 0 is the package as it was installed.
        of: the revision that is left.
        unchanged: why nothing needs to be done; empty if something does.
    """

    path: str
    version: str
    state: Verdict
    to: int
    of: int | None
    files: tuple[FileBack, ...]
    restart: bool
    unchanged: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a rollback came to. ``sha256`` is the patched file's, read back from the node."""

    status: Literal["planned", "declined", "unchanged", "rolled-back"]
    plan: RollbackPlan
    revision: int | None = None
    sha256: str = ""
    gates: tuple[Gate, ...] = ()
    smoke: SmokeResult | None = None
    settled: Settled | None = None


def run(
    node: Node,
    target: Target,
    patch: Patch,
    to: int,
    options: apply.Options,
    observer: Observer,
    confirm: Callable[[RollbackPlan], bool],
) -> Outcome:
    """Return to the state after revision ``to`` (0: as installed).

    Raises:
        SurgeonError: its subclass says what was refused or failed.
    """
    seen = survey.take(node, target, patch)
    if options.dry_run:
        planned = make_plan(seen, patch, to, restart=options.restart)
        return Outcome("planned", planned, sha256=seen.file.sha256)
    agreed: RollbackPlan | None = None
    if seen.ledger.pending is None and not settle.is_down(seen):
        agreed = make_plan(seen, patch, to, restart=options.restart)
        if agreed.unchanged:
            return Outcome("unchanged", agreed, sha256=seen.file.sha256)
        if not confirm(agreed):
            return Outcome("declined", agreed, sha256=seen.file.sha256)
    if not options.break_lock:
        settle.refuse_if_busy(seen)
    with lease.held(node, seen, observer, break_lock=options.break_lock):
        now, settled = undo.settle_all(node, seen, patch, observer, ready_s=options.ready_s)
        known = agreed if now is seen else None
        planned = known or make_plan(now, patch, to, restart=options.restart)
        if planned.unchanged:
            return Outcome("unchanged", planned, sha256=now.file.sha256, settled=settled)
        if planned != agreed and not confirm(planned):
            return Outcome("declined", planned, sha256=now.file.sha256, settled=settled)
        with undo.left_to_the_next("the rollback may be pending", "finishes it", observer):
            return _carry_out(node, now, patch, planned, options, observer, settled)


def make_plan(seen: Survey, patch: Patch, to: int, *, restart: bool) -> RollbackPlan:
    """Plan a rollback, or refuse it.

    Raises:
        UsageError: there is no such revision.
        ForeignEditError: a file was changed by somebody else since.
        DoesNotFitError: the server is not ours to restart.
    """
    ledger = seen.ledger
    if to != ORIGINAL and (ledger.get(to) is None or ledger.get(to).status != "applied"):  # type: ignore[union-attr]
        known = ", ".join(str(r.revision) for r in ledger.records if r.status == "applied") or "none"
        raise UsageError(
            f"revision {to} is not one that can be returned to; expected 0 (as installed) or one of: {known}",
            advice="`surgeon history` lists them",
            where="REVISION",
        )
    findings = plan.examine(seen, patch)
    present = seen.hashes
    installed = {file.path: file.record_sha256 for file in (seen.file, seen.runner) if file is not None}
    wanted = _state_after(ledger, to)
    files: list[FileBack] = []
    warnings: list[str] = []
    for path in reversed(list(wanted)):
        now = present.get(path)
        if now == wanted[path]:
            continue
        if now is not None and ledger.producer(path, now) is None:
            if installed.get(path) == now:
                warnings.append(f"{path} is a newer installation's; it is left as it is")
                continue
            raise ForeignEditError(
                f"{path} is not what surgeon wrote (sha256 {now[:12]}); expected a result that the ledger knows",
                advice="look at it with `surgeon diff`; reinstalling the package also brings its own file back",
                where=path,
            )
        files.append(FileBack(path, now, wanted[path]))
    # The files that call the runtime go first: whoever imports in between finds a whole set.
    files.sort(key=lambda f: (f.path != seen.file.path, f.path not in installed))
    head = ledger.head
    unchanged = ""
    server = seen.server
    stale_server = to == ORIGINAL and proof.still_running(seen)
    if server is not None and not restart:
        warnings.append("the running server keeps what it has loaded until it is restarted")
    if not files and not (stale_server and restart):
        unchanged = "nothing to roll back: the package's files are as they were installed"
        if to != ORIGINAL:
            unchanged = f"nothing to roll back: the files already are as after revision {to}"
    elif restart:
        plan.refuse_supervised(seen)
    return RollbackPlan(
        path=seen.file.path,
        version=seen.installed.version,
        state=findings.state,
        to=to,
        of=head.revision if head else None,
        files=tuple(files),
        restart=restart and server is not None,
        unchanged=unchanged,
        warnings=tuple(warnings),
    )


def _state_after(ledger: Ledger, to: int) -> dict[str, str | None]:
    """Every file that surgeon ever touched here, with the sha256 that it had after revision ``to``."""
    state: dict[str, str | None] = {}
    for record in ledger.records:
        for change in record.files:
            state.setdefault(change.path, change.original)
            if record.status == "applied" and record.revision <= to:
                state[change.path] = change.after
    if to == ORIGINAL:
        for record in ledger.records:
            for change in record.files:
                # A package that was replaced in between has another original: the newest one counts.
                if record.status == "applied":
                    state[change.path] = change.original
    return state


def _originals(ledger: Ledger) -> dict[str, str | None]:
    """The newest original of every file that surgeon ever touched here."""
    return {c.path: c.original for r in ledger.records if r.status != "failed" for c in r.files}


def _carry_out(
    node: Node,
    seen: Survey,
    patch: Patch,
    planned: RollbackPlan,
    options: apply.Options,
    observer: Observer,
    settled: Settled | None,
) -> Outcome:
    site_id = seen.installed.site_id
    user, host = lease.whoami()
    revision: int | None = None
    sha256 = seen.file.sha256
    if planned.files:
        with observer.step(f"Restoring {len(planned.files)} files") as step:
            answer = node.call(
                "restore",
                {
                    "site_id": site_id,
                    "record": {
                        "kind": "rollback",
                        "of": planned.of,
                        "to": planned.to,
                        "patch": patch.name,
                        "patch_version": patch.version,
                        "package": "sglang",
                        "version": planned.version,
                        "who": user,
                        "from": host,
                        "originals": _originals(seen.ledger),
                    },
                    "files": [{"path": f.path, "present": [f.present], "restore": f.restore} for f in planned.files],
                    "interpreter": seen.installed.python,
                    "last": not planned.restart,
                },
                deadline_s=60.0,
            )
            if not planned.restart:
                node.lease = None
            revision = int(answer["revision"])
            sha256 = next((f["after"] for f in answer["files"] if f["path"] == planned.path), sha256)
            step.done(f"revision {revision}, read back: topk.py is {sha256[:12]}")
    passed: tuple[Gate, ...] = ()
    result: SmokeResult | None = None
    failed: gates.Failed | None = None
    if planned.restart:
        label = f"{patch.name}: revision {planned.to}" if planned.to != ORIGINAL else ""
        load = options.load if options.bench else None
        wanted = gates.Wanted(patch=None, ready_s=options.ready_s, load=load, patched=label)
        outcome = gates.restart(node, seen, seen.server, wanted, observer)
        passed = outcome.gates
        failed = outcome if isinstance(outcome, gates.Failed) else None
        result = outcome.smoke if isinstance(outcome, gates.Passed) else None
    if revision is not None and planned.restart:
        node.call(
            "finish",
            {
                "site_id": site_id,
                "revision": revision,
                "status": "applied",
                "gates": [g.to_json() for g in passed],
                "note": failed.why[:500] if failed else "",
            },
        )
    if failed is not None:
        raise undo.not_serving(planned.path, sha256, failed)
    return Outcome("rolled-back", planned, revision, sha256, passed, result, settled)
