"""What every command that talks to a node takes, in one place."""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli import output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from surgeon.node.client import Node
    from surgeon.node.target import Target

PANEL = "Which node"


@dataclass(frozen=True)
class Session:
    """One command's node and sink."""

    sink: output.Sink
    options: dict[str, Any]

    @functools.cached_property
    def target(self) -> Target:
        """The node that was asked for."""
        from surgeon import config

        o = self.options
        given = config.Settings(
            host=o["host"],
            python=o["python"],
            port=o["port"],
            host_key_policy="accept-new" if o["accept_new"] else None,
        )
        return config.resolve(given, profile=o["profile"])

    @contextmanager
    def connect(self) -> Iterator[Node]:
        """A connection to it, closed on the way out."""
        from surgeon.node.client import connect

        with connect(self.target) as node:
            yield node
            if self.sink.verbose:
                plural = "" if node.transport.round_trips == 1 else "s"
                self.sink.note(f"{node.transport.round_trips} round trip{plural} to {node.transport.name}")


_COMMON: dict[str, Any] = {
    "host": Annotated[
        str | None,
        typer.Option("--host", metavar="NAME", help="An ssh name, 'local', or 'lab'.", rich_help_panel=PANEL),
    ],
    "profile": Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME", help="A profile of surgeon.toml.", rich_help_panel=PANEL),
    ],
    "port": Annotated[
        int | None, typer.Option("--port", help="Which server, when several run.", rich_help_panel=PANEL)
    ],
    "python": Annotated[
        str | None,
        typer.Option(
            "--python", metavar="PATH", help="The interpreter with sglang, when no server runs.", rich_help_panel=PANEL
        ),
    ],
    "accept_new": Annotated[
        bool,
        typer.Option("--accept-new", help="Trust a host key that is not known yet.", rich_help_panel=PANEL),
    ],
    "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Say more on standard error.")],
}


def with_session(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the common options; it gets a Session as its first argument.

    Args:
        command: its full name, for the schema of ``--json``.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapper(**given: Any) -> None:
            options = {name: given.pop(name) for name in _COMMON}
            sink = output.use(output.Sink(command, as_json=options["as_json"], verbose=options["verbose"]))
            function(Session(sink, options), **given)

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        common = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hint,
                default=False if hint.__origin__ is bool else None,
            )
            for name, hint in _COMMON.items()
        ]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        del wrapper.__wrapped__
        return wrapper

    return decorate
