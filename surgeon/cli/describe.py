"""Findings in words and in JSON: shared by the commands that show them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.bench.smoke import SmokeResult
    from surgeon.ledger.records import Gate, Record
    from surgeon.ledger.state import Verdict
    from surgeon.operations.grafts import DecodeGate
    from surgeon.operations.settle import Settled
    from surgeon.server.model import Server
    from surgeon.surgery import Outcome as Located
    from surgeon.surgery.live_path import Verdict as LivePath
    from surgeon.surgery.situation import Path as DerivedPath

_STATE_STYLE = {
    "pristine": "green",
    "live": "green",
    "applied": "cyan",
    "written-not-live": "yellow",
    "stale": "yellow",
    "reinstalled": "yellow",
    "not-needed": "green",
    "does-not-fit": "red",
    "foreign-edit": "red",
}


def gate_text(gate: DecodeGate) -> str:
    """How decode is told from prefill."""
    if gate.exact:
        return (
            "[green]by sglang's own forward mode[/green] [dim](prefill, mixed and idle passes keep their routing)[/dim]"
        )
    return (
        "[yellow]by row count only[/yellow] (3 to 64 rows by default), so short prefills inside that range are "
        f"re-routed too [dim]({escape(gate.why)})[/dim]"
    )


def gate_json(gate: DecodeGate) -> dict[str, str]:
    """The same as ``--json`` carries it: ``forward-mode`` or ``row-count``, and why not the former."""
    return {"by": gate.name, "why": gate.why}


def state_text(verdict: Verdict) -> str:
    """A state with its reason, coloured."""
    style = _STATE_STYLE.get(verdict.state.value, "white")
    return f"[{style}]{verdict.state.value}[/{style}] [dim]({escape(verdict.why)})[/dim]"


def state_json(verdict: Verdict | None) -> dict[str, Any] | None:
    """A state as ``--json`` carries it."""
    if verdict is None:
        return None
    return {
        "state": verdict.state.value,
        "why": verdict.why,
        "revision": verdict.revision.revision if verdict.revision else None,
    }


def site_text(located: Located) -> str:
    """Where the patch would go, or why nowhere."""
    from surgeon import surgery

    match located:
        case surgery.Found():
            return f"line {located.line}, in {located.function} [dim](recipe {escape(located.recipe)})[/dim]"
        case surgery.AlreadyGrafted():
            spans = ", ".join(f"{r.start}-{r.stop - 1}" for r in located.lines)
            broken = f" [red]{escape(located.problem)}[/red]" if located.problem else ""
            return f"grafted at lines {spans} [dim]({located.patch} {located.version}, {located.stamp})[/dim]{broken}"
        case surgery.Ambiguous():
            lines = ", ".join(str(c.number) for c in located.candidates)
            return f"[red]ambiguous[/red]: {escape(located.reason)} [dim](lines {lines})[/dim]"
        case surgery.NotFound():
            nearest = "; ".join(f"line {n.number}: {n.text.strip()}" for n in located.nearest[:3]) or "nothing like it"
            return f"[red]not found[/red]: {escape(located.reason)} [dim](nearest: {escape(nearest)})[/dim]"
        case surgery.NotNeeded():
            lines = ", ".join(str(line.number) for line in located.lines)
            return f"[green]not needed[/green]: {escape(located.reason)} [dim](lines {lines})[/dim]"
    return f"[red]cannot be parsed safely[/red]: {escape(located.reason)}"


def site_json(located: Located) -> dict[str, Any]:
    """The locator's result as ``--json`` carries it."""
    from surgeon import surgery

    match located:
        case surgery.Found():
            return {
                "outcome": "found",
                "recipe": located.recipe,
                "function": located.function,
                "line": located.line,
                "text": located.text,
                "bound": sorted(located.bound),
            }
        case surgery.AlreadyGrafted():
            return {
                "outcome": "already-grafted",
                "patch": located.patch,
                "version": located.version,
                "stamp": located.stamp,
                "passed": list(located.passed),
                "lines": [[r.start, r.stop - 1] for r in located.lines],
                "problem": located.problem,
            }
        case surgery.Ambiguous():
            candidates = [{"line": c.number, "text": c.text} for c in located.candidates]
            return {"outcome": "ambiguous", "reason": located.reason, "candidates": candidates}
        case surgery.NotFound():
            nearest = [{"line": n.number, "text": n.text} for n in located.nearest]
            expected = list(located.expected)
            return {"outcome": "not-found", "reason": located.reason, "expected": expected, "nearest": nearest}
        case surgery.NotNeeded():
            lines = [{"line": line.number, "text": line.text} for line in located.lines]
            return {"outcome": "not-needed", "reason": located.reason, "lines": lines}
    return {"outcome": "unparsable", "reason": located.reason, "line": located.line}


