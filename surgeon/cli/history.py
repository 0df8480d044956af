"""``surgeon status``, ``history`` and ``diff``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer
    from rich.console import RenderableType

    from surgeon.ledger.records import Record
    from surgeon.operations.status import Rank, Status


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("status")(status)
    app.command("history")(history)
    app.command("diff")(diff)


@with_session("status")
def status(session: Session) -> None:
    """Show what is on the node now: the patch's state, settings, and what every rank reports."""
    from surgeon import patches
    from surgeon.operations import status as story

    with session.connect() as node:
        found = story.run(node, session.target, patches.load("oea"))
    if found.unfinished:
        session.sink.warn(found.unfinished)
    session.sink.answer(_status_json(found), lambda: _status(found))


@with_session("history")
def history(session: Session) -> None:
    """List every revision that surgeon made on the node."""
    from surgeon.cli import describe
    from surgeon.operations import status as story

    with session.connect() as node:
        records = story.history(node, session.target)
    session.sink.answer({"revisions": [describe.record_json(r) for r in records]}, lambda: _history(records))


@with_session("diff")
def diff(session: Session) -> None:
    """Show what differs from the original on the node."""
    from surgeon import patches
    from surgeon.operations import status as story

    with session.connect() as node:
        found = story.diff(node, session.target, patches.load("oea"))

    def render() -> Sequence[RenderableType]:
        from rich.syntax import Syntax

        if not found.text:
            return [f"no difference: {found.path} is the original [dim](compared with {found.compared_with})[/dim]"]
        return [Syntax(found.text.rstrip("\n"), "diff", background_color="default")]

    session.sink.answer({"path": found.path, "diff": found.text, "compared_with": found.compared_with}, render)


def _status(found: Status) -> Sequence[RenderableType]:
    from rich.table import Table

    from surgeon.cli import describe

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("node", describe.escape(found.hostname))
    facts.add_row("sglang", f"{found.version} [dim]({describe.escape(found.path)}, {found.sha256[:12]})[/dim]")
    facts.add_row("state", describe.state_text(found.state))
    facts.add_row("server", describe.server_text(found.server))
    if found.settings is not None:
        shown = {k: v for k, v in found.settings.items() if k not in {"schema", "beacon_dir"}}
        facts.add_row("settings", ", ".join(f"{k} = {v}" for k, v in shown.items()) + " [dim](the file's)[/dim]")
        facts.add_row("decode gate", describe.GATE_NOTE)
    if found.lease is not None:
        facts.add_row("lease", describe.escape(found.lease.describe()))
    for problem in found.problems:
        facts.add_row("[yellow]note[/yellow]", describe.escape(str(problem.get("message", ""))))
    if not any(r.beacon for r in found.ranks):
        return [facts]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("rank", "worker", "patch", "in force", "re-routed", "reported"):
        table.add_column(name, overflow="fold")
    for rank in found.ranks:
        table.add_row(*_rank(rank))
    return [facts, "", table]


def _rank(rank: Rank) -> tuple[str, ...]:
    beacon = rank.beacon
    if beacon is None:
        return ("", f"{rank.title} [dim]({rank.pid})[/dim]", "[yellow]no beacon[/yellow]", "", "", "")
    force = beacon.get("settings") or {}
    shown = ", ".join(f"{k} = {force[k]}" for k in ("k0", "refill", "min_rows", "max_rows") if k in force)
    problem = beacon.get("settings_problem")
    return (
        str(beacon.get("rank")),
        f"{rank.title} [dim]({rank.pid})[/dim]",
        str(beacon.get("patch_hash", ""))[:12],
        f"[red]{problem}[/red]" if problem else shown,
        "yes" if beacon.get("applied") else "[yellow]not yet[/yellow]",
        f"{time.time() - float(beacon.get('written') or 0):.0f} s ago",
    )


def _status_json(found: Status) -> dict[str, Any]:
    from surgeon.cli import describe

    return {
        "node": found.hostname,
        "version": found.version,
        "path": found.path,
        "sha256": found.sha256,
        "state": describe.state_json(found.state),
        "server": describe.server_json(found.server),
        "settings": found.settings,
        "gate": describe.GATE_NOTE,
        "ranks": [{"pid": r.pid, "title": r.title, "beacon": r.beacon} for r in found.ranks],
        "lease": found.lease.describe() if found.lease else None,
        "unfinished": found.unfinished,
        "notes": list(found.problems),
    }


def _history(records: tuple[Record, ...]) -> Sequence[RenderableType]:
    from rich.table import Table

    if not records:
        return ["no revision yet: surgeon has not changed this node"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("rev", "when", "what", "settings", "status", "who", "note"):
        table.add_column(name, overflow="fold")
    styles = {"applied": "green", "failed": "red", "rolled-back": "yellow", "pending": "bold yellow"}
    for record in records:
        what = f"{record.kind} {record.patch} {record.patch_version}"
        if record.of is not None:
            what += f" (of {record.of})"
        style = styles[record.status]
        table.add_row(
            str(record.revision),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started)),
            what,
            ", ".join(f"{k} = {v}" for k, v in record.settings.items() if not isinstance(v, bool)),
            f"[{style}]{record.status}[/{style}]",
            f"{record.who}@{record.came_from}" if record.came_from else record.who,
            record.note,
        )
    return [table]
