"""The gates that a restarted server has to pass, in order; the first that fails ends it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from surgeon.errors import LockedError, SurgeonError, UnreachableError
from surgeon.ledger.records import Gate
from surgeon.operations import lease, proof, smoke
from surgeon.server import beacons, readiness
from surgeon.server.causes import diagnose
from surgeon.server.model import parse_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from surgeon.bench.smoke import Load, SmokeResult
    from surgeon.node.client import Node
    from surgeon.operations.observer import Observer, Step
    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch
    from surgeon.server.model import Server

PROOF_TOKENS: Final = 8
# Beacons are written from inside the forward pass; this is how long a rank may take to write its file.
BEACON_WAIT_S: Final = 20.0


@dataclass(frozen=True)
class Passed:
    """Every gate held."""

    server: Server
    gates: tuple[Gate, ...]
    smoke: SmokeResult | None = None


@dataclass(frozen=True)
class Failed:
    """A gate did not hold: which, why, and what the log suggests."""

    gates: tuple[Gate, ...]
    why: str
    advice: str = ""


@dataclass(frozen=True)
class Wanted:
    """What the restarted server has to show.

    Attributes:
        patch: whose beacons are demanded; None for a server that must not run the patch.
        settings_text: the settings file on the node.
        load: the smoke benchmark's load; None for no benchmark.
        patched: how results are labelled: the patch and its settings, or empty.
        ready_s: seconds until a server that is not ready counts as failed.
    """

    patch: Patch | None
    ready_s: float
    settings_text: str | None = None
    load: Load | None = None
    patched: str = ""


def restart(node: Node, seen: Survey, server: Server | None, wanted: Wanted, observer: Observer) -> Passed | Failed:
    """Stop the server, start it as it was started, and hold it to the gates.

    Args:
        node: where.
        seen: a survey of it, taken before.
        server: the running server; whatever serves its port by now is restarted. None starts the one whose launch
            is saved.
        wanted: what it has to show.
        observer: is told.

    Raises:
        UnreachableError: the connection was cut; the node goes on by itself.
        LockedError: another holds the lease by now, or is restarting the server.
    """
    # One that is still loading may not have started all of its schedulers.
    workers = len(server.workers) if server and server.listening else None
    port = server.port if server else (seen.launch or {}).get("port")

    def renew() -> None:
        lease.renew(node, seen.installed.site_id)

    with observer.step("Restarting the server as it was started" if server else "Starting the server again") as step:
        began = time.monotonic()
        request = {"port": port, "site_id": seen.installed.site_id, "timeout_s": 60.0}
        try:
            started = node.call("restart", request, deadline_s=150.0)
        except (UnreachableError, LockedError):
            raise
        except SurgeonError as error:
            step.failed(error.message)
            seconds = time.monotonic() - began
            gate = Gate("restart", passed=False, detail=error.message, seconds=seconds)
            known = diagnose(error.message)
            return Failed((gate,), error.message, known.cause.advice if known else "")
        step.done(f"pid {started['pid']}")
        gates = [Gate("restart", passed=True, detail=f"pid {started['pid']}", seconds=time.monotonic() - began)]
    with observer.step("Waiting until it is ready: process, port, health, a checked generation") as step:
        outcome = readiness.wait_ready(
            node, started, workers=workers, deadline_s=wanted.ready_s, observer=_Progress(step, renew)
        )
        gates.extend(Gate(r.name, passed=r.passed, detail=r.detail, seconds=r.seconds) for r in outcome.rungs)
        if isinstance(outcome, readiness.NotReady):
            step.failed(outcome.why)
            return Failed(tuple(gates), outcome.why, outcome.advice)
        step.done(f"ready after {outcome.seconds:.0f} s")
    ready = _find(node, int(started["pid"]))
    if ready is None:
        return Failed(tuple(gates), "the server ended right after it was ready", "read its log with `surgeon logs`")
    if wanted.patch is not None:
        gate = _demand_beacons(node, ready, wanted, observer)
        gates.append(gate)
        if not gate.passed:
            return Failed(tuple(gates), gate.detail, "the file was written, but not every rank runs it")
    if wanted.load is None:
        return Passed(ready, tuple(gates))
    result = smoke.run(node, seen, ready, observer, patched=wanted.patched, load=wanted.load)
    detail = "; ".join(result.problems) or f"{result.output_tok_s:.0f} tok/s"
    gates.append(Gate("smoke", passed=result.passed, detail=detail, seconds=result.duration_s))
    if not result.passed:
        return Failed(tuple(gates), f"smoke benchmark: {detail}")
    return Passed(ready, tuple(gates), result)


def _find(node: Node, pid: int) -> Server | None:
    servers = node.call("processes")["servers"]
    return next((parse_server(s) for s in servers if s["pid"] == pid), None)


def _demand_beacons(node: Node, server: Server, wanted: Wanted, observer: Observer) -> Gate:
    """Send enough traffic for the patch to act, then demand every worker's beacon."""
    assert wanted.patch is not None  # noqa: S101 - the caller asked only with a patch
    began = time.monotonic()
    asked = proof.read_settings(wanted.settings_text)
    if not asked.get("enabled", True):
        return Gate("beacons", passed=True, detail="none is demanded: the settings file says that it is off")
    rows = proof.rows_that_count(wanted.patch, asked)
    with observer.step("Proof: beacons from inside the forward pass") as step:
        # One request that carries a batch: separate ones need not meet in one pass.
        request = {
            "method": "POST",
            "path": "/generate",
            "json": {
                "text": [f"The quick brown fox jumps over {n} lazy dogs." for n in range(rows)],
                "sampling_params": {"max_new_tokens": PROOF_TOKENS, "temperature": 0.0, "ignore_eos": True},
            },
            "timeout_s": 120.0,
        }
        problems: tuple[str, ...] = ("no beacon was looked at",)
        while time.monotonic() - began < BEACON_WAIT_S:
            node.call(
                "http",
                {
                    "port": server.port,
                    "requests": [request],
                    "parallel": 1,
                    "pid": server.pid,
                },
                deadline_s=150.0,
            )
            seen = node.call(
                "watch", {"pid": server.pid, "port": server.port, "log": None, "offset": 0, "health": False}
            )
            problems = proof.judge(
                seen["beacons"], server.workers, wanted.patch, wanted.settings_text, need_applied=True
            )
            final = beacons.run_other_code(seen["beacons"], server.workers, patch_hash=wanted.patch.hash)
            if not problems or final:
                break
            step.progress(problems[0])
            time.sleep(1.0)
        detail = (
            "; ".join(problems) or f"{len(server.workers)} of {len(server.workers)} workers run {wanted.patch.stamp}"
        )
        (step.failed if problems else step.done)(detail)
    return Gate("beacons", passed=not problems, detail=detail, seconds=time.monotonic() - began)


class _Progress:
    """Shows what readiness says, and renews the lease about every half minute."""

    def __init__(self, step: Step, renew: Callable[[], None]) -> None:
        self._step = step
        self._renew = renew
        self._last = time.monotonic()

    def progress(self, text: str) -> None:
        """What the ladder is waiting for now."""
        self._step.progress(text)
        if time.monotonic() - self._last > 30:  # noqa: PLR2004 - well inside the lease's term
            self._renew()
            self._last = time.monotonic()
