"""The story of ``surgeon apply``: survey, judge, plan, confirm, commit, restart, gate, finish or roll back."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from surgeon.bench.smoke import Load, SmokeResult, last_unpatched
from surgeon.errors import SurgeonError
from surgeon.operations import environment, gates, lease, plan, settle, smoke, survey, undo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from surgeon.ledger.records import Gate
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.observer import Observer
    from surgeon.operations.plan import Plan
    from surgeon.operations.settle import Settled
    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch

READY_DEADLINE_S: Final = 1800.0


@dataclass(frozen=True)
class Options:
    """How to apply.

    Attributes:
        dry_run: plan and stop.
        restart: restart the server and hold it to the gates.
        bench: end with the smoke benchmark.
        break_lock: take the lease from whoever holds it.
        ready_s: seconds until a server that is not ready counts as failed.
        load: the smoke benchmark's load.
    """

    dry_run: bool = False
    restart: bool = True
    bench: bool = True
    break_lock: bool = False
    ready_s: float = READY_DEADLINE_S
    load: Load = field(default_factory=Load)


@dataclass(frozen=True)
class Outcome:
    """What an apply came to.

    Attributes:
        status: ``planned`` (dry run), ``declined``, ``unchanged`` or ``applied``.
        revision: the new revision, if one was made.
        live: whether every worker proved it.
        before: the last smoke result of the unpatched server.
    """

    status: Literal["planned", "declined", "unchanged", "applied"]
    plan: Plan
    revision: int | None = None
    live: bool = False
    gates: tuple[Gate, ...] = ()
    smoke: SmokeResult | None = None
    before: SmokeResult | None = None
    settled: Settled | None = None


def run(
    node: Node,
    target: Target,
    patch: Patch,
    wanted: Mapping[str, Any],
    options: Options,
    observer: Observer,
    confirm: Callable[[Plan], bool],
) -> Outcome:
    """Apply ``patch`` with the settings in ``wanted``.

    Raises:
        SurgeonError: its subclass says what was refused or failed; after GateFailedError the bytes from before are
            back and the server runs again.
    """
    seen = survey.take(node, target, patch)
    if options.dry_run:
        return Outcome("planned", plan.make(seen, patch, wanted, restart=options.restart))
    planned: Plan | None = None
    if seen.ledger.pending is None and not settle.is_down(seen):
        planned = plan.make(seen, patch, wanted, restart=options.restart)
        if planned.unchanged:
            return Outcome("unchanged", planned)
        if planned.restart:
            environment.refuse_drift(node, seen, observer)
        if not confirm(planned):
            return Outcome("declined", planned)
    if not options.break_lock:
        settle.refuse_if_busy(seen)
    if planned is not None and not planned.restart and not settle.unsteady(seen):
        # Nothing to settle and nothing to follow: the write itself takes the lease and lets it go.
        return _carry_out(node, seen, planned, options, observer)
    with lease.held(node, seen, observer, break_lock=options.break_lock):
        now, settled = undo.settle_all(node, seen, patch, observer, ready_s=options.ready_s)
        if planned is None or now is not seen:
            agreed, planned = planned, plan.make(now, patch, wanted, restart=options.restart)
            ended = _look_again(node, now, planned, agreed, observer, confirm)
            if ended is not None:
                return Outcome(ended, planned, settled=settled)
        outcome = _carry_out(node, now, planned, options, observer)
        return replace(outcome, settled=settled)


def _look_again(
    node: Node,
    now: Survey,
    planned: Plan,
    agreed: Plan | None,
    observer: Observer,
    confirm: Callable[[Plan], bool],
) -> Literal["unchanged", "declined"] | None:
    """Judge a plan that was made anew under the lease; a person is asked again only if it is another plan."""
    if planned.unchanged:
        return "unchanged"
    if planned.restart:
        environment.refuse_drift(node, now, observer)
    return None if planned == agreed or confirm(planned) else "declined"


def _carry_out(node: Node, seen: Survey, planned: Plan, options: Options, observer: Observer) -> Outcome:
    before = _unpatched(node, seen, planned, options, observer)
    site_id = seen.installed.site_id
    gates_passed: tuple[Gate, ...] = ()
    result: SmokeResult | None = None
    with undo.on_failure(node, seen, planned, observer, ready_s=options.ready_s) as attempt:
        if planned.files:
            commit(node, seen, planned, observer, attempt)
        if planned.restart:
            attempt.touched_server = True
            outcome = gates.restart(node, seen, seen.server, _wanted(seen, planned, options), observer)
            if isinstance(outcome, gates.Failed):
                raise undo.GateDown(outcome)
            gates_passed, result = outcome.gates, outcome.smoke
        if attempt.revision is not None and planned.restart:
            passed = [g.to_json() for g in gates_passed]
            node.call(
                "finish", {"site_id": site_id, "revision": attempt.revision, "status": "applied", "gates": passed}
            )
    head = seen.ledger.head
    number = attempt.revision or (head.revision if head else None)
    return Outcome("applied", planned, number, live=planned.restart, gates=gates_passed, smoke=result, before=before)


def _wanted(seen: Survey, planned: Plan, options: Options) -> gates.Wanted:
    return gates.Wanted(
        patch=planned.patch,
        ready_s=options.ready_s,
        settings_text=_settings_text(seen, planned),
        load=options.load if options.bench else None,
        patched=f"{planned.patch.name}: {planned.patch.say(planned.settings)}",
    )


def commit(node: Node, seen: Survey, planned: Plan, observer: Observer, attempt: undo.Attempt) -> None:
    """Write the plan's files as a pending revision; the node puts everything back if any of it fails."""
    user, host = lease.whoami()
    previous = {f.path: f.original for f in (seen.ledger.head.files if seen.ledger.head else ())}
    with observer.step(f"Writing {len(planned.files)} files") as step:
        attempt.writing = True
        answer = node.call(
            "commit",
            {
                "site_id": seen.installed.site_id,
                "record": {
                    "kind": "apply",
                    "patch": planned.patch.name,
                    "patch_version": planned.patch.version,
                    "patch_hash": planned.patch.hash,
                    "settings": dict(planned.settings),
                    "package": "sglang",
                    "version": planned.version,
                    "who": user,
                    "from": host,
                    "originals": {**previous, **{f.path: f.original for f in planned.files}},
                },
                "files": [
                    {
                        "path": f.path,
                        "b64": base64.b64encode(f.content).decode() if f.content is not None else None,
                        "expect": f.expect,
                        # What the package brings keeps its own mode and owner.
                        "like": planned.path if f.original is None else None,
                    }
                    for f in planned.files
                ],
                "interpreter": seen.installed.python,
                "last": not planned.restart,
                "lease": lease.claim() if node.lease is None else None,
            },
            deadline_s=60.0,
        )
        attempt.revision = int(answer["revision"])
        if not planned.restart:
            node.lease = None
        for written in answer["files"]:
            _assert_written(planned, written)
        step.done(f"revision {attempt.revision}, read back and byte-compiled")


