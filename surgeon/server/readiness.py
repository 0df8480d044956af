"""Decides whether a server that was just started is ready: a ladder from a living process to a checked answer.

A port that listens, and even /health, prove little: older releases answer 200 before anything was generated, and
/v1/models answers while the server warms up. So the last rung is a real generation whose token count is checked.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from surgeon.errors import SurgeonError, UnreachableError
from surgeon.server.causes import Diagnosis, diagnose
from surgeon.server.model import Started, parse_started

if TYPE_CHECKING:
    from collections.abc import Mapping

POLL_S: Final = 1.0
# Loading weights from a slow disk or compiling kernels may say nothing for minutes.
QUIET_S: Final = 600.0
GENERATE_TIMEOUT_S: Final = 120.0
TOKENS: Final = 8
# Any tokenizer makes tokens of it; a server without one is given ids that any vocabulary has.
PROMPT: Final = "The capital of France is"
PROMPT_IDS: Final = (1, 2, 3, 4, 5)

_LOG_KEPT: Final = 512 * 1024
_TAIL_LINES: Final = 20
_OK, _BAD_REQUEST, _UNAVAILABLE = 200, 400, 503


class Caller(Protocol):
    """A node whose agent can be asked."""

    def call(self, verb: str, args: dict[str, Any] | None = None, *, deadline_s: float = 30.0) -> dict[str, Any]:
        """Have the agent do one thing and return what it says."""


class Observer(Protocol):
    """Is told what the ladder waits for."""

    def progress(self, text: str) -> None:
        """What it is doing now; replaces what was said before."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: ``process``, ``port``, ``health``, ``workers`` or ``generation``.
        passed: whether it held.
        detail: what was seen.
        seconds: how long it took after the rung before.
    """

    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True)
class Ready:
    """Every rung held; ``seconds`` is the time from the first look to the checked answer."""

    rungs: tuple[Rung, ...]
    seconds: float


@dataclass(frozen=True)
class NotReady:
    """A rung did not hold.

    Attributes:
        rungs: those that held, and the one that did not.
        why: which one, what was seen, and what the log says about it.
        advice: what to do; empty when nothing is known.
        diagnosis: the cause that the log names; None when it names none.
        log_tail: the last lines of the log.
        seconds: the time until this was decided.
    """

    rungs: tuple[Rung, ...]
    why: str
    advice: str
    diagnosis: Diagnosis | None
    log_tail: str
    seconds: float


class _Failed(Exception):  # noqa: N818 - the word of the ladder, and it never leaves this module
    """The rung that is being climbed does not hold."""


@dataclass
class _Climb:
    """What a climb has seen so far."""

    started: Started
    deadline_s: float
    quiet_s: float
    began: float = field(default_factory=time.monotonic)
    offset: int = 0
    log: str = ""
    grown: float = field(default_factory=time.monotonic)
    rung_began: float = field(default_factory=time.monotonic)
    rungs: list[Rung] = field(default_factory=list)
    name: str = "process"
    workers: int = 0

    def left(self) -> float:
        """Seconds until the absolute deadline."""
        return self.deadline_s - (time.monotonic() - self.began)

    def close(self, *, passed: bool, detail: str) -> None:
        """End the current rung."""
        now = time.monotonic()
        self.rungs.append(Rung(self.name, passed, detail, round(now - self.rung_began, 3)))
        self.rung_began = now

    def take(self, seen: Mapping[str, Any]) -> None:
        """Note what a look brought: the log's growth and new workers are progress."""
        workers = len(seen["workers"])
        if seen["log"] or workers != self.workers:
            self.grown = time.monotonic()
        self.workers = workers
        self.offset = int(seen["offset"])
        self.log = (self.log + seen["log"])[-_LOG_KEPT:]


def wait_ready(
    node: Caller,
    started: Started | Mapping[str, Any],
    *,
    workers: int | None = None,
    deadline_s: float,
    quiet_s: float = QUIET_S,
    observer: Observer | None = None,
    poll_s: float = POLL_S,
    generate_timeout_s: float = GENERATE_TIMEOUT_S,
) -> Ready | NotReady:
    """Wait until a server has climbed every rung, or until it is known that it will not.

    It gives up at once when the process ends or another process holds the port, after ``quiet_s`` seconds without a new
    line in the log, and after ``deadline_s`` seconds whatever happens. A single bad answer of /health is no verdict.

    Args:
        node: where it runs.
        started: what ``start`` or ``restart`` answered.
        workers: how many schedulers it must have; None for at least one.
        deadline_s: seconds that it may take in all.
        quiet_s: seconds that its log may stand still.
        observer: is told what is waited for.
        poll_s: seconds between two looks.
        generate_timeout_s: seconds that the checked generation may take.

    Raises:
        UnreachableError: the node cannot be asked any more.
    """
    if not isinstance(started, Started):
        started = parse_started(started)
    climb = _Climb(started, deadline_s, quiet_s, offset=started.log_offset)
    try:
        _climb(node, climb, workers, observer, poll_s, generate_timeout_s)
    except _Failed as failure:
        _look(node, climb, health=False)
        climb.close(passed=False, detail=str(failure))
        return _not_ready(climb, str(failure))
    return Ready(tuple(climb.rungs), round(time.monotonic() - climb.began, 3))


def _not_ready(climb: _Climb, why: str) -> NotReady:
    diagnosis = diagnose(climb.log)
    tail = "\n".join(climb.log.rstrip().splitlines()[-_TAIL_LINES:])
    return NotReady(
        rungs=tuple(climb.rungs),
        why=f"{climb.name}: {why}" + (f"; its log says: {diagnosis.text}" if diagnosis else ""),
        advice=diagnosis.cause.advice if diagnosis else "",
        diagnosis=diagnosis,
        log_tail=tail,
        seconds=round(time.monotonic() - climb.began, 3),
    )


