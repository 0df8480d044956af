"""One place where errors become words and exit codes."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from surgeon.errors import SurgeonError, UsageError

INTERRUPTED = 130
_JSON = "surgeon.json"


class SurgeonGroup(TyperGroup):
    """Turns the project's errors into messages on standard error and exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the line into this group's options and the rest; note whether JSON was asked for anywhere in it."""
        # A mistake in the line is found before any command has read its own --json.
        ctx.meta[_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            typer.Exit: with the error's exit code.
            TyperException: what was typed cannot be parsed; Typer shows it.
            Exception: a bug, for Python to show; ``--json`` has its object all the same.
        """
        from surgeon.cli import output

        try:
            return super().invoke(ctx)
        except SurgeonError as error:
            output.current().fail(error)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            output.current().interrupted()
            raise typer.Exit(INTERRUPTED) from None
        except TyperException as error:
            if not ctx.meta[_JSON]:
                raise
            where: Any = getattr(error, "ctx", None) or ctx
            output.use(output.Sink(where.command_path.partition(" ")[2] or "surgeon", as_json=True))
            output.current().fail(UsageError(error.format_message(), advice=f"see `{where.command_path} --help`"))
            raise typer.Exit(error.exit_code) from error
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            output.current().unexpected(error)
            raise
