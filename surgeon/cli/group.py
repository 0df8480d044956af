"""One place where errors become words and exit codes."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from surgeon.errors import SurgeonError

INTERRUPTED = 130


class SurgeonGroup(TyperGroup):
    """Turns the project's errors into messages on standard error and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            typer.Exit: with the error's exit code.
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
