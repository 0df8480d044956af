"""``surgeon inspect topk``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from surgeon.operations.inspect import Inspection

SERVED = "What is served, instead of asking the node"

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
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="The model, by its folder or config.json, on this machine or else on the node.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help="A compute capability (12.0, sm120), a name (H200), or cpu.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    server_args: Annotated[
        str | None,
        typer.Option(
            "--server-args",
            metavar="ARGS",
            help="The launch line's arguments in quotes: '--moe-runner-backend triton --tp 8'.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    check_latest: Annotated[
        bool,
        typer.Option(
            "--check-latest", help="Ask the node's package index for the newest sglang, and try the patch on it."
        ),
    ] = False,
) -> None:
    """Show where experts are chosen in the sglang on the node, and whether a patch would take effect there.

    What a model, a GPU and server arguments would make of it can be asked by hand, before there is a server.
    """
    from contextlib import nullcontext

    from surgeon import patches
    from surgeon.operations import inspect
    from surgeon.operations.served import ByHand

    said = ByHand(model, gpu, server_args)
    patch = patches.load("oea")
    asking = "Asking for the newest sglang, and trying the patch on it"
    with session.sink.step(asking) if check_latest else nullcontext():
        if site is not None:
            found = inspect.offline(site, patch, said, check_latest=check_latest)
        else:
            with session.connect() as node:
                found = inspect.run(node, session.target, patch, said, check_latest=check_latest)
    if found.unfinished:
        session.sink.warn(found.unfinished)
    for odd in (*(found.served.warnings if found.served else ()), *_not_asked(found)):
        session.sink.warn(odd)
    session.sink.answer(_json(found), lambda: _render(found, verbose=session.sink.verbose))


def _render(found: Inspection, *, verbose: bool) -> Sequence[RenderableType]:
    from surgeon.cli import callmap

    parts: list[RenderableType] = [_facts(found, verbose=verbose)]
    code = _excerpt(found)
    if code is not None:
        parts += ["", code]
    if found.functions:
        parts += ["", callmap.render(found, everything=verbose)]
    return parts


def _facts(found: Inspection, *, verbose: bool) -> Table:
    from rich.table import Table

    from surgeon.cli import describe, latest

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("sglang", found.version + (f" [dim]({describe.escape(found.python)})[/dim]" if found.python else ""))
    facts.add_row(
        "file", f"{describe.escape(found.path)} [dim]({found.lines:,} lines, sha256 {found.sha256[:12]})[/dim]"
    )
    facts.add_row("RECORD", _record(found))
    facts.add_row("links", _links(found))
    if not found.writable:
        facts.add_row("writable", f"[red]no[/red]: {describe.escape(found.why_not)}")
    if found.state is not None:
        facts.add_row("state", describe.state_text(found.state))
        facts.add_row("server", describe.server_text(found.server))
    what = found.served
    if what is not None and what.architecture:
        k = f", k = {found.top_k[1]} [dim]({found.top_k[0]})[/dim]" if found.top_k else ""
        facts.add_row("model", f"{what.architecture}{k} [dim]{describe.escape(what.model or '')}[/dim]")
    facts.add_row("site", describe.site_text(found.located))
    if found.live is not None:
        facts.add_row("live path", describe.live_text(found.live))
    else:
        facts.add_row("live path", "[dim]not judged: say what is served with --model, --gpu and --server-args[/dim]")
    for name, said in latest.rows(found.latest, everything=verbose):
        facts.add_row(name, said)
    facts.add_row("decode gate", describe.gate_text(found.gate))
    if found.runner is not None:
        path = describe.escape(found.runner_path)
        facts.add_row("gate site", f"{describe.site_text(found.runner)} [dim]{path}[/dim]")
    return facts


def _not_asked(found: Inspection) -> tuple[str, ...]:
    from surgeon.cli import latest

    return latest.warnings(found.latest)


def _record(found: Inspection) -> str:
    match found.record_sha256:
        case None:
            return "[dim]says nothing of this file[/dim]"
        case found.sha256:
            return "as installed"
        case other:
            return f"[yellow]differs from what was installed[/yellow] [dim](sha256 {other[:12]})[/dim]"


def _links(found: Inspection) -> str:
    if found.nlink == 1:
        return "1"
    return f"{found.nlink} hard links share these bytes; surgeon replaces only this one"


def _excerpt(found: Inspection) -> RenderableType | None:
    """The lines around what was found, or around what comes nearest to it."""
    from rich.syntax import Syntax

    from surgeon import surgery

    lines = _shown_lines(found)
    if not lines:
        return None
    rows = surgery.excerpt(found.source, lines[0], 4, last=lines[-1])
    code = "\n".join(text for _, text in rows)
    return Syntax(
        code,
        "python",
        theme="ansi_dark",
        background_color="default",
        line_numbers=True,
        start_line=rows[0][0],
        highlight_lines=set(lines),
        word_wrap=True,
    )


def _shown_lines(found: Inspection) -> Sequence[int]:
    from surgeon import surgery

    match found.located:
        case surgery.Found():
            return (found.located.line,)
        case surgery.AlreadyGrafted():
            return found.located.lines[-1] if found.located.lines else ()
        case surgery.Ambiguous():
            return tuple(one.number for one in found.located.candidates[:1])
        case surgery.NotFound():
            return tuple(one.number for one in found.located.nearest[-1:])
        case surgery.NotNeeded():
            return tuple(one.number for one in found.located.lines[:1])
    return ()


def _json(found: Inspection) -> dict[str, Any]:
    from surgeon.cli import callmap, describe, latest

    what = found.served
    return {
        "version": found.version,
        "path": found.path,
        "sha256": found.sha256,
        "lines": found.lines,
        "links": found.nlink,
        "python": found.python,
        "record_sha256": found.record_sha256,
        "as_installed": None if found.record_sha256 is None else found.record_sha256 == found.sha256,
        "writable": found.writable,
        "state": describe.state_json(found.state),
        "site": describe.site_json(found.located),
        "live_path": describe.live_json(found.live),
        "gate": describe.gate_json(found.gate),
        "gate_site": describe.site_json(found.runner) | {"path": found.runner_path} if found.runner else None,
        "server": describe.server_json(found.server),
        "model": {
            "path": what.model if what else None,
            "architecture": what.architecture if what else None,
            "k": found.top_k[1] if found.top_k else None,
            "k_from": found.top_k[0] if found.top_k else None,
        },
        "gpu": ".".join(map(str, what.capability)) if what and what.capability else None,
        "device": found.device,
        "by_hand": found.by_hand,
        "latest": latest.to_json(found.latest),
        "functions": callmap.to_json(found),
        "excerpt": _excerpt_json(found),
        "unfinished": found.unfinished,
    }


def _excerpt_json(found: Inspection) -> dict[str, Any] | None:
    from surgeon import surgery

    lines = _shown_lines(found)
    if not lines:
        return None
    rows = surgery.excerpt(found.source, lines[0], 4, last=lines[-1])
    return {"marked": list(lines), "lines": [{"line": number, "text": text} for number, text in rows]}