def _climb(
    node: Caller,
    climb: _Climb,
    workers: int | None,
    observer: Observer | None,
    poll_s: float,
    generate_timeout_s: float,
) -> None:
    seen = _look(node, climb, health=False)
    _alive(seen)
    climb.close(passed=True, detail=f"pid {climb.started.pid}")
    climb.name = "port"
    while not seen["listener_is_ours"]:
        if seen["listening"]:
            raise _Failed(f"port {climb.started.port} is held by another process: {seen['listener']}")
        seen = _again(node, climb, observer, poll_s, health=False)
    climb.close(passed=True, detail=f"{climb.started.port}, held by the server's own process")
    climb.name = "health"
    seen = _look(node, climb, health=True)
    while seen["health"] != _OK:
        seen = _again(node, climb, observer, poll_s, health=True)
    climb.close(passed=True, detail="GET /health is 200")
    climb.name = "workers"
    while len(seen["workers"]) < (workers or 1):
        if climb.left() <= 0:
            raise _Failed(f"{len(seen['workers'])} of {workers or 1} schedulers are running")
        seen = _again(node, climb, observer, poll_s, health=False)
    if workers is not None and len(seen["workers"]) != workers:
        raise _Failed(f"expected {workers} schedulers, as before; found {len(seen['workers'])}")
    climb.close(passed=True, detail=f"{len(seen['workers'])} schedulers")
    climb.name = "generation"
    if observer is not None:
        observer.progress("waiting for a checked generation")
    climb.close(passed=True, detail=_generate(node, climb, poll_s, generate_timeout_s))


def _look(node: Caller, climb: _Climb, *, health: bool) -> dict[str, Any]:
    seen = node.call(
        "watch",
        {
            "pid": climb.started.pid,
            "start_ticks": climb.started.start_ticks,
            "port": climb.started.port,
            "log": climb.started.log,
            "offset": climb.offset,
            "health": health,
        },
    )
    climb.take(seen)
    return seen


def _alive(seen: Mapping[str, Any]) -> None:
    if not seen["alive"]:
        raise _Failed("the server's process has ended")


def _again(node: Caller, climb: _Climb, observer: Observer | None, poll_s: float, *, health: bool) -> dict[str, Any]:
    """Wait a moment and look again, unless the server is dead or the patience is at its end."""
    if climb.left() <= 0:
        raise _Failed(f"not reached within {climb.deadline_s:.0f} s")
    quiet = time.monotonic() - climb.grown
    if quiet > climb.quiet_s:
        raise _Failed(f"its log has not grown for {quiet:.0f} s")
    if observer is not None:
        last = climb.log.rstrip().rpartition("\n")[2][:100]
        observer.progress(f"waiting for {climb.name}: {last}" if last else f"waiting for {climb.name}")
    time.sleep(min(poll_s, max(0.0, climb.left())))
    seen = _look(node, climb, health=health)
    _alive(seen)
    return seen


def _generate(node: Caller, climb: _Climb, poll_s: float, timeout_s: float) -> str:
    """Ask for a few tokens and check the answer; return what was seen."""
    prompt: dict[str, Any] = {"text": PROMPT}
    while True:
        limit = min(timeout_s, max(1.0, climb.left()))
        body = {**prompt, "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}}
        request = {"method": "POST", "path": "/generate", "json": body, "timeout_s": limit}
        args = {"port": climb.started.port, "pid": climb.started.pid, "requests": [request]}
        try:
            answer = node.call("http", args, deadline_s=limit + 10.0)["responses"][0]
        except UnreachableError:
            raise
        except SurgeonError as error:
            _alive(_look(node, climb, health=False))
            raise _Failed(f"POST /generate: {error.message}") from error
        if answer["status"] == _OK:
            try:
                return f"{check_answer(answer['body'])} in {answer['seconds']:.2f} s"
            except ValueError as error:
                raise _Failed(f"POST /generate: {error}") from error
        _alive(_look(node, climb, health=False))
        if answer["status"] == _BAD_REQUEST and "text" in prompt:
            # --skip-tokenizer-init: only ids are taken.
            prompt = {"input_ids": list(PROMPT_IDS)}
        elif answer["status"] == _UNAVAILABLE and climb.left() > 0:
            time.sleep(poll_s)
        else:
            said = answer["error"] or f"status {answer['status']}: {str(answer['body'])[:200]}"
            raise _Failed(f"POST /generate: {said}")


def check_answer(body: str, *, tokens: int = TOKENS) -> str:
    """Check one answer of /generate; return what it holds, in words.

    Args:
        body: the answer's JSON.
        tokens: how many were asked for, with EOS ignored.

    Raises:
        ValueError: it is not what a healthy server says; the message tells what.
    """
    said = json.loads(body)
    said = said[0] if isinstance(said, list) and said else said
    if not isinstance(said, dict) or not isinstance(said.get("meta_info"), dict):
        raise ValueError(f"expected an object with meta_info, found {body[:200]!r}")  # noqa: TRY004 - told as a fault
    meta = said["meta_info"]
    if meta.get("completion_tokens") != tokens:
        raise ValueError(f"expected {tokens} tokens, the server counted {meta.get('completion_tokens')}")
    ids = said.get("output_ids")
    if not isinstance(said.get("text"), str) and not ids:
        raise ValueError("the answer holds neither text nor ids")
    if ids is not None and len(ids) != tokens:
        raise ValueError(f"expected {tokens} ids, found {len(ids)}")
    odd = sorted(name for name, value in meta.items() if isinstance(value, float) and not math.isfinite(value))
    if odd:
        raise ValueError(f"these values are not finite: {', '.join(odd)}")
    return f"{tokens} tokens"
