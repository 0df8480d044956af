"""Changing the settings of a server that runs: the steps towards it, and the way back from each of them."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import (
    DoesNotFitError,
    SurgeonError,
)
from surgeon.ledger.records import Gate
from surgeon.operations import lease, proof
from surgeon.server import beacons, load
from surgeon.server.readiness import PROMPT, PROMPT_IDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surgeon.node.client import Node
    from surgeon.operations.observer import Observer
    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch
    from surgeon.server.beacons import Switch
    from surgeon.server.model import Server

# How many passes ahead the change is set. Ranks look for new settings every 50 ms, and the write itself crosses the
# wire: traffic that comes in meanwhile must not reach the pass before every rank has armed it.
AHEAD: Final = 32
# A beacon tells its pass counter at most once a second: one that stands still for longer than that has stopped.
STILL_S: Final = 1.3
ARM_S: Final = 5.0
CARRY_S: Final = 120.0
# A rank that is past the pass and says nothing within this has not changed.
STUCK_S: Final = 5.0
POLL_S: Final = 0.1
_WAIT_POLL_S: Final = 0.5
_RENEW_S: Final = 30.0
_GENERATE_S: Final = 60.0
_OK, _BAD_REQUEST = 200, 400

_RESTART: Final = "`surgeon restart` starts every rank with the settings file"
_NEXT: Final = "the next `surgeon set`, apply, rollback or restart finishes or undoes it"


class Attempt:
    """What was written so far, for the way back.

    Attributes:
        revision: the pending revision; None while nothing was written.
        writing: whether the node was asked to write; its answer may be lost to an interrupt.
        generation: of the settings that are to come into force.
        at_pass: from which pass on.
        content: the settings file that was written.
        present: sha256 of the one before.
    """

    def __init__(self) -> None:
        self.revision: int | None = None
        self.writing = False
        self.generation = 0
        self.at_pass = 0
        self.content = b""
        self.present: str | None = None

    def left(self) -> str:
        """What is left to the next command, in words."""
        name = "a revision may be" if self.revision is None else f"revision {self.revision} is"
        return f"{name} pending; {_NEXT}"


class Switching:
    """One server, and what it takes to change its settings. The lease must be held."""

    def __init__(self, node: Node, seen: Survey, server: Server, patch: Patch, observer: Observer) -> None:
        self.node = node
        self.seen = seen
        self.server = server
        self.patch = patch
        self.observer = observer
        self.path = seen.beside_path(f"{patch.module}.json")
        self.site_id = seen.installed.site_id
        self._prompt: dict[str, Any] = {"text": PROMPT}

    # ------------------------------------------------------------ looking

    def look(self) -> list[Switch]:
        """What every rank says now.

        Raises:
            SurgeonError: the server has ended, or a rank's process is another by now.
        """
        found = beacons.switches(self.watch()["beacons"], self.server.workers)
        if len(found) < len(self.server.workers):
            raise SurgeonError(f"{len(self.server.workers) - len(found)} rank(s) of the server have ended")
        return found

    def watch(self) -> dict[str, Any]:
        """One look at the server's processes and beacons.

        Raises:
            SurgeonError: it has ended.
        """
        seen = self.node.call(
            "watch",
            {
                "pid": self.server.pid,
                "start_ticks": self.server.start_ticks,
                "port": self.server.port,
                "log": None,
                "offset": 0,
                "health": False,
                "beacon_dirs": [proof.beacon_dir(self.seen)],
            },
        )
        if not seen["alive"]:
            raise SurgeonError("the server has ended")
        return seen

    def requests(self) -> load.Load | None:
        """How many requests are running or waiting; None if this release does not tell."""
        for path in load.PATHS:
            found = load.read(path, self._http("GET", path, None, 5.0))
            if found is not None:
                return found
        return None

    def _http(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        request = {"method": method, "path": path, "json": body, "timeout_s": timeout_s}
        args = {"port": self.server.port, "pid": self.server.pid, "requests": [request]}
        answer: dict[str, Any] = self.node.call("http", args, deadline_s=timeout_s + 10.0)["responses"][0]
        return answer

    # ------------------------------------------------------------ the steps

    def wait_until_quiet(self, wait_s: float) -> int:
        """Wait until no request runs; return how many passes every rank has counted.

        Quiet is when no request is told of and no rank counts another pass for longer than beacons may lag.

        Raises:
            DoesNotFitError: requests are still running after ``wait_s`` seconds, or the ranks' counts differ.
        """
        began = renewed = time.monotonic()
        with self.observer.step("Waiting until no request runs") as step:
            known = self.look()
            since = time.monotonic()
            while True:
                told = self.requests()
                now = self.look()
                if [rank.passes for rank in now] != [rank.passes for rank in known] or (told and told.requests):
                    known, since = now, time.monotonic()
                elif time.monotonic() - since > STILL_S:
                    break
                if time.monotonic() - began > max(wait_s, 2 * STILL_S):
                    raise _busy(told, wait_s)
                if time.monotonic() - renewed > _RENEW_S:
                    lease.renew(self.node, self.site_id)
                    renewed = time.monotonic()
                step.progress(_what_runs(told))
                time.sleep(_WAIT_POLL_S)
            by = f"by {told.path} and" if told else "by"
            step.done(f"{by} the ranks' pass counters, which stand at {now[0].passes}")
        if len({rank.passes for rank in now}) > 1:
            counts = "; ".join(f"{rank.name}: {rank.passes}" for rank in now)
            raise DoesNotFitError(
                f"the ranks are not in step: they have counted different passes ({counts})",
                advice="independent replicas cannot change at one pass; `surgeon apply` restarts them instead",
                where=f"pid {self.server.pid}",
                code="not-in-step",
            )
        return now[0].passes

    def write(
        self, attempt: Attempt, settings: Mapping[str, Any], generation: int, passes: int, present: str | None
    ) -> int:
        """Write the settings as a pending revision of the ledger; return its number."""
        attempt.generation, attempt.at_pass, attempt.present = generation, passes + AHEAD, present
        attempt.content = self.patch.settings_file(
            settings, generation=generation, beacon_dir=proof.beacon_dir(self.seen), at_pass=attempt.at_pass
        )
        attempt.writing = True
        record = {"kind": "set", "generation": generation, "at_pass": attempt.at_pass, "settings": dict(settings)}
        attempt.revision = self.commit(record, attempt.content, present)
        return attempt.revision

    def commit(self, record: Mapping[str, Any], content: bytes, present: str | None) -> int:
        """Write the settings file as a pending revision; return its number.

        Args:
            record: what the ledger keeps of it, beside whose patch it is and who changes it.
            content: the new bytes.
            present: sha256 of those that must be there now.
        """
        user, host = lease.whoami()
        answer = self.node.call(
            "commit",
            {
                "site_id": self.site_id,
                "record": {
                    **record,
                    "patch": self.patch.name,
                    "patch_version": self.patch.version,
                    "patch_hash": self.patch.hash,
                    "package": "sglang",
                    "version": self.seen.installed.version,
                    "who": user,
                    "from": host,
                    "originals": {self.path: None},
                },
                "files": [
                    {
                        "path": self.path,
                        "b64": base64.b64encode(content).decode(),
                        "expect": present,
                        "like": self.seen.file.path,
                    }
                ],
                "interpreter": self.seen.installed.python,
            },
            deadline_s=60.0,
        )
        return int(answer["revision"])

    def demand_armed(self, attempt: Attempt) -> Gate:
        """Wait until every rank has read the settings and will obey from the same pass on.

        Raises:
            SurgeonError: a rank refused them, or has not read them in time.
        """
        began = time.monotonic()
        with self.observer.step("Every rank arms them") as step:
            while True:
                ranks = self.look()
                _refuse_refused(ranks, attempt.generation)
                ready = (attempt.generation, attempt.at_pass)
                late = [r for r in ranks if r.armed != ready and r.generation != attempt.generation]
                if not late:
                    break
                if time.monotonic() - began > ARM_S:
                    raise SurgeonError(f"{late[0].name} has not read the new settings within {ARM_S:.0f} s")
                step.progress(late[0].name)
                time.sleep(POLL_S)
            detail = f"{len(ranks)} of {len(ranks)} ranks"
            step.done(detail)
        return Gate("armed", passed=True, detail=detail, seconds=time.monotonic() - began)

    def carry_over(self, attempt: Attempt) -> tuple[Gate, int]:
        """Take the server over the pass, and demand that every rank changed there; return that pass.

        Raises:
            SurgeonError: a rank did not change, or at another pass, or the server does not answer.
        """
        began = time.monotonic()
        with self.observer.step(f"Carrying the server over pass {attempt.at_pass}") as step:
            told = self.requests()
            if told is not None and told.requests:
                self.observer.warn("requests came in meanwhile: the settings change in the middle of them")
            past = 0.0
            while True:
                ranks = self.look()
                _refuse_refused(ranks, attempt.generation)
                waiting = [rank for rank in ranks if rank.generation != attempt.generation]
                if not waiting:
                    break
                behind = [rank for rank in waiting if rank.passes < attempt.at_pass]
                past = past or (time.monotonic() if not behind else 0.0)
                if time.monotonic() - began > CARRY_S or (past and time.monotonic() - past > STUCK_S):
                    raise SurgeonError(f"{waiting[0].name} has not taken the settings into force")
                if behind:
                    self.generate(attempt.at_pass - min(rank.passes for rank in behind) + 1)
                step.progress(waiting[0].name)
                time.sleep(POLL_S)
            passes = sorted({rank.from_pass for rank in ranks})
            if len(passes) > 1:
                listed = "; ".join(f"{rank.name} at {rank.from_pass}" for rank in ranks)
                raise SurgeonError(f"the ranks changed at different passes: {listed}")
            detail = f"in force in {len(ranks)} of {len(ranks)} ranks from pass {passes[0]} on"
            step.done(detail)
        return Gate("in-force", passed=True, detail=detail, seconds=time.monotonic() - began), passes[0]

    def generate(self, tokens: int) -> None:
        """Have the server make some passes of its own.

        Raises:
            SurgeonError: it does not answer.
        """
        wanted = {"max_new_tokens": min(tokens, 2 * AHEAD), "temperature": 0.0, "ignore_eos": True}
        answer = self._http("POST", "/generate", {**self._prompt, "sampling_params": wanted}, _GENERATE_S)
        if answer["status"] == _BAD_REQUEST and "text" in self._prompt:
            # --skip-tokenizer-init: only ids are taken.
            self._prompt = {"input_ids": list(PROMPT_IDS)}
            answer = self._http("POST", "/generate", {**self._prompt, "sampling_params": wanted}, _GENERATE_S)
        if answer["status"] != _OK:
            said = answer["error"] or f"status {answer['status']}: {str(answer['body'])[:200]}"
            raise SurgeonError(f"the server does not answer a generation: {said}")

    def close(self, revision: int, status: str, gates: Sequence[Gate] = (), note: str = "") -> None:
        """Close a revision in the ledger."""
        words = {"site_id": self.site_id, "revision": revision, "status": status}
        self.node.call("finish", {**words, "gates": [gate.to_json() for gate in gates], "note": note[:500]})


def _refuse_refused(ranks: Sequence[Switch], generation: int) -> None:
    for rank in ranks:
        if rank.refused is not None and rank.refused[0] == generation:
            raise SurgeonError(f"{rank.name} refused the settings: {rank.refused[1]}")


def _what_runs(told: load.Load | None) -> str:
    if told is None:
        return "the ranks' pass counters must stand still"
    return f"{told.requests} requests are running or waiting" if told.requests else "the last pass"


def _busy(told: load.Load | None, wait_s: float) -> DoesNotFitError:
    found = f"{told.requests} are running or waiting" if told and told.requests else "passes are still being made"
    return DoesNotFitError(
        f"settings change only while no request runs; after {wait_s:.0f} s {found}",
        advice="try again when it is quiet, or give it longer with --wait SECONDS; the server was left alone",
        where="--wait",
        code="busy",
    )
