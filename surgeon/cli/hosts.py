"""``surgeon hosts``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("hosts")(hosts)


def hosts(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the targets that surgeon.toml names. Any other name of your ssh configuration works as --host too."""
    from dataclasses import asdict

    from surgeon import config
    from surgeon.cli import describe, output

    sink = output.use(output.Sink("hosts", as_json=as_json))
    path, known = config.profiles()
    rows = {name or "(default)": {k: v for k, v in asdict(s).items() if v is not None} for name, s in known.items()}

    def render() -> Sequence[RenderableType]:
        from rich.table import Table

        if path is None:
            return ["no surgeon.toml was found; any name of your ssh configuration works as --host"]
        if not rows:
            return [f"{describe.escape(str(path))} names no host"]
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("profile", "host", "settings"):
            table.add_column(column, overflow="fold")
        for name, row in rows.items():
            rest = ", ".join(f"{k} = {v}" for k, v in row.items() if k != "host")
            table.add_row(name, str(row.get("host", "")), rest)
        return [table, f"[dim]{describe.escape(str(path))}[/dim]"]

    sink.answer({"file": str(path) if path else None, "hosts": rows}, render)
