"""``surgeon restart`` and ``surgeon logs``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.session import Session, with_session

if TYPE_CHECKING:
    from surgeon.server.model import Server


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("restart")(restart)
    app.command("logs")(logs)


@with_session("restart")
def restart(
    session: Session,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Take the lease from whoever holds it.")] = False,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", metavar="SECONDS", help="How long a start may take.")
    ] = 1800.0,
) -> None:
    """Restart the server with the command line, environment and folder it was started with."""
    from surgeon import patches
    from surgeon.cli import describe
    from surgeon.operations import restart as story

    def confirm(server: Server | None) -> bool:
        if yes:
            return True
        if session.sink.as_json:
            return False
        what = f"Restart pid {server.pid} on port {server.port}?" if server else "Start the server again?"
        return session.sink.confirm(what)

    with session.connect() as node:
        outcome = story.run(
            node,
            session.target,
            patches.load("oea"),
            session.sink,
            confirm,
            ready_s=ready_timeout,
            break_lock=break_lock,
        )
    result = {
        "status": outcome.status,
        "server": describe.server_json(outcome.server),
        "gates": describe.gates_json(outcome.gates),
        "settled": describe.settled_json(outcome.settled),
    }
    session.sink.answer(
        result,
        lambda: (
            ["nothing was changed"]
            if outcome.status == "declined"
            else [f"[green]{outcome.status}[/green]: {describe.server_text(outcome.server)}"]
        ),
    )


@with_session("logs")
def logs(
    session: Session,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines.")] = 50,
) -> None:
    """Print the end of the running server's log."""
    from surgeon.errors import DoesNotFitError
    from surgeon.operations import restart as story
    from surgeon.operations import survey

    with session.connect() as node:
        seen = survey.take(node, session.target, http=False)
        path = seen.server.log if seen.server else (seen.launch or {}).get("log")
        if seen.server is None and not path:
            raise story.no_server(seen, session.target)
        if not path:
            raise DoesNotFitError(
                "the server's output does not go to a file that can be read",
                advice="look where it was started (a terminal, journalctl, the container's log)",
            )
        text = str(node.call("tail", {"path": path, "lines": lines})["text"])
    session.sink.answer({"path": path, "text": text}, lambda: [describe_text(text)])


def describe_text(text: str) -> str:
    """Log lines, as they are."""
    from surgeon.cli import describe

    return describe.escape(text.rstrip("\n"))
