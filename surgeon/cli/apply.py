"""``surgeon apply`` and ``surgeon rollback``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.options import with_settings
from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from surgeon.operations import apply as story
    from surgeon.operations import rollback as way_back
    from surgeon.operations.plan import Plan

group = typer.Typer(no_args_is_help=True, help="Cut a patch in, restart, and prove that it runs.")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan, show, and change nothing.")]
ExitCode = Annotated[bool, typer.Option("--exit-code", help="With --dry-run: exit 10 if there is something to do.")]
NoRestart = Annotated[bool, typer.Option("--no-restart", help="Write only; the server keeps its old code.")]
NoBench = Annotated[bool, typer.Option("--no-bench", help="Leave the smoke benchmark out.")]
BreakLock = Annotated[bool, typer.Option("--break-lock", help="Take the lease from whoever holds it.")]
Ready = Annotated[float, typer.Option("--ready-timeout", metavar="SECONDS", help="How long a start may take.")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="apply")
    app.command("rollback")(rollback)


@group.command("oea")
@with_session("apply oea")
@with_settings("oea", switch=False)
def oea(
    session: Session,
    wanted: dict[str, Any],
    yes: Yes = False,
    dry_run: DryRun = False,
    exit_code: ExitCode = False,
    no_restart: NoRestart = False,
    no_bench: NoBench = False,
    break_lock: BreakLock = False,
    ready_timeout: Ready = 1800.0,
    site: Annotated[
        Path | None, typer.Option("--site", metavar="DIR", help="With --dry-run: an unpacked package, no node.")
    ] = None,
) -> None:
    """Opportunistic Expert Activation: tokens of one decode batch reuse each other's experts."""
    from surgeon import patches
    from surgeon.errors import ChangesPendingError, UsageError
    from surgeon.operations import apply

    patch = patches.load("oea")
    patch.check(wanted)
    if site is not None:
        if not dry_run:
            raise UsageError("--site has no server and no ledger; expected --dry-run with it", where="--site")
        _offline(session, patch, wanted, site, exit_code=exit_code)
        return
    options = apply.Options(
        dry_run=dry_run or (session.sink.as_json and not yes),
        restart=not no_restart,
        bench=not no_bench,
        break_lock=break_lock,
        ready_s=ready_timeout,
    )

    def confirm(plan: Plan) -> bool:
        if not session.sink.as_json:
            for part in _plan(plan):
                session.sink.show(part)
        for text in plan.warnings:
            session.sink.warn(text)
        return yes or session.sink.confirm("Apply this?")

    with session.connect() as node:
        outcome = apply.run(node, session.target, patch, wanted, options, session.sink, confirm)
    session.sink.answer(_json(outcome), lambda: _render(outcome))
    if exit_code and outcome.status == "planned" and not outcome.plan.unchanged:
        raise ChangesPendingError("there are changes to make", advice="the same command without --dry-run makes them")


@with_session("rollback")
def rollback(
    session: Session,
    revision: Annotated[
        int, typer.Argument(metavar="[REVISION]", help="Return to the state after this revision; 0 is as installed.")
    ] = 0,
    yes: Yes = False,
    dry_run: DryRun = False,
    exit_code: ExitCode = False,
    no_restart: NoRestart = False,
    bench: Annotated[bool, typer.Option("--bench", help="End with the smoke benchmark.")] = False,
    break_lock: BreakLock = False,
    ready_timeout: Ready = 1800.0,
) -> None:
    """Put the exact bytes back, restart the server, and see that it serves."""
    from surgeon import patches
    from surgeon.errors import ChangesPendingError
    from surgeon.operations import apply
    from surgeon.operations import rollback as way_back

    options = apply.Options(
        dry_run=dry_run or (session.sink.as_json and not yes),
        restart=not no_restart,
        bench=bench,
        break_lock=break_lock,
        ready_s=ready_timeout,
    )

    def confirm(plan: way_back.RollbackPlan) -> bool:
        if not session.sink.as_json:
            for line in _rollback_plan(plan):
                session.sink.show(line)
        for text in plan.warnings:
            session.sink.warn(text)
        return yes or session.sink.confirm("Roll back?")

    with session.connect() as node:
        outcome = way_back.run(node, session.target, patches.load("oea"), revision, options, session.sink, confirm)
    session.sink.answer(_rollback_json(outcome), lambda: _rollback_render(outcome))
    if exit_code and outcome.status == "planned" and not outcome.plan.unchanged:
        raise ChangesPendingError("there are changes to make", advice="the same command without --dry-run makes them")


