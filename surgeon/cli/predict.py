"""``surgeon predict oea``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from surgeon.bench.predict import Cell, Prediction
    from surgeon.operations.predict import Outcome
    from surgeon.operations.subject import Subject

group = typer.Typer(no_args_is_help=True, help="Say what a patch would save, before anything is touched.")

MODEL = "What is served (read from the running server, unless said)"
COST = "What things cost"


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="predict")


@group.command("oea")
@with_session("predict oea")
def oea(
    session: Session,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="M", help="A config.json, its folder, or a model's name.", rich_help_panel=MODEL
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", metavar="R", help="A recipe's file or name.", rich_help_panel=MODEL),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="For example rtx-pro-6000 or h100.", rich_help_panel=MODEL),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="GPUs that it is spread over.", rich_help_panel=MODEL)
    ] = None,
    ep: Annotated[
        int | None, typer.Option("--ep", min=1, help="Of them, expert-parallel ranks.", rich_help_panel=MODEL)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="D", help="How its experts are stored, such as nvfp4.", rich_help_panel=MODEL),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option("--kernel", metavar="K", help="What computes its experts.", rich_help_panel=MODEL),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="N,N,..", help="Batch sizes.")] = "1,2,4,8,16,32,64",
    k0: Annotated[str, typer.Option("--k0", metavar="N,N,..", help="Values of k0 [default: around half of k].")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="The paper's refill instead of the native one.")] = False,
    from_recording: Annotated[
        list[Path] | None,
        typer.Option("--from-recording", metavar="FILE", help="sglang's own recording; may be said several times."),
    ] = None,
    shares: Annotated[
        Path | None,
        typer.Option("--shares", metavar="FILE", help="JSON: how often each expert is chosen, per layer."),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option("--routing", metavar="KIND", help="unfused, fused, or free.", rich_help_panel=COST),
    ] = None,
    overhead_us: Annotated[
        float | None,
        typer.Option("--overhead-us", help="The routing step per layer, microseconds.", rich_help_panel=COST),
    ] = None,
    rest_ms: Annotated[
        float | None,
        typer.Option("--rest-ms", min=0.0, help="A step beside its MoE layers, milliseconds.", rich_help_panel=COST),
    ] = None,
    b_us: Annotated[
        float | None, typer.Option("--b-us", help="Per expert read, microseconds, as measured.", rich_help_panel=COST)
    ] = None,
    c_us: Annotated[
        float | None, typer.Option("--c-us", help="Per layer besides, microseconds, as measured.", rich_help_panel=COST)
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the plot as a picture.")] = None,
) -> None:
    """Predict experts read, step time and throughput under OEA, per batch size and k0. Changes nothing."""
    from surgeon import patches
    from surgeon.errors import UsageError
    from surgeon.operations import predict

    if shares is not None and from_recording:
        raise UsageError("--shares and --from-recording both tell T; expected one of them", where="--shares")
    if routing not in {None, "unfused", "fused", "free"}:
        raise UsageError(f"routing is {routing!r}; expected unfused, fused or free", where="--routing")
    asked = predict.Asked(
        gpu=gpu,
        tp=tp,
        ep=ep,
        dtype=dtype,
        kernel=kernel,
        batches=_numbers(batch, "--batch", 4096),
        k0s=_numbers(k0, "--k0", 64) if k0 else (),
        routing=routing,
        overhead_us=overhead_us,
        rest_ms=rest_ms,
        b_us=b_us,
        c_us=c_us,
        strict=strict,
        recordings=tuple(from_recording or ()),
        shares=shares,
    )
    outcome = predict.run(_subject(session, model, recipe), asked, patches.load("oea"))
    if svg is not None:
        _write(svg, outcome.prediction)
        session.sink.note(f"the plot is in {svg}")
    session.sink.answer(_json(outcome), lambda: _render(outcome))


def _subject(session: Session, model: str | None, recipe: str | None) -> Subject:
    from surgeon.errors import UsageError
    from surgeon.operations import subject

    if model is not None and recipe is not None:
        raise UsageError("--model and --recipe both name a model; expected one of them", where="--model")
    if model is not None:
        return subject.named(model)
    if recipe is not None:
        return subject.from_recipe(recipe)
    from surgeon.operations import survey

    with session.connect() as node:
        return subject.served(survey.take(node, session.target))


def _numbers(text: str, option: str, most: int) -> tuple[int, ...]:
    from surgeon.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= most for word in words):
        raise UsageError(f"{option} is {text!r}; expected whole numbers of 1..{most} between commas", where=option)
    return tuple(sorted({int(word) for word in words}))


def _write(path: Path, found: Prediction) -> None:
    from surgeon.bench import chart
    from surgeon.errors import UsageError

    setup = found.setup
    title = f"OEA on {setup.shape.name}, {setup.gpu}, TP{setup.tp}: predicted, not measured"
    subtitle = f"{found.traffic.partition(' (')[0]}; routing step {setup.routing.us:g} µs per layer"
    picture = chart.svg(found.curves, title=title, subtitle=subtitle, axis=f"change of {_what(found)} time")
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", where="--svg") from error


def _what(found: Prediction) -> str:
    return "step" if found.setup.rest else "MoE"


def _render(outcome: Outcome) -> Sequence[RenderableType]:
    from rich.text import Text

    from surgeon.bench import chart

    found = outcome.prediction
    plot = [Text(f"change of {_what(found)} time by batch size; digits are k0", style="bold")]
    plot += [Text(line, no_wrap=True, overflow="crop") for line in chart.text(found.curves)]
    notes = [Text.assemble(("· ", "dim"), (f"{caveat}", "dim")) for caveat in outcome.caveats]
    return [_facts(outcome), "", _table(outcome), "", *plot, "", *_verdicts(found), "", *notes]


def _facts(outcome: Outcome) -> RenderableType:
    from rich.table import Table

    from surgeon.cli.describe import escape

    found = outcome.prediction
    setup, model = found.setup, found.setup.shape
    size = model.expert_mb(setup.dtype, tp=setup.tp, ep=setup.ep)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("model", f"{escape(model.name)} [dim]({escape(outcome.where)})[/dim]")
    routes = f"{model.layers} layers route {model.top_k} of {model.experts} experts per token"
    facts.add_row("", f"{routes}; {size:.3g} MB per expert and GPU ({setup.dtype})")
    split = f"TP{setup.tp}" + (f", EP{setup.ep}" if setup.ep > 1 else "")
    facts.add_row("GPUs", f"{escape(setup.gpu)}, {split}")
    facts.add_row("T", escape(found.traffic))
    layer = f"{setup.layer.c:.3g} + {setup.layer.b:.3g} * T µs"
    facts.add_row("layer", f"{layer} [dim]({escape(setup.layer.why)})[/dim]")
    if setup.rest:
        rest = f"{setup.rest.fixed_ms:.3g} + {setup.rest.row_ms:.3g} * B ms beside the MoE layers"
        facts.add_row("step", f"{rest} [dim]({escape(setup.rest.why)})[/dim]")
    facts.add_row("routing", f"{setup.routing.us:g} µs per layer [dim]({escape(setup.routing.why)})[/dim]")
    return facts


def _table(outcome: Outcome) -> RenderableType:
    from rich.table import Table

    found, (first, last) = outcome.prediction, outcome.range
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("B", justify="right")
    table.add_column("T", justify="right")
    table.add_column("step, ms" if found.setup.rest else "MoE, ms", justify="right")
    if found.setup.rest:
        table.add_column("tok/s", justify="right")
    for k0 in found.cells:
        table.add_column(f"k0 = {k0}", justify="right", no_wrap=True)
    for place, native in enumerate(found.native):
        row = [str(native.rows), f"{native.active:.1f}", f"{native.moe_ms:.2f}"]
        if native.step_ms is not None and native.tok_s is not None:
            row = [*row[:2], f"{native.step_ms:.1f}", f"{native.tok_s:.0f}"]
        table.add_row(
            *row, *(_shown(cells[place], off=not first <= native.rows <= last) for cells in found.cells.values())
        )
    return table


def _shown(cell: Cell, *, off: bool) -> str:
    change = f"{cell.change * 100:+.1f} %"
    if off:
        return f"[dim]({cell.active:.1f} {change})[/dim]"
    colour = "green" if cell.change < 0 else "yellow"
    return f"[dim]{cell.active:.1f}[/dim] [{colour}]{change}[/{colour}] "


def _verdicts(found: Prediction) -> list[str]:
    from surgeon.bench.predict import LARGEST

    said = []
    for k0, span in found.pays.items():
        cells = found.cells[k0]
        best = min(cells, key=lambda cell: cell.change)
        if span.first is None:
            said.append(f"[yellow]k0 = {k0} does not pay[/yellow] at any batch size up to {LARGEST}.")
            continue
        pays = f"from {span.first} requests in the batch on"
        if span.last != LARGEST:
            pays = f"for {span.first} to {span.last} requests in the batch"
        sentence = f"[green]k0 = {k0} pays[/green] {pays}"
        if best.change < 0:
            most = f"{-best.change * 100:.0f} % less {_what(found)} time"
            low, high = f"{-best.worst * 100:.0f}", f"{-best.best * 100:.0f}"
            between = f" ({low} to {high} % over the stated uncertainties)" if low != high else ""
            sentence += f"; most at {best.rows}: {most}{between}"
            if best.step_ms is not None:
                sentence += f", {best.gain * 100:+.0f} % tokens per second"
        said.append(f"{sentence}.")
    return said


def _json(outcome: Outcome) -> dict[str, Any]:
    from dataclasses import asdict

    found = outcome.prediction
    setup, model = found.setup, found.setup.shape
    return {
        "model": {
            "name": model.name,
            "read_from": outcome.where,
            "experts": model.experts,
            "k": model.top_k,
            "layers": model.layers,
            "dtype": setup.dtype,
            "mb_per_expert": round(model.expert_mb(setup.dtype, tp=setup.tp, ep=setup.ep), 4),
        },
        "gpu": setup.gpu,
        "tp": setup.tp,
        "ep": setup.ep,
        "traffic": found.traffic,
        "refill": "strict" if setup.strict else "native",
        "layer": asdict(setup.layer),
        "rest": asdict(setup.rest) if setup.rest else None,
        "routing": asdict(setup.routing),
        "change_of": "step" if setup.rest else "moe",
        "native": [_cell_json(cell) for cell in found.native],
        "k0": {
            str(k0): {
                "pays_from": found.pays[k0].first,
                "pays_to": found.pays[k0].last,
                "batches": [_cell_json(cell) for cell in cells],
            }
            for k0, cells in found.cells.items()
        },
        "rerouted_by_default": list(outcome.range),
        "caveats": list(outcome.caveats),
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "batch": cell.rows,
        "active_experts": round(cell.active, 3),
        "active_experts_of_the_slowest_rank": round(cell.busiest, 3),
        "moe_ms": round(cell.moe_ms, 4),
        "step_ms": None if cell.step_ms is None else round(cell.step_ms, 4),
        "tok_s": None if cell.tok_s is None else round(cell.tok_s, 2),
        "time_change": round(cell.change, 5),
        "time_change_at_best": round(cell.best, 5),
        "time_change_at_worst": round(cell.worst, 5),
        "throughput_change": round(cell.gain, 5),
    }
