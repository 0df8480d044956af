"""``surgeon status``, ``history`` and ``diff``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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

        return [
            Syntax(one.text.rstrip("\n"), "diff", background_color="default")
            if one.text
            else f"no difference: {one.path} is the original [dim](compared with {one.compared_with})[/dim]"
            for one in found
        ]

    files = [{"path": one.path, "diff": one.text, "compared_with": one.compared_with} for one in found]
    text = "".join(one.text for one in found)
    session.sink.answer(
        {"path": found[0].path, "diff": text, "compared_with": found[0].compared_with, "files": files}, render
    )


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
    for name, text in _settings(found):
        facts.add_row(name, text)
    if found.lease is not None:
        facts.add_row("lease", describe.escape(found.lease.describe()))
    for problem in found.problems:
        facts.add_row("[yellow]note[/yellow]", describe.escape(str(problem.get("message", ""))))
    if not any(r.beacon for r in found.ranks):
        return [facts]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("rank", "worker", "patch", "in force", "generation", "pass", "gate", "re-routed", "reported"):
        table.add_column(name, overflow="fold")
    for rank in found.ranks:
        table.add_row(*_rank(rank))
    return [facts, "", table]


def _settings(found: Status) -> Iterator[tuple[str, str]]:
    """What is said of the settings: those in force, the file's where they are others, and the decode gate."""
    from surgeon import patches
    from surgeon.cli import describe
    from surgeon.operations.settings import say

    if found.in_force is not None:
        yield "in force", describe.escape(say(patches.load("oea"), found.in_force)) + _since(found.ranks)
    if found.settings is not None and (found.in_force is None or found.differs):
        shown = {k: v for k, v in found.settings.items() if k not in {"schema", "beacon_dir"}}
        yield "settings", ", ".join(f"{k} = {v}" for k, v in shown.items()) + " [dim](the file's)[/dim]"
    if found.differs:
        yield "[yellow]differs[/yellow]", describe.escape(found.differs)
    if found.settings is not None:
        yield "decode gate", describe.gate_text(found.gate)
    if found.runner_path:
        yield "also cut", describe.escape(found.runner_path)


def _since(ranks: tuple[Rank, ...]) -> str:
    """From which pass on every rank has had its settings, where the ranks count passes."""
    forced = [(rank.beacon or {}).get("in_force") or {} for rank in ranks]
    passes = {one.get("from_pass") for one in forced}
    if len(passes) != 1 or not next(iter(passes)):
        return ""
    return f" [dim](generation {forced[0].get('generation')}, from pass {forced[0]['from_pass']} on)[/dim]"


def _rank(rank: Rank) -> tuple[str, ...]:
    from surgeon import patches
    from surgeon.cli import describe
    from surgeon.operations.settings import say

    beacon = rank.beacon
    title = f"{rank.title} [dim]({rank.pid})[/dim]"
    if beacon is None:
        return ("", title, "[yellow]no beacon[/yellow]", *[""] * 6)
    problem = beacon.get("settings_problem")
    shown = say(patches.load("oea"), beacon.get("settings") or {})
    return (
        str(beacon.get("rank")),
        title,
        str(beacon.get("patch_hash", ""))[:12],
        f"[red]{describe.escape(str(problem))}[/red]" if problem else describe.escape(shown),
        str(beacon.get("generation", "")),
        str(beacon.get("pass", "")),
        str(beacon.get("gate", "")),
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
        "in_force": found.in_force,
        "differs": found.differs,
        "gate": describe.gate_json(found.gate),
        "ranks": [{"pid": r.pid, "title": r.title, "beacon": r.beacon} for r in found.ranks],
        "lease": found.lease.describe() if found.lease else None,
        "unfinished": found.unfinished,
        "notes": list(found.problems),
    }


def _history(records: tuple[Record, ...]) -> Sequence[RenderableType]:
    from rich.table import Table

    from surgeon import patches
    from surgeon.cli import describe
    from surgeon.operations.settings import say

    patch = patches.load("oea")
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
            describe.escape(say(patch, record.settings)) if record.settings else "",
            f"[{style}]{record.status}[/{style}]",
            f"{record.who}@{record.came_from}" if record.came_from else record.who,
            record.note,
        )
    return [table]