def _offline(session: Session, patch: Any, wanted: dict[str, Any], site: Path, *, exit_code: bool) -> None:
    from surgeon import surgery
    from surgeon.cli import describe
    from surgeon.errors import ChangesPendingError
    from surgeon.operations import grafts, inspect

    found = inspect.offline(site, patch)
    cuts = [(found.path, found.source, surgery.EXPERTS)]
    if found.gate.exact:
        cuts.append((found.runner_path, found.runner_source, surgery.FORWARD))
    diff = ""
    for path, source, place in cuts:
        _, grafted = grafts.cut(source, patch, path, place)
        diff += surgery.unified_diff(source, grafted.result, path.lstrip("/"))
    settings = patch.complete(wanted)
    body = {"status": "planned", "version": found.version, "path": found.path, "settings": settings, "diff": diff}
    body |= {"site": describe.site_json(found.located), "gate": describe.gate_json(found.gate)}
    unchanged = f"nothing to do: this patch is in {found.path} already"
    session.sink.note(f"decode gate: {describe.gate_text(found.gate)}")
    session.sink.answer(
        body | {"unchanged": "" if diff else unchanged},
        lambda: [_diff(diff)] if diff else [unchanged],
    )
    if exit_code and diff:
        raise ChangesPendingError("there are changes to make", advice="this was a package folder; apply to a node")


def _diff(diff: str) -> RenderableType:
    from rich.syntax import Syntax

    return Syntax(diff.rstrip("\n"), "diff", word_wrap=False, background_color="default")


def _plan(plan: Plan) -> Sequence[RenderableType]:
    from surgeon.cli import describe

    settings = plan.patch.say(plan.settings)
    lines: list[RenderableType] = [
        f"[bold]Plan[/bold]: {plan.patch.name} {plan.patch.version} into sglang {plan.version}: {settings}",
        f"  state now   {describe.state_text(plan.state)}",
    ]
    if plan.live is not None:
        lines.append(f"  live path   {describe.live_text(plan.live)}")
    lines.append(f"  decode gate {describe.gate_text(plan.gate)}")
    for file in plan.files:
        verb = "replace" if file.expect else "add"
        lines.append(f"  {verb:<11} {describe.escape(file.path)}")
    lines.append(f"  then        {'restart the server, gate it, smoke benchmark' if plan.restart else 'no restart'}")
    if plan.diff:
        lines += ["", _diff(plan.diff), ""]
    return lines


def _render(outcome: story.Outcome) -> Sequence[RenderableType]:

    plan = outcome.plan
    match outcome.status:
        case "planned":
            return (
                [plan.unchanged]
                if plan.unchanged
                else [*_plan(plan), *(f"[yellow]![/yellow] {w}" for w in plan.warnings)]
            )
        case "declined":
            return ["nothing was changed"]
        case "unchanged":
            return [plan.unchanged]
    lines: list[RenderableType] = []
    if outcome.live:
        lines.append(
            f"[green]live[/green]: {plan.patch.name} ({plan.patch.say(plan.settings)}) runs in every worker; "
            f"revision {outcome.revision}"
        )
    else:
        lines.append(f"[yellow]written, not live[/yellow]: revision {outcome.revision}; `surgeon restart` makes it run")
    if outcome.smoke:
        lines.append(describe_smoke(outcome.smoke, outcome.before))
    lines.append("[dim]back to the exact bytes: surgeon rollback[/dim]")
    return lines


