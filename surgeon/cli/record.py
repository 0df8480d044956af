"""``surgeon record routing``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from surgeon.bench.recording import Summary
    from surgeon.operations.record import Outcome

group = typer.Typer(no_args_is_help=True, help="Have the server's own recorder look.")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="record")


@group.command("routing")
@with_session("record routing")
def routing(
    session: Session,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=600.0, help="How long to listen to the server's traffic.")
    ] = 10.0,
    load: Annotated[
        int, typer.Option("--load", metavar="N", min=0, max=512, help="Send N requests at once instead of listening.")
    ] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=4096, help="That each of them generates.")] = 32,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, help="Most rows of a pass that is taken for decode.")
    ] = 64,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Keep the recording.")] = None,
) -> None:
    """Record which experts the running server's decode passes read, with sglang's own recorder."""
    from surgeon.operations import record

    asked = record.Load(in_flight=load, tokens=tokens) if load else None
    _check(out)
    with session.connect() as node:
        outcome = record.run(node, session.target, session.sink, seconds=seconds, load=asked, max_rows=max_rows)
    if out is not None:
        _keep(session, out, outcome.data)
    for note in outcome.notes:
        session.sink.note(note)
    session.sink.answer(_json(outcome, out), lambda: _render(outcome, verbose=session.sink.verbose))


def _keep(session: Session, out: Path, data: bytes) -> None:
    try:
        out.write_bytes(data)
    except OSError as error:
        # What was recorded is told all the same.
        session.sink.warn(f"{out} cannot be written: {error.strerror}")
    else:
        session.sink.note(f"the recording is in {out}; `surgeon predict oea --from-recording {out}` goes by it")


def _check(out: Path | None) -> None:
    """Refuse a place that cannot be written before the server is troubled for it."""
    from surgeon.errors import UsageError

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UsageError(f"{out} cannot be written; expected a file in a folder that is there", where="--out")


def _render(outcome: Outcome, *, verbose: bool) -> Sequence[RenderableType]:
    from surgeon.cli.describe import escape

    found = outcome.summary
    head = (
        f"[bold]{escape(outcome.model.name)}[/bold]: {found.passes} of {outcome.passes} recorded passes decode, "
        f"{found.tokens} rows; top-{found.top_k} of {found.experts} experts in {len(found.layers)} layers "
        f"[dim]({outcome.mode})[/dim]"
    )
    return [head, "", _sizes(found), "", *_verdict(found), *(["", _layers(found)] if verbose else [])]


def _sizes(found: Summary) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("rows", "passes", "T", "uniform", "independent rows", "of uniform"):
        table.add_column(title, justify="right", no_wrap=True)
    for size in found.sizes:
        share = f"{size.active / size.uniform * 100:.0f} %"
        cells = (f"{size.active:.1f}", f"{size.uniform:.1f}", f"{size.independent:.1f}", share)
        table.add_row(str(size.rows), str(size.passes), *cells)
    return table


def _verdict(found: Summary) -> list[str]:
    usual = next(size for size in found.sizes if size.rows == found.usual)
    low = min(found.layers, key=lambda use: use.effective)
    skew = 1 - usual.independent / usual.uniform
    alike = 1 - usual.active / usual.independent
    far = (
        f"At {usual.rows} rows a layer reads {usual.active:.1f} experts, {usual.active / usual.uniform * 100:.0f} % of "
        f"what uniform routing would: {_less(skew)} because some experts are liked more, {_less(alike)} because rows "
        "of a batch resemble each other."
    )
    uneven = (
        f"Most uneven is layer {low.layer}: its choices are spread as over {low.effective:.0f} equally liked experts; "
        f"the most chosen one gets {low.busiest * 100:.1f} % of them, and {low.unused} were never chosen."
    )
    return [far, uneven]


def _less(share: float) -> str:
    return f"{abs(share) * 100:.0f} % {'less' if share >= 0 else 'more'}"


def _layers(found: Summary) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("layer", f"T at {found.usual} rows", "spread as over", "most chosen", "never chosen"):
        table.add_column(title, justify="right", no_wrap=True)
    for use in found.layers:
        cells = (f"{use.active:.1f}", f"{use.effective:.1f}", f"{use.busiest * 100:.2f} %", str(use.unused))
        table.add_row(str(use.layer), *cells)
    return table


def _json(outcome: Outcome, out: Path | None) -> dict[str, Any]:
    from dataclasses import asdict

    found = outcome.summary
    return {
        "server": {"pid": outcome.server.pid, "port": outcome.server.port},
        "mode": outcome.mode,
        "model": outcome.model.name,
        "experts": found.experts,
        "k": found.top_k,
        "passes": outcome.passes,
        "decode_passes": found.passes,
        "rows": found.tokens,
        "ranks": outcome.ranks,
        "usual_batch": found.usual,
        "batches": [asdict(size) for size in found.sizes],
        "layers": [asdict(use) for use in found.layers],
        "file": str(out) if out else None,
        "notes": list(outcome.notes),
    }
