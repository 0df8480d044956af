"""``surgeon set``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.options import with_settings
from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.operations.settings import Outcome, SetPlan

group = typer.Typer(no_args_is_help=True, help="Change settings of a running server, without a restart.")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="set")


@group.command("oea")
@with_session("set oea")
@with_settings("oea", switch=True)
def oea(
    session: Session,
    wanted: dict[str, Any],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, show, and change nothing.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="With --dry-run: exit 10 if there is something to do.")
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="How long running requests may take to end.")
    ] = 30.0,
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Take the lease from whoever holds it.")] = False,
) -> None:
    """Change OEA's settings in every rank at once, between two requests; what is not said stays as it is."""
    from surgeon import patches
    from surgeon.errors import ChangesPendingError, UsageError
    from surgeon.operations import settings as story

    patch = patches.load("oea")
    patch.check({name: value for name, value in wanted.items() if name not in {"min_rows", "max_rows"}})
    if all(value is None for value in wanted.values()):
        raise UsageError(
            "nothing was said that could be changed; expected a setting, such as --k0 5 or --off",
            advice="`surgeon status` shows what is in force",
        )
    options = story.Options(dry_run=dry_run or (session.sink.as_json and not yes), break_lock=break_lock, wait_s=wait)

    def confirm(plan: SetPlan) -> bool:
        if not session.sink.as_json:
            for line in _plan(plan):
                session.sink.show(line)
        for text in plan.warnings:
            session.sink.warn(text)
        return yes or session.sink.confirm("Change this?")

    with session.connect() as node:
        outcome = story.run(node, session.target, patch, wanted, options, session.sink, confirm)
    session.sink.answer(_json(outcome), lambda: _render(outcome))
    if exit_code and outcome.status == "planned" and not outcome.plan.unchanged:
        raise ChangesPendingError("there are changes to make", advice="the same command without --dry-run makes them")


def _plan(plan: SetPlan) -> Sequence[str]:
    from surgeon.cli import describe
    from surgeon.operations.settings import say

    return [
        f"[bold]Plan[/bold]: {plan.patch.name} on pid {plan.server.pid}, port {plan.server.port}, without a restart",
        f"  in force    {describe.escape(say(plan.patch, plan.before))}",
        f"  then        {describe.escape(say(plan.patch, plan.settings))}",
        f"  replace     {describe.escape(plan.path)}",
    ]


def _render(outcome: Outcome) -> Sequence[str]:
    from surgeon.cli import describe
    from surgeon.operations.settings import say

    plan = outcome.plan
    match outcome.status:
        case "planned":
            warnings = (f"[yellow]![/yellow] {describe.escape(text)}" for text in plan.warnings)
            return [plan.unchanged] if plan.unchanged else [*_plan(plan), *warnings]
        case "declined":
            return ["nothing was changed"]
        case "unchanged":
            return [plan.unchanged]
    now = describe.escape(say(plan.patch, plan.settings))
    return [
        f"[green]in force[/green]: {now} in every rank, from pass {outcome.from_pass} on; revision {outcome.revision}",
        f"[dim]before: {describe.escape(say(plan.patch, plan.before))}[/dim]",
    ]


def _json(outcome: Outcome) -> dict[str, Any]:
    from surgeon.cli import describe

    plan = outcome.plan
    return {
        "status": outcome.status,
        "patch": plan.patch.name,
        "patch_version": plan.patch.version,
        "patch_hash": plan.patch.hash,
        "version": plan.version,
        "server": {"pid": plan.server.pid, "port": plan.server.port, "ranks": len(plan.server.workers)},
        "path": plan.path,
        "before": dict(plan.before),
        "settings": dict(plan.settings),
        "generation": plan.generation,
        "unchanged": plan.unchanged,
        "warnings": list(plan.warnings),
        "revision": outcome.revision,
        "from_pass": outcome.from_pass,
        "gates": describe.gates_json(outcome.gates),
        "settled": describe.settled_json(outcome.settled),
    }
