"""What a person types. Parses, renders, exits; nobody imports it."""

import io
import sys


def main() -> None:
    """Run the command line."""
    from surgeon.cli.app import app

    # A terminal that cannot show a sign gets its code instead; a check mark must not end an apply.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    app(prog_name="surgeon")
