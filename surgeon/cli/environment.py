"""``surgeon verify-env``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from surgeon.operations.verify_env import Outcome

_MARKS = {"ok": "[green]✓[/green]", "info": "[dim]·[/dim]", "warn": "[yellow]![/yellow]", "fail": "[red]✗[/red]"}
_ORDER = ("fail", "warn", "ok", "info")
_SHOWN_WARNINGS = 8


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("verify-env")(verify_env)


@with_session("verify-env")
def verify_env(
    session: Session,
    save: Annotated[bool, typer.Option("--save", help="Record what is installed as the baseline.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="With --save: why unmet pins are meant so.")] = "",
    fix: Annotated[bool, typer.Option("--fix", help="Show the repair; with --yes run it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Show what drifted: against the baseline, against sglang's pins, and whether the model's config still builds."""
    from surgeon.errors import DriftError
    from surgeon.operations import verify_env as story

    def agree(command: tuple[str, ...]) -> bool:
        session.sink.note(f"repair: {' '.join(command)}")
        return yes or (not session.sink.as_json and session.sink.confirm("Run it on the node?"))

    with session.connect() as node:
        found = story.run(node, session.target, session.sink, save=save, reason=reason, fix=agree if fix else None)
    failures = [c for c in found.checks if c.severity.value == "fail"]
    if found.unfinished:
        session.sink.warn(found.unfinished)
    session.sink.answer(_json(found), lambda: _render(found, verbose=session.sink.verbose), ok=not failures)
    if failures and session.sink.as_json:
        raise typer.Exit(DriftError.exit_code)
    if failures:
        hint = "`surgeon verify-env --fix` shows the repair" if found.repair else failures[0].advice
        raise DriftError(f"{len(failures)} findings would make a restart fail", advice=hint, where=failures[0].id)


def _render(found: Outcome, *, verbose: bool) -> Sequence[RenderableType]:
    from surgeon.cli import describe

    lines: list[RenderableType] = [f"sglang {found.version} [dim]({describe.escape(found.python)})[/dim]"]
    hidden = 0
    for severity in _ORDER:
        shown = 0
        for check in found.checks:
            if check.severity.value != severity:
                continue
            if severity in {"warn", "info"} and shown >= _SHOWN_WARNINGS and not verbose:
                hidden += 1
                continue
            shown += 1
            lines.append(f"{_MARKS[severity]} {describe.escape(check.title)}")
            if severity == "fail" or verbose:
                lines += [f"    [dim]{describe.escape(e)}[/dim]" for e in check.evidence]
                lines += [f"    {describe.escape(check.advice)}"] if check.advice else []
    if hidden:
        lines.append(f"[dim]and {hidden} more; --verbose shows them[/dim]")
    if found.saved is not None:
        exceptions = f", {len(found.saved.exceptions)} unmet pins as meant so" if found.saved.exceptions else ""
        lines.append(f"[green]saved[/green]: {len(found.saved.versions)} packages{exceptions}")
    if found.repair and not found.repaired:
        lines.append(f"repair: [bold]{describe.escape(' '.join(found.repair))}[/bold]")
    return lines


def _json(found: Outcome) -> dict[str, Any]:
    return {
        "version": found.version,
        "python": found.python,
        "drifted": found.drifted,
        "checks": [
            {
                "id": c.id,
                "severity": c.severity.value,
                "title": c.title,
                "evidence": list(c.evidence),
                "repair": list(c.repair),
                "advice": c.advice,
            }
            for c in found.checks
        ],
        "baseline": found.baseline.to_json() if found.baseline else None,
        "repair": list(found.repair),
        "repaired": found.repaired,
        "saved": found.saved.to_json() if found.saved else None,
        "unfinished": found.unfinished,
    }
