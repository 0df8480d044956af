"""What a person types. Parses, renders, exits; nobody imports it."""


def main() -> None:
    """Run the command line."""
    from surgeon.cli.app import app

    app(prog_name="surgeon")