def live_text(live: LivePath) -> str:
    """Whether the served model takes the code."""
    from surgeon import surgery

    match live:
        case surgery.Reached():
            leaf = f", after {live.leaf}" if live.leaf else ""
            notes = "".join(f" [yellow]{escape(n)}[/yellow]" for n in live.notes)
            way = f"[dim]({_way_text(live.path)}{escape(live.source)})[/dim]"
            return f"[green]reached[/green], in {live.function}{leaf} {way}{notes}"
        case surgery.NotReached():
            return f"[red]not reached[/red]: {escape(live.why)} [bold]{escape(live.remedy)}[/bold]"
    return f"[yellow]cannot tell[/yellow] without {escape(', '.join(live.missing))}: {escape(live.why)}"


def _way_text(path: DerivedPath) -> str:
    parts = [f"runner backend {path.backend}" if path.backend else "", path.format or ""]
    fused = "" if path.fused is None else f"{path.fused} fused shared expert{'' if path.fused == 1 else 's'}"
    return "".join(f"{part}, " for part in [*parts, fused] if part)


def live_json(live: LivePath | None) -> dict[str, Any] | None:
    """The live path as ``--json`` carries it."""
    from surgeon import surgery

    match live:
        case None:
            return None
        case surgery.Reached():
            notes = list(live.notes)
            where = {"function": live.function, "leaf": live.leaf}
            return {"verdict": "reached", **where, "source": live.source, "notes": notes, "path": asdict(live.path)}
        case surgery.NotReached():
            said = {"why": live.why, "remedy": live.remedy, "source": live.source}
            return {"verdict": "not-reached", **said, "path": asdict(live.path)}
    missing = list(live.missing)
    return {
        "verdict": "cannot-tell",
        "missing": missing,
        "why": live.why,
        "source": live.source,
        "path": asdict(live.path),
    }


def server_text(server: Server | None) -> str:
    """Which server runs."""
    if server is None:
        return "[yellow]none is running[/yellow]"
    since = ago(time.time() - server.started)
    workers = f"{len(server.workers)} worker{'s' if len(server.workers) != 1 else ''}"
    return f"pid {server.pid}, port {server.port}, {workers} [dim](up {since}, {escape(server.model_path)})[/dim]"


def server_json(server: Server | None) -> dict[str, Any] | None:
    """The server as ``--json`` carries it; secrets were masked on the node."""
    if server is None:
        return None
    return {
        "pid": server.pid,
        "port": server.port,
        "user": server.user,
        "model": server.model_path,
        "argv": list(server.argv),
        "cwd": server.cwd,
        "log": server.log,
        "started": server.started,
        "workers": [{"pid": w.pid, "title": w.title} for w in server.workers],
    }


def smoke_json(result: SmokeResult | None) -> dict[str, Any] | None:
    """A smoke result as ``--json`` carries it."""
    return result.to_json() if result else None


def gates_json(gates: Sequence[Gate]) -> list[dict[str, Any]]:
    """Gates as ``--json`` carries them."""
    return [g.to_json() for g in gates]


def settled_json(settled: Settled | None) -> dict[str, Any] | None:
    """What was settled, as ``--json`` carries it."""
    return {"revision": settled.revision, "outcome": settled.outcome, "said": settled.said} if settled else None


def record_json(record: Record) -> dict[str, Any]:
    """A revision as ``--json`` carries it."""
    return {
        "revision": record.revision,
        "kind": record.kind,
        "status": record.status,
        "of": record.of,
        "patch": record.patch,
        "patch_version": record.patch_version,
        "patch_hash": record.patch_hash,
        "settings": dict(record.settings),
        "version": record.version,
        "who": record.who,
        "from": record.came_from,
        "started": record.started,
        "finished": record.finished,
        "files": [{"path": f.path, "before": f.before, "after": f.after, "original": f.original} for f in record.files],
        "gates": gates_json(record.gates),
        "note": record.note,
    }


def ago(seconds: float) -> str:
    """A length of time for people."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def escape(text: str) -> str:
    """Text that Rich must not read as markup."""
    from rich.markup import escape as rich_escape

    return rich_escape(text)