def _assert_written(planned: Plan, written: Mapping[str, Any]) -> None:
    wanted = next(f for f in planned.files if f.path == written["path"])
    digest = hashlib.sha256(wanted.content).hexdigest() if wanted.content is not None else None
    if written["after"] != digest:
        raise SurgeonError(f"the node read back {written['after']} for {wanted.path}; expected {digest}")


def _settings_text(seen: Survey, planned: Plan) -> str | None:
    name = f"{planned.patch.module}.json"
    for file in planned.files:
        if file.path.endswith(name) and file.content is not None:
            return file.content.decode()
    return (seen.beside.get("settings") or {}).get("text")


def _unpatched(node: Node, seen: Survey, planned: Plan, options: Options, observer: Observer) -> SmokeResult | None:
    """The last result of the unpatched server; measured now if there is none and it still runs unpatched."""
    results = seen.documents.get("smoke")
    known = last_unpatched(results if isinstance(results, list) else [], options.load, planned.version)
    runs_unpatched = seen.server is not None and not planned.state.state.on_disk
    if known is not None or not (planned.restart and options.bench and runs_unpatched and seen.server):
        return known
    observer.note("no smoke result of the unpatched server is on record: measuring it first")
    return smoke.run(node, seen, seen.server, observer, patched="", load=options.load)
