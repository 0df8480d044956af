"""The one output sink: the answer goes to standard output, the commentary to standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console, RenderableType
    from rich.status import Status

    from surgeon.errors import SurgeonError

_MILESTONE_S: Final = 15.0
_PIPE_WIDTH: Final = 160


class Sink:
    """Where a command's words go.

    Args:
        command: its name, for the schema of ``--json``.
        as_json: print one object on standard output, and nothing else there.
        verbose: show more of the way.
    """

    def __init__(self, command: str = "surgeon", *, as_json: bool = False, verbose: bool = False) -> None:
        self.command = command
        self.as_json = as_json
        self.verbose = verbose
        self.problems: list[dict[str, str]] = []
        self._answered = False

    @property
    def out(self) -> Console:
        """Standard output; wide where no terminal says how wide it is, since nothing is cropped for a pipe to lose."""
        from rich.console import Console

        piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        return Console(highlight=False, width=_PIPE_WIDTH if piped else None)

    @property
    def err(self) -> Console:
        """Standard error."""
        from rich.console import Console

        return Console(stderr=True, highlight=False)

    def answer(
        self, result: Mapping[str, Any], render: Callable[[], Sequence[RenderableType]], *, ok: bool = True
    ) -> None:
        """Print the answer: as one JSON object, or as ``render`` draws it for people."""
        if self.as_json:
            self._json(result, ok=ok)
            return
        console = self.out
        for part in render():
            self.show(part, console)

    def show(self, part: RenderableType, console: Console | None = None) -> None:
        """Print one part of an answer for people; text and code are never cropped."""
        from rich.syntax import Syntax

        console = console or self.out
        if isinstance(part, Syntax) and not part.line_numbers:
            code = part.highlight(part.code)
            code.rstrip()
            console.print(code, soft_wrap=True)
        else:
            console.print(part, soft_wrap=isinstance(part, str))

    def fail(self, error: SurgeonError) -> None:
        """Say what was refused or failed, and what to do."""
        problem = {"code": error.code, "message": error.message, "advice": error.advice, "where": error.where}
        if self.as_json and not self._answered:
            self.problems.append(problem)
            self._json({}, ok=False)
            return
        from rich.text import Text

        console = self.err
        console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
        if error.advice:
            console.print(Text.assemble(("try:   ", "bold"), error.advice), soft_wrap=True)

    def interrupted(self) -> None:
        """Say that it was interrupted."""
        if self.as_json and not self._answered:
            self.problems.append({"code": "interrupted", "message": "interrupted", "advice": "", "where": ""})
            self._json({}, ok=False)
            return
        self.err.print("interrupted")

    def unexpected(self, error: Exception) -> None:
        """Give ``--json`` its object before a bug's traceback goes to standard error."""
        if self.as_json and not self._answered:
            message = f"unexpected {type(error).__name__}: {error}"
            self.problems.append({"code": "failed", "message": message, "advice": "", "where": ""})
            self._json({}, ok=False)

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self.err.print(f"[dim]·[/dim] {_plain(text)}", soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something that may bite; ``--json`` carries it too."""
        self.problems.append({"code": "warning", "message": text, "advice": "", "where": ""})
        self.err.print(f"[yellow]![/yellow] {_plain(text)}", soft_wrap=True)

    @contextmanager
    def step(self, title: str) -> Iterator[_Step]:
        """A step with a spinner where there is a terminal, and a line that stays when it is over."""
        console = self.err
        began = time.monotonic()
        status = console.status(f"{_plain(title)}") if console.is_interactive else None
        step = _Step(title, console, status, began)
        if status:
            status.start()
        else:
            console.print(f"  {_plain(title)} ...", soft_wrap=True)
        failed = True
        try:
            yield step
            failed = False
        finally:
            if status:
                status.stop()
            mark = "[red]✗[/red]" if failed or step.bad else "[green]✓[/green]"
            outcome = f": {_plain(step.outcome)}" if step.outcome else ""
            seconds = time.monotonic() - began
            console.print(f"{mark} {_plain(title)}{outcome} [dim]({seconds:.1f} s)[/dim]", soft_wrap=True)

    def confirm(self, question: str) -> bool:
        """Ask; anything but yes is no, and so is a terminal that is not there."""
        if not sys.stdin.isatty():
            self.warn("nothing was changed: no terminal to ask on; say --yes to go on without asking")
            return False
        self.err.print(f"[bold]{_plain(question)}[/bold] \\[y/N] ", end="")
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    def _json(self, result: Mapping[str, Any], *, ok: bool) -> None:
        self._answered = True
        name = self.command.replace(" ", "-")
        body = {"schema": f"surgeon/{name}/1", "ok": ok, "result": result, "problems": self.problems}
        # Plain ASCII: whatever encoding standard output has, and whatever bytes a path on the node holds, it is JSON.
        sys.stdout.write(json.dumps(body, indent=2) + "\n")


class _Step:
    """A running step on the screen; without a terminal, progress is a line now and then."""

    def __init__(self, title: str, console: Console, status: Status | None, began: float) -> None:
        self.title = title
        self.outcome = ""
        self.bad = False
        self._console = console
        self._status = status
        self._began = began
        self._told = began

    def progress(self, text: str) -> None:
        """What it is doing now."""
        now = time.monotonic()
        if self._status:
            self._status.update(f"{_plain(self.title)} [dim]{now - self._began:.0f} s · {_plain(text)}[/dim]")
        elif now - self._told >= _MILESTONE_S:
            self._told = now
            self._console.print(f"  {now - self._began:.0f} s: {_plain(text)}", soft_wrap=True)

    def done(self, text: str) -> None:
        """What came out of it."""
        self.outcome = text

    def failed(self, text: str) -> None:
        """It did not hold, and why."""
        self.outcome = text
        self.bad = True


_state: dict[str, Sink] = {}


def current() -> Sink:
    """The sink of the running command."""
    return _state.setdefault("sink", Sink())


def use(sink: Sink) -> Sink:
    """Make ``sink`` the one of the running command."""
    _state["sink"] = sink
    return sink


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
