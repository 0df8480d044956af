"""``surgeon inspect topk``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from surgeon.operations.inspect import Inspection

group = typer.Typer(no_args_is_help=True, help="Look at the installed engine; changes nothing.")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="inspect")


@group.command("topk")
@with_session("inspect topk")
def topk(
    session: Session,
    site: Annotated[
        Path | None, typer.Option("--site", metavar="DIR", help="An unpacked package folder instead of a node.")
    ] = None,
) -> None:
    """Show where experts are chosen in the sglang on the node, and whether a patch would take effect there."""
    from surgeon import patches
    from surgeon.operations import inspect

    patch = patches.load("oea")
    if site is not None:
        found = inspect.offline(site, patch)
    else:
        with session.connect() as node:
            found = inspect.run(node, session.target, patch)
    if found.unfinished:
        session.sink.warn(found.unfinished)
    session.sink.answer(_json(found), lambda: _render(found, verbose=session.sink.verbose))


def _render(found: Inspection, *, verbose: bool) -> Sequence[RenderableType]:
    from rich.syntax import Syntax
    from rich.table import Table

    from surgeon import surgery
    from surgeon.cli import describe

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("sglang", found.version + (f" [dim]({describe.escape(found.python)})[/dim]" if found.python else ""))
    facts.add_row(
        "file", f"{describe.escape(found.path)} [dim]({found.lines:,} lines, sha256 {found.sha256[:12]})[/dim]"
    )
    if found.record_sha256 is not None:
        same = found.record_sha256 == found.sha256
        facts.add_row("RECORD", "as installed" if same else "[yellow]differs from what was installed[/yellow]")
    if found.nlink > 1:
        facts.add_row("links", f"{found.nlink} hard links share these bytes; surgeon replaces only this one")
    if not found.writable:
        facts.add_row("writable", f"[red]no[/red]: {describe.escape(found.why_not)}")
    if found.state is not None:
        facts.add_row("state", describe.state_text(found.state))
        facts.add_row("server", describe.server_text(found.server))
    if found.architecture:
        k = f", k = {found.top_k[1]} [dim]({found.top_k[0]})[/dim]" if found.top_k else ""
        facts.add_row("model", f"{found.architecture}{k} [dim]{describe.escape(found.model or '')}[/dim]")
    facts.add_row("site", describe.site_text(found.located))
    if found.live is not None:
        facts.add_row("live path", describe.live_text(found.live))
    facts.add_row("decode gate", describe.gate_text(found.gate))
    if found.runner is not None:
        facts.add_row("its site", f"{describe.site_text(found.runner)} [dim]{describe.escape(found.runner_path)}[/dim]")
    parts: list[RenderableType] = [facts]
    line = _shown_line(found)
    if line:
        rows = surgery.excerpt(found.source, line, 4)
        text = "\n".join(text for _, text in rows)
        parts += [
            "",
            Syntax(text, "python", line_numbers=True, start_line=rows[0][0], highlight_lines={line}, word_wrap=False),
        ]
    if found.functions:
        parts += ["", _functions(found, everything=verbose)]
    return parts


def _shown_line(found: Inspection) -> int | None:
    from surgeon import surgery

    match found.located:
        case surgery.Found():
            return found.located.line
        case surgery.AlreadyGrafted():
            return found.located.lines[-1].start if found.located.lines else None
    return None


def _functions(found: Inspection, *, everything: bool) -> RenderableType:
    from rich.table import Table

    from surgeon.cli import describe

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="")
    table.title = "functions that take part in expert selection"
    table.add_column("lines", style="dim", no_wrap=True)
    table.add_column("function", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("calls" if everything else "", overflow="fold")
    for function in found.functions:
        compiled = any("torch.compile" in d for d in function.decorators)
        tail = ", ".join(function.calls) if everything else "compiled" if compiled else ""
        name = describe.escape(function.name)
        table.add_row(f"{function.line}-{function.end}", name, function.role, f"[dim]{describe.escape(tail)}[/dim]")
    return table


def _json(found: Inspection) -> dict[str, Any]:
    from surgeon.cli import describe

    return {
        "version": found.version,
        "path": found.path,
        "sha256": found.sha256,
        "lines": found.lines,
        "links": found.nlink,
        "python": found.python,
        "as_installed": None if found.record_sha256 is None else found.record_sha256 == found.sha256,
        "writable": found.writable,
        "state": describe.state_json(found.state),
        "site": describe.site_json(found.located),
        "live_path": describe.live_json(found.live),
        "gate": describe.gate_json(found.gate),
        "gate_site": describe.site_json(found.runner) | {"path": found.runner_path} if found.runner else None,
        "server": describe.server_json(found.server),
        "model": {
            "path": found.model,
            "architecture": found.architecture,
            "k": found.top_k[1] if found.top_k else None,
            "k_from": found.top_k[0] if found.top_k else None,
        },
        "functions": [
            {
                "name": f.name,
                "role": f.role,
                "first": f.line,
                "last": f.end,
                "decorators": list(f.decorators),
                "calls": list(f.calls),
            }
            for f in found.functions
        ],
        "unfinished": found.unfinished,
    }
