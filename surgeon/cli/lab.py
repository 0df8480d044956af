"""``surgeon lab``: a real sglang server on this machine's CPU behind a real SSH server."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.group import SurgeonGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from surgeon.lab.lifecycle import Description

app = typer.Typer(
    cls=SurgeonGroup,
    no_args_is_help=True,
    help="A node to try everything on, without a GPU: sglang on this machine's CPU behind a real SSH server.",
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def up(
    sglang: Annotated[str, typer.Option(help="sglang release: 0.5.23 or 0.5.9.")] = "0.5.23",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks, one core each.")] = 1,
    bias: Annotated[
        float, typer.Option(help="Standard deviation of the routing correction bias; 0 lets formulas apply.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the model's random weights.")] = 2,
    python: Annotated[Path | None, typer.Option(help="Python to build from; found by itself if not given.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Restore sglang from its wheel and forget the node's state.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Bring the lab up. The first time builds it (minutes, 3 GB); later ones reuse what is there."""
    from surgeon.cli import output
    from surgeon.lab import lifecycle

    sink = output.use(output.Sink("lab up", as_json=as_json))
    wanted = lifecycle.Wanted(sglang=sglang, ranks=tp, bias=bias, seed=seed)
    outcome = lifecycle.up(wanted, python=python, fresh=fresh, progress=sink)

    def render() -> Sequence[RenderableType]:
        lines = [f"reused: {part}" for part in outcome.reused] + [f"made: {part}" for part in outcome.made]
        return [*lines, f"The lab is up ({outcome.seconds:.0f} s).", *_describe(outcome.description)]

    sink.answer(
        {
            "lab": outcome.description.as_json(),
            "reused": list(outcome.reused),
            "made": list(outcome.made),
            "seconds": round(outcome.seconds, 1),
        },
        render,
    )


@app.command()
def status(as_json: _Json = False) -> None:
    """Say what of the lab runs now."""
    from surgeon.cli import output
    from surgeon.lab import lifecycle

    sink = output.use(output.Sink("lab status", as_json=as_json))
    found = lifecycle.status()

    def render() -> Sequence[RenderableType]:
        if found.description is None:
            left = f", but {found.processes} of its processes run: surgeon lab down" if found.processes else ""
            return [f"No lab is up{left}."]
        server = (
            f"server: pid {found.server_pid}, {found.processes} processes, "
            f"{'serving' if found.serving else 'not serving'}"
            if found.server_pid
            else "server: not running"
        )
        ssh = f"SSH: {found.ssh.kind}, pid {found.ssh.pid}" if found.ssh else "SSH: not running"
        return [server, ssh, *_describe(found.description)]

    sink.answer(
        {
            "lab": found.description.as_json() if found.description else None,
            "server_pid": found.server_pid,
            "serving": found.serving,
            "ssh_pid": found.ssh.pid if found.ssh else None,
            "processes": found.processes,
        },
        render,
    )


@app.command()
def logs(
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many lines from the end.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
) -> None:
    """Print the end of the server's log."""
    from surgeon.cli import output
    from surgeon.lab import logs as log_reader

    output.use(output.Sink("lab logs"))
    for line in log_reader.lines(count=lines, follow=follow):
        typer.echo(line)


@app.command()
def down(as_json: _Json = False) -> None:
    """Take the lab down. What was built stays in the cache for the next time."""
    from surgeon.cli import output
    from surgeon.lab import lifecycle

    sink = output.use(output.Sink("lab down", as_json=as_json))
    with sink.step("Stopping the lab"):
        ended = lifecycle.down()
    sink.answer({"ended": ended}, lambda: [f"The lab is down; {ended} server processes were ended."])


@app.command("torch-path")
def torch_path() -> None:
    """Print a folder with a CPU torch for this Python, for PYTHONPATH; built on first use."""
    from surgeon.cli import output
    from surgeon.lab.build import torch_layer

    sink = output.use(output.Sink("lab torch-path"))
    typer.echo(torch_layer(progress=sink))


def _describe(description: Description) -> list[str]:
    wanted = description.wanted
    return [
        f"sglang {wanted.sglang}, {wanted.ranks} rank(s), correction bias {wanted.bias:g}",
        f"server: http://127.0.0.1:{description.port}",
        f"log: {description.log}",
        f"ssh: ssh -F {description.ssh_config} {description.host}",
        "next: surgeon inspect topk --host lab",
    ]
