"""The way back from a change of settings: whatever fails, every rank runs with those from before."""

from __future__ import annotations

import hashlib
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import GateFailedError, LockedError, RollbackFailedError, SurgeonError, UnreachableError
from surgeon.operations import lease, proof, undo
from surgeon.operations.switching import AHEAD, ARM_S, CARRY_S, POLL_S, Attempt
from surgeon.server import beacons

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from surgeon.operations.switching import Switching
    from surgeon.server.beacons import Switch

_RESTART: Final = "`surgeon restart` starts every rank with the settings file"


@contextmanager
def put_back_on_failure(switch: Switching, before: Mapping[str, Any]) -> Iterator[Attempt]:
    """Bring the settings from before back if the body fails, however it fails.

    Raises:
        GateFailedError: the body failed; the settings from before are back.
        RollbackFailedError: the body failed and so did the way back.
        UnreachableError: the connection was cut; the next command finishes or undoes the revision.
        LockedError: another took the lease and decides from here on.
        KeyboardInterrupt: it was interrupted; the settings from before are back.
    """
    attempt = Attempt()
    try:
        yield attempt
    except (UnreachableError, LockedError) as error:
        if attempt.writing and not (isinstance(error, LockedError) and attempt.revision is None):
            error.advice = attempt.left()
        raise
    except KeyboardInterrupt:
        if attempt.writing:
            _interrupted(switch, attempt, before)
        raise
    except SurgeonError as error:
        if attempt.revision is None:
            raise
        put_back(switch, attempt, before, error.message)
        raise GateFailedError(
            f"{error.message}; the settings from before are back",
            advice=error.advice or "read the server's log with `surgeon logs`, then try again",
            where=switch.path,
        ) from error


def _interrupted(switch: Switching, attempt: Attempt, before: Mapping[str, Any]) -> None:
    switch.observer.warn(
        "interrupted: putting the settings from before back (once more Ctrl-C leaves it to the next command)"
    )
    try:
        if attempt.revision is None:
            attempt.revision = undo.pending(switch.node, switch.seen)
        if attempt.revision is not None:
            put_back(switch, attempt, before, "interrupted")
            switch.observer.note(f"revision {attempt.revision} is rolled back: the settings from before are back")
    except (UnreachableError, LockedError) as error:
        error.advice = attempt.left()
        raise
    except KeyboardInterrupt:
        switch.observer.warn(f"left as it is: {attempt.left()}")
        raise


def put_back(switch: Switching, attempt: Attempt, before: Mapping[str, Any], why: str) -> None:
    """Bring the settings from before back, in the file and in every rank.

    Raises:
        RollbackFailedError: a rank keeps the new ones.
    """
    assert attempt.revision is not None  # noqa: S101 - the callers have seen to it
    with switch.observer.step("Putting the settings from before back") as step:
        try:
            number = _restore(switch, attempt, why)
            switch.close(number, "applied", note=why)
            if not _disarmed(switch, attempt):
                _force_back(switch, attempt, before, why)
        except (UnreachableError, LockedError):
            raise
        except SurgeonError as error:
            raise RollbackFailedError(
                f"{why}; and on the way back: {error.message}", advice=_RESTART, where=switch.path
            ) from error
        switch.close(attempt.revision, "rolled-back", note=why)
        step.done("in every rank")


def _restore(switch: Switching, attempt: Attempt, why: str) -> int:
    user, host = lease.whoami()
    answer = switch.node.call(
        "restore",
        {
            "site_id": switch.site_id,
            "record": {
                "kind": "rollback",
                "of": attempt.revision,
                "patch": switch.patch.name,
                "patch_version": switch.patch.version,
                "package": "sglang",
                "version": switch.seen.installed.version,
                "who": user,
                "from": host,
                "originals": {switch.path: None},
                "note": why[:500],
            },
            "files": [
                {
                    "path": switch.path,
                    "present": [hashlib.sha256(attempt.content).hexdigest(), attempt.present],
                    "restore": attempt.present,
                }
            ],
            "interpreter": switch.seen.installed.python,
        },
        deadline_s=60.0,
    )
    return int(answer["revision"])


def _disarmed(switch: Switching, attempt: Attempt) -> bool:
    """Whether every rank lets go of the new settings before they come into force; a dead one has none.

    Raises:
        SurgeonError: a rank neither lets go nor changes.
    """
    began = time.monotonic()
    while True:
        ranks = _survivors(switch)
        if any(rank.generation == attempt.generation for rank in ranks):
            return False
        holding = [rank for rank in ranks if rank.armed is not None and rank.armed[0] == attempt.generation]
        if not holding:
            return True
        if time.monotonic() - began > ARM_S:
            raise SurgeonError(f"{holding[0].name} still waits to take the new settings into force")
        time.sleep(POLL_S)


def _survivors(switch: Switching) -> list[Switch]:
    try:
        return beacons.switches(switch.watch()["beacons"], switch.server.workers)
    except (UnreachableError, LockedError):
        raise
    except SurgeonError:
        return []


def _force_back(switch: Switching, attempt: Attempt, before: Mapping[str, Any], why: str) -> None:
    """Have ranks that changed already change back, by settings of a newer generation.

    Raises:
        SurgeonError: a rank does not.
    """
    back = Attempt()
    back.generation = attempt.generation + 1
    back.at_pass = max(rank.passes for rank in switch.look()) + AHEAD
    content = switch.patch.settings_file(
        before, generation=back.generation, beacon_dir=proof.beacon_dir(switch.seen), at_pass=back.at_pass
    )
    record = {"kind": "rollback", "of": attempt.revision, "settings": dict(before), "note": why[:500]}
    number = switch.commit(record, content, attempt.present)
    switch.close(number, "applied", note=why)
    began = time.monotonic()
    while wrong := [rank for rank in switch.look() if not _runs(rank, before)]:
        if time.monotonic() - began > CARRY_S:
            raise SurgeonError(f"{wrong[0].name} keeps the new settings")
        if all(rank.armed is not None for rank in wrong):
            switch.generate(max(1, back.at_pass - min(rank.passes for rank in wrong) + 2))
        time.sleep(POLL_S)


def _runs(rank: Switch, settings: Mapping[str, Any]) -> bool:
    return all(rank.settings.get(name) == value for name, value in settings.items())
