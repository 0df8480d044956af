"""The story of ``surgeon restart``: the server, stopped and started as it was started, and held to its gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from surgeon.errors import DoesNotFitError, GateFailedError
from surgeon.ledger.state import PatchState
from surgeon.operations import environment, gates, lease, plan, settle, survey, undo

if TYPE_CHECKING:
    from collections.abc import Callable

    from surgeon.ledger.records import Gate
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.observer import Observer
    from surgeon.operations.settle import Settled
    from surgeon.patches import Patch
    from surgeon.server.model import Server


@dataclass(frozen=True)
class Outcome:
    """What a restart came to."""

    status: Literal["restarted", "started", "declined"]
    server: Server | None
    gates: tuple[Gate, ...] = ()
    settled: Settled | None = None


def run(
    node: Node,
    target: Target,
    patch: Patch,
    observer: Observer,
    confirm: Callable[[Server | None], bool],
    *,
    ready_s: float,
    break_lock: bool = False,
) -> Outcome:
    """Restart the running server, or start the one that surgeon stopped last.

    Raises:
        DoesNotFitError: no server is running and no launch of one is saved, or it is another's to restart.
        DriftError: what is installed now would not start; the running server is left alone.
        GateFailedError: it does not become ready.
    """
    seen = survey.take(node, target, patch)
    down = settle.is_down(seen)
    if seen.server is None and seen.launch is None:
        raise no_server(seen, target)
    plan.refuse_supervised(seen)
    if seen.server is not None and seen.ledger.pending is None:
        environment.refuse_drift(node, seen, observer)
    if not confirm(seen.server):
        return Outcome("declined", seen.server)
    if not break_lock:
        settle.refuse_if_busy(seen)
    with lease.held(node, seen, observer, break_lock=break_lock):
        seen, settled = undo.settle_all(node, seen, patch, observer, ready_s=ready_s)
        if settled is not None and settled.restart:
            return Outcome("started" if down else "restarted", seen.server, settled=settled)
        patched = plan.examine(seen, patch).state.state in {
            PatchState.APPLIED,
            PatchState.LIVE,
            PatchState.WRITTEN_NOT_LIVE,
        }
        wanted = gates.Wanted(
            patch=patch if patched else None,
            ready_s=ready_s,
            settings_text=(seen.beside.get("settings") or {}).get("text"),
        )
        with undo.left_to_the_next(
            "the node goes on with the restart by itself", "starts a server that is down", observer
        ):
            outcome = gates.restart(node, seen, seen.server, wanted, observer)
    if isinstance(outcome, gates.Failed):
        raise GateFailedError(
            f"the server was started but did not pass its gates: {outcome.why}",
            advice=outcome.advice or "read its log with `surgeon logs`",
            code="not-ready",
        )
    return Outcome("started" if seen.server is None else "restarted", outcome.server, outcome.gates, settled)


def no_server(seen: survey.Survey, target: Target) -> DoesNotFitError:
    """The refusal of a command that needs a running server."""
    where = f" for port {target.port}" if target.port is not None else ""
    others = ", ".join(str(s.port) for s in seen.servers)
    found = f"there are some for port {others}" if others else "expected one"
    return DoesNotFitError(
        f"no sglang server{where} is running on {seen.node.get('hostname') or 'the node'}; {found}",
        advice="start it as you always do; surgeon restarts servers that run, it does not invent launch lines",
        code="no-server",
    )
