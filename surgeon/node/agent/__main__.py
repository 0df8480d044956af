"""Answers one request: reads it, runs its verb before the deadline, writes the framed answer."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any, Callable, Dict

from .protocol import VERBS, AgentError, Context, DeadlineError

# Which module answers which verb. Only that module is loaded: the agent starts afresh on every call, and
# compiling source is most of what a call costs.
MODULES = {
    "commit": "commit",
    "finish": "commit",
    "restore": "commit",
    "lease": "lease",
    "ledger": "ledger",
    "read": "files",
    "processes": "processes",
    "survey": "survey",
    "start": "lifecycle",
    "stop": "lifecycle",
    "restart": "lifecycle",
    "watch": "watch",
    "http": "loopback",
    "run": "run",
    "tail": "tail",
    "document": "documents",
}

# Seconds that a verb has to undo its work once its deadline has passed, before the agent leaves without it.
GRACE_S = 5.0


def perform(verb: str, args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Run one verb.

    Raises:
        AgentError: the verb refused or failed, or there is no such verb.
    """
    module = MODULES.get(verb)
    if module is None:
        raise AgentError("usage", "The node's agent knows no verb {!r}.".format(verb))
    importlib.import_module("." + module, __package__)
    return VERBS[verb](args, context)


def failure(error: BaseException) -> Dict[str, Any]:
    """Put an exception in the words of an answer."""
    if isinstance(error, AgentError):
        known = {"code": error.code, "message": error.message, "advice": error.advice, "where": error.where}
        return {"ok": False, "error": known}
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join("{}:{}".format(os.path.basename(frame.filename), frame.lineno) for frame in last)
    message = "{}: {}".format(type(error).__name__, error)
    return {"ok": False, "error": {"code": "failed", "message": message, "advice": "", "where": where}}


def attempt(request: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Run a request's verb and put whatever comes of it in the words of an answer."""
    try:
        return {"ok": True, "result": perform(request["verb"], request.get("args") or {}, context)}
    except Exception as error:  # noqa: BLE001 - the client is told, whatever it was
        return failure(error)


def answer(request: Dict[str, Any], state: str, send: Callable[[Dict[str, Any]], None]) -> None:
    """Run a request and send its answer, whatever happens.

    Args:
        request: ``verb``, ``args``, ``deadline_s`` and ``lease``.
        state: the state directory.
        send: writes one answer to the client.
    """
    seconds = float(request.get("deadline_s") or 30.0)
    context = Context(state, request.get("lease"), time.monotonic() + seconds)

    def late(_signal: int, _frame: Any) -> None:
        if time.monotonic() > context.deadline + GRACE_S / 2:
            context.kill_children()
            send(failure(DeadlineError(seconds)))
            os._exit(0)
        context.expire(DeadlineError(seconds))

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, GRACE_S)
    try:
        reply = attempt(request, context)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    except DeadlineError as error:
        # The alarm rang while an earlier failure was being put into words.
        reply = failure(error)
    context.kill_children()
    send(reply)


def main(request: bytes, state: str, send: Callable[[bytes], None]) -> None:
    """Answer one request, with the standard streams out of the reach of verbs and their children.

    Args:
        request: the request, JSON in UTF-8.
        state: the state directory, already checked.
        send: writes the framed bytes of an answer to the client.
    """

    def encode(reply: Dict[str, Any]) -> None:
        send(json.dumps(reply, ensure_ascii=True, separators=(",", ":")).encode("ascii"))

    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open until the agent ends
    os.dup2(sys.stdin.fileno(), 0)
    answer(json.loads(request.decode("utf-8")), state, encode)
