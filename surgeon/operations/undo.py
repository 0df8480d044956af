"""The way back: whatever fails after the first byte was written, the bytes from before return and the server runs."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from surgeon.errors import GateFailedError, LockedError, RollbackFailedError, SurgeonError, UnreachableError
from surgeon.ledger.records import parse_ledger
from surgeon.operations import gates, lease, settle, survey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surgeon.ledger.records import Gate, Ledger
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

    @property
    def begun(self) -> bool:
        """Whether there may be anything to undo."""
        return self.writing or self.touched_server

    def left(self) -> str:
        """What is left to the next command, in words."""
        if self.revision is None and not self.writing:
            return f"the server may be down; {_NEXT} starts it"
        name = "a revision may be" if self.revision is None else f"revision {self.revision} is"
        return f"{name} pending; {_NEXT} finishes or undoes it"


_LOOK: Final = "its log tells more: `surgeon logs`; a server that only needs longer gets it by --ready-timeout"
_AGAIN: Final = "read its log with `surgeon logs`; `surgeon restart` tries again"
_NEXT: Final = "the next apply, rollback or restart"
# A commit that nobody waits for any more ends by its own deadline, and the node's lock is free then.
_COMMIT_DEADLINE_S: Final = 90.0


@contextmanager
def on_failure(node: Node, seen: Survey, planned: Plan, observer: Observer, *, ready_s: float) -> Iterator[Attempt]:
    """Undo an attempt if the body fails, however it fails.

    Raises:
        GateFailedError: the body failed; everything is back as it was.
        RollbackFailedError: the body failed and so did the way back; what to do by hand is in the advice.
        UnreachableError: the connection was cut; the next command finishes or undoes the revision.
        LockedError: another took the lease and decides from here on.
        KeyboardInterrupt: it was interrupted; everything is back as it was.
    """
    attempt = Attempt()
    try:
        yield attempt
    except (UnreachableError, LockedError) as error:
        if attempt.begun and not (isinstance(error, LockedError) and attempt.revision is None):
            error.advice = attempt.left()
        raise
    except KeyboardInterrupt:
        if attempt.begun:
            _interrupted(node, seen, planned, attempt, observer, ready_s)
        raise
    except GateDown as down:
        story = (down.failed.why, down.failed.gates, down.failed.advice)
        _way_back(node, seen, planned, attempt, observer, ready_s, story)
        raise GateFailedError(
            f"the server failed its gates: {down.failed.why}; rolled back, the bytes from before are back",
            advice=down.failed.advice or _LOOK,
            where=planned.path,
        ) from down
    except SurgeonError as error:
        if attempt.revision is None and not attempt.touched_server:
            raise
        _way_back(node, seen, planned, attempt, observer, ready_s, (error.message, (), error.advice))
        raise GateFailedError(
            f"{error.message}; rolled back, the bytes from before are back", advice=error.advice, where=error.where
        ) from error
    except Exception as error:
        if attempt.revision is not None or attempt.touched_server:
            _way_back(node, seen, planned, attempt, observer, ready_s, (f"{type(error).__name__}: {error}", (), ""))
        raise


def _interrupted(node: Node, seen: Survey, planned: Plan, attempt: Attempt, observer: Observer, ready_s: float) -> None:
    observer.warn("interrupted: putting everything back (once more Ctrl-C leaves it to the next command)")
    try:
        if attempt.writing and attempt.revision is None:
            try:
                attempt.revision = pending(node, seen)
            except LockedError:
                if planned.restart or _ledger(node, seen).lease is not None:
                    raise
                # A write that nothing follows closes its revision and lets the lease go in the same breath.
                observer.warn("too late to stop the write, which is done and closed; `surgeon rollback` takes it back")
                return
        _way_back(node, seen, planned, attempt, observer, ready_s, ("interrupted", (), ""))
    except (UnreachableError, LockedError) as error:
        error.advice = attempt.left()
        raise
    except KeyboardInterrupt:
        observer.warn(f"left as it is: {attempt.left()}")
        raise
    if attempt.revision is not None:
        observer.note(f"revision {attempt.revision} is rolled back: everything is as it was before")


@contextmanager
def left_to_the_next(what: str, does: str, observer: Observer) -> Iterator[None]:
    """Say what the next command does, where breaking off leaves something that must not be undone.

    Args:
        what: what is left.
        does: what the next command does about it.
        observer: is told when it is a person who broke it off.
    """
    said = f"{what}; {_NEXT} {does}"
    try:
        yield
    except (UnreachableError, LockedError) as error:
        error.advice = said
        raise
    except KeyboardInterrupt:
        observer.warn(f"interrupted: {said}")
        raise


def pending(node: Node, seen: Survey) -> int | None:
    """The revision that the node began while nobody listened any more."""
    site_id = seen.installed.site_id
    # The agent goes on with a commit whose client has turned away, and holds the site's lock until it is done.
    lease.renew(node, site_id, deadline_s=_COMMIT_DEADLINE_S)
    left = _ledger(node, seen).pending
    return left.revision if left else None


def _ledger(node: Node, seen: Survey) -> Ledger:
    return parse_ledger(node.call("ledger", {"site_id": seen.installed.site_id}))


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
        failed = _start_again(node, seen, observer, ready_s) if attempt.touched_server else None
        if attempt.revision is not None:
            # Closed last: while it is pending, the next command knows that the server may run what was undone.
            passed_json = [g.to_json() for g in passed]
            closing = {"site_id": site_id, "revision": attempt.revision, "status": "rolled-back", "note": why[:500]}
            node.call("finish", {**closing, "gates": passed_json})
    except (UnreachableError, LockedError) as error:
        error.message = f"{why}; and on the way back: {error.message}"
        error.advice = attempt.left()
        raise
    except SurgeonError as error:
        raise RollbackFailedError(
            f"{why}; and the way back failed: {error.message}", advice=by_hand(seen, planned), where=planned.path
        ) from error
    if failed is not None:
        with_them = "with them either" if failed.why == why else f"with them: {failed.why}"
        raise RollbackFailedError(
            f"{why}; the bytes from before are back, but the server does not become ready {with_them}",
            advice=failed.advice or _AGAIN,
            where=planned.path,
        )


def restore(node: Node, seen: Survey, planned: Plan, revision: int, why: str) -> None:
    """Put back what ``revision`` replaced, as a revision of its own that is closed at once."""
    answer = node.call(
        "restore",
        {
            "site_id": seen.installed.site_id,
            "record": {
                **_rollback_record(planned.patch, planned.version, revision),
                "originals": {f.path: f.original for f in planned.files},
                "note": why[:500],
            },
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


def settle_all(
    node: Node, seen: Survey, patch: Patch, observer: Observer, *, ready_s: float
) -> tuple[Survey, Settled | None]:
    """Close what earlier runs left pending, and bring a server back that they left down. The lease must be held.

    Args:
        node: where.
        seen: a survey of it from before the lease was held.
        patch: whose revisions they are.
        observer: is told what became of each.
        ready_s: seconds that a start may take.

    Returns:
        The survey that counts from here on (the same one if it still holds), and what was settled, if anything.

    Raises:
        GateFailedError: a server that had to be started again does not come back.
    """
    if not settle.unsteady(seen):
        return seen, None
    seen = survey.take(node, node.target, patch)
    done: list[Settled] = []
    while (settled := settle.settle(node, seen, patch, observer)) is not None:
        observer.note(settled.said)
        done.append(settled)
        before, seen = seen, survey.take(node, node.target, patch)
        if settled.restart:
            start_again(node, before, observer, settled.said, ready_s=ready_s)
            seen = survey.take(node, node.target, patch)
    if settle.is_down(seen):
        back = settle.Settled(0, "applied", f"{settle.DOWN}; started again", restart=True)
        observer.note(back.said)
        done.append(back)
        start_again(node, seen, observer, settle.DOWN, ready_s=ready_s)
        seen = survey.take(node, node.target, patch)
    if not done:
        return seen, None
    said = "; ".join(one.said for one in done)
    return seen, settle.Settled(done[0].revision, done[0].outcome, said, any(one.restart for one in done))


def start_again(node: Node, seen: Survey, observer: Observer, why: str, *, ready_s: float) -> None:
    """Restart the server, whichever bytes are there now, and hold it to readiness only.

    Raises:
        GateFailedError: it does not become ready; ``why`` says why it was started at all.
    """
    down = _start_again(node, seen, observer, ready_s)
    if down is not None:
        raise GateFailedError(f"{why}; but the server does not become ready: {down.why}", advice=down.advice)


def _start_again(node: Node, seen: Survey, observer: Observer, ready_s: float) -> gates.Failed | None:
    wanted = gates.Wanted(patch=None, ready_s=ready_s)
    outcome = gates.restart(node, seen, seen.server, wanted, observer)
    return outcome if isinstance(outcome, gates.Failed) else None


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
        advice=failed.advice or _AGAIN,
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
