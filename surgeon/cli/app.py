"""The command line: which commands there are."""

from __future__ import annotations

from typing import Annotated

import typer

from surgeon import __version__
from surgeon.cli import apply, bench, environment, history, hosts, inspect, lab, predict, record, server, settings
from surgeon.cli.group import SurgeonGroup

app = typer.Typer(
    cls=SurgeonGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Change the sglang that is installed on a GPU node, prove that it runs, and put every byte back.",
    epilog="Try it without a GPU: surgeon lab up; surgeon inspect topk --host lab",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"surgeon {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


inspect.register(app)
apply.register(app)
settings.register(app)
history.register(app)
environment.register(app)
server.register(app)
bench.register(app)
predict.register(app)
record.register(app)
hosts.register(app)
app.add_typer(lab.app, name="lab")