def describe_smoke(result: Any, before: Any) -> str:
    """A smoke result beside the last one of the unpatched server."""
    now = f"smoke: {result.output_tok_s:.0f} tok/s, ITL {result.itl_ms:.1f} ms, TTFT {result.ttft_ms:.0f} ms"
    if before is None:
        return f"{now} [dim](no result of the unpatched server to set beside it)[/dim]"
    ratio = result.output_tok_s / before.output_tok_s if before.output_tok_s else 0.0
    return (
        f"{now}\n[dim]unpatched, last: {before.output_tok_s:.0f} tok/s, ITL {before.itl_ms:.1f} ms, "
        f"TTFT {before.ttft_ms:.0f} ms (ratio {ratio:.2f}; one run each: says that it serves, not that it pays)[/dim]"
    )


def _json(outcome: story.Outcome) -> dict[str, Any]:
    from surgeon.cli import describe

    plan = outcome.plan
    return {
        "status": outcome.status,
        "patch": plan.patch.name,
        "patch_version": plan.patch.version,
        "patch_hash": plan.patch.hash,
        "version": plan.version,
        "path": plan.path,
        "settings": dict(plan.settings),
        "state": describe.state_json(plan.state),
        "live_path": describe.live_json(plan.live),
        "files": [{"path": f.path, "action": "replace" if f.expect else "add"} for f in plan.files],
        "diff": plan.diff,
        "gate": describe.gate_json(plan.gate),
        "restart": plan.restart,
        "unchanged": plan.unchanged,
        "warnings": list(plan.warnings),
        "revision": outcome.revision,
        "live": outcome.live,
        "gates": describe.gates_json(outcome.gates),
        "smoke": describe.smoke_json(outcome.smoke),
        "unpatched": describe.smoke_json(outcome.before),
        "settled": describe.settled_json(outcome.settled),
    }


def _rollback_plan(plan: way_back.RollbackPlan) -> Sequence[str]:
    from surgeon.cli import describe

    goal = "as it was installed" if plan.to == 0 else f"as it was after revision {plan.to}"
    lines = [f"[bold]Plan[/bold]: sglang {plan.version} {goal}"]
    for file in plan.files:
        verb = "remove" if file.restore is None else "restore"
        digest = f" [dim](sha256 {file.restore[:12]})[/dim]" if file.restore else ""
        lines.append(f"  {verb:<11} {describe.escape(file.path)}{digest}")
    lines.append(f"  then        {'restart the server and gate it' if plan.restart else 'no restart'}")
    return lines


def _rollback_render(outcome: way_back.Outcome) -> Sequence[str]:
    plan = outcome.plan
    match outcome.status:
        case "planned":
            return [plan.unchanged] if plan.unchanged else _rollback_plan(plan)
        case "declined":
            return ["nothing was changed"]
        case "unchanged":
            return [plan.unchanged]
    served = "; the server runs without the patch" if plan.restart else ""
    number = f"revision {outcome.revision}" if outcome.revision else "the files were as installed already"
    if plan.to:
        served = f"; the server runs as after revision {plan.to}" if plan.restart else ""
    lines = [
        f"[green]rolled back[/green]: {number}{served}",
        f"{plan.path}: sha256 {outcome.sha256}",
    ]
    if outcome.smoke:
        lines.append(describe_smoke(outcome.smoke, None))
    return lines


def _rollback_json(outcome: way_back.Outcome) -> dict[str, Any]:
    from surgeon.cli import describe

    plan = outcome.plan
    return {
        "status": outcome.status,
        "path": plan.path,
        "sha256": outcome.sha256,
        "to": plan.to,
        "of": plan.of,
        "state": describe.state_json(plan.state),
        "files": [{"path": f.path, "present": f.present, "restore": f.restore} for f in plan.files],
        "restart": plan.restart,
        "unchanged": plan.unchanged,
        "warnings": list(plan.warnings),
        "revision": outcome.revision,
        "gates": describe.gates_json(outcome.gates),
        "smoke": describe.smoke_json(outcome.smoke),
        "settled": describe.settled_json(outcome.settled),
    }
