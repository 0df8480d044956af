"""The way back: whatever fails after the first byte was written, the bytes from before return and the server runs."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from surgeon.errors import GateFailedError, RollbackFailedError, SurgeonError, UnreachableError
from surgeon.ledger.records import parse_ledger
from surgeon.operations import gates, lease, settle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surgeon.ledger.records import Gate
    from surgeon.node.client import Node
    from surgeon.operations.observer import Observer
    from surgeon.operations.plan import Plan
    from surgeon.operations.settle import Settled
    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch


class GateDown(Exception):  # noqa: N818 - it is a finding on its way to on_failure, which turns it into an error
    """A gate did not hold."""

    def __init__(self, failed: gates.Failed) -> None:
        super().__init__(failed.why)
        self.failed = failed


class Attempt:
    """What was written so far, for the way back.

    Attributes:
        revision: the pending revision, None while nothing was written.
        writing: whether the node was asked to write; its answer may be lost to an interrupt.
        touched_server: whether the server was stopped or restarted.
    """

    def __init__(self) -> None:
        self.revision: int | None = None
        self.writing = False
        self.touched_server = False


@contextmanager
def on_failure(node: Node, seen: Survey, planned: Plan, observer: Observer, *, ready_s: float) -> Iterator[Attempt]:
    """Undo an attempt if the body fails, however it fails.

    Raises:
        GateFailedError: the body failed; everything is back as it was.
        RollbackFailedError: the body failed and so did the way back; what to do by hand is in the advice.
        UnreachableError: the connection was cut; the next command finishes or undoes the revision.
        KeyboardInterrupt: it was interrupted; everything is back as it was.
    """
    attempt = Attempt()
    try:
        yield attempt
    except UnreachableError as error:
        pending = f"revision {attempt.revision} is pending" if attempt.revision else "a revision may be pending"
        error.advice = f"{pending}; the next apply, rollback or restart finishes or undoes it"
        raise
    except KeyboardInterrupt:
        if attempt.writing and attempt.revision is None:
            attempt.revision = _pending(node, seen)
        if attempt.revision is not None or attempt.touched_server:
            observer.warn("interrupted: putting everything back (once more Ctrl-C leaves it to the next command)")
            _way_back(node, seen, planned, attempt, observer, ready_s, ("interrupted", (), ""))
        raise
    except GateDown as down:
        story = (down.failed.why, down.failed.gates, down.failed.advice)
        _way_back(node, seen, planned, attempt, observer, ready_s, story)
        raise GateFailedError(
            f"{down.failed.why}; rolled back, the bytes from before are back",
            advice=down.failed.advice,
            where=planned.path,
        ) from down
    except SurgeonError as error:
        if attempt.revision is None and not attempt.touched_server:
            raise
        _way_back(node, seen, planned, attempt, observer, ready_s, (error.message, (), error.advice))
        raise GateFailedError(
            f"{error.message}; rolled back, the bytes from before are back", advice=error.advice, where=error.where
        ) from error


def _pending(node: Node, seen: Survey) -> int | None:
    """The revision that the node began while nobody listened any more."""
    left = parse_ledger(node.call("ledger", {"site_id": seen.installed.site_id})).pending
    return left.revision if left else None


def _way_back(
    node: Node,
    seen: Survey,
    planned: Plan,
    attempt: Attempt,
    observer: Observer,
    ready_s: float,
    story: tuple[str, tuple[Gate, ...], str],
) -> None:
    why, passed, _ = story
    site_id = seen.installed.site_id
    try:
        if attempt.revision is not None:
            with observer.step("Rolling back: restoring the bytes from before") as step:
                restore(node, seen, planned, attempt.revision, why)
                step.done("restored and read back")
            node.call(
                "finish",
                {
                    "site_id": site_id,
                    "revision": attempt.revision,
                    "status": "rolled-back",
                    "gates": [g.to_json() for g in passed],
                    "note": why[:500],
                },
            )
        if attempt.touched_server:
            _start_again(node, seen, observer, ready_s)
    except (SurgeonError, GateDown) as error:
        message = error.message if isinstance(error, SurgeonError) else str(error)
        raise RollbackFailedError(
            f"{why}; and the way back failed: {message}", advice=by_hand(seen, planned), where=planned.path
        ) from error


def restore(node: Node, seen: Survey, planned: Plan, revision: int, why: str) -> None:
    """Put back what ``revision`` replaced, as a revision of its own that is closed at once."""
    answer = node.call(
        "restore",
        {
            "site_id": seen.installed.site_id,
            "record": {**_rollback_record(planned.patch, planned.version, revision), "note": why[:500]},
            "files": [
                {"path": f.path, "present": [_digest(f.content), f.expect], "restore": f.expect}
                for f in reversed(planned.files)
            ],
            "interpreter": seen.installed.python,
        },
        deadline_s=60.0,
    )
    node.call(
        "finish",
        {"site_id": seen.installed.site_id, "revision": int(answer["revision"]), "status": "applied", "gates": []},
    )


def settle_and_start(node: Node, seen: Survey, patch: Patch, observer: Observer, *, ready_s: float) -> Settled | None:
    """Close a pending revision and bring a server back that an earlier run left stopped. The lease must be held.

    Returns:
        What was settled, or None if there was nothing.

    Raises:
        GateFailedError: the server that was left stopped does not come back.
    """
    settled = settle.settle(node, seen, patch, observer)
    if settled is None and settle.is_down(seen):
        settled = settle.Settled(0, "applied", "surgeon had stopped the server and was cut short; started again", True)
    if settled is None:
        return None
    observer.note(settled.said)
    if settled.restart:
        try:
            _start_again(node, seen, observer, ready_s)
        except GateDown as down:
            raise GateFailedError(
                f"{settled.said}; but the server does not become ready: {down.failed.why}", advice=down.failed.advice
            ) from down
    return settled


def _start_again(node: Node, seen: Survey, observer: Observer, ready_s: float) -> None:
    """Start the server with whatever bytes are there now, and hold it to readiness only."""
    running = gates.current(node, seen.server)
    outcome = gates.restart(node, seen, running, gates.Wanted(patch=None, ready_s=ready_s), observer)
    if isinstance(outcome, gates.Failed):
        raise GateDown(outcome)


def by_hand(seen: Survey, planned: Plan) -> str:
    """What a person can do when nothing else worked."""
    objects = f"{seen.state_dir}/{seen.installed.site_id}/objects"
    lines = [
        f"rm -f {file.path}" if file.expect is None else f"cp {objects}/{file.expect} {file.path}"
        for file in reversed(planned.files)
    ]
    restart = "start the server as it was started" if seen.server else "nothing needs to be started"
    return f"by hand, on the node: {'; '.join(lines)}; then {restart}"


def not_serving(path: str, sha256: str, failed: gates.Failed) -> RollbackFailedError:
    """The bytes are the original's, and yet the server does not come up: nothing is left to undo."""
    return RollbackFailedError(
        f"the bytes are back ({path} is {sha256[:12]}), but the server does not pass its gates: {failed.why}",
        advice=failed.advice or "read its log with `surgeon logs`; `surgeon restart` tries again",
        where=path,
    )


def _rollback_record(patch: Patch, version: str, of: int) -> dict[str, object]:
    user, host = lease.whoami()
    return {
        "kind": "rollback",
        "of": of,
        "patch": patch.name,
        "patch_version": patch.version,
        "package": "sglang",
        "version": version,
        "who": user,
        "from": host,
    }


def _digest(content: bytes | None) -> str | None:
    return hashlib.sha256(content).hexdigest() if content is not None else None
