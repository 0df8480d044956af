"""The command line as programs and people meet it: run in this process, as a process, or on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from typer.testing import CliRunner

from surgeon.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path

    from typer import Typer


class Ran(NamedTuple):
    """What came of a command."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        """Standard output, which must be exactly one object of the contract's shape."""
        body = json.loads(self.stdout)
        assert list(body) == ["schema", "ok", "result", "problems"]
        assert isinstance(body["ok"], bool)
        assert isinstance(body["result"], dict)
        for problem in body["problems"]:
            assert list(problem) == ["code", "message", "advice", "where"]
        return dict(body)


def surgeon(*arguments: str | Path, application: Typer = app) -> Ran:
    """Run a command in this process."""
    result = CliRunner().invoke(application, [str(argument) for argument in arguments], prog_name="surgeon")
    return Ran(result.exit_code, result.stdout, result.stderr)


def command(*arguments: str | Path) -> list[str]:
    """The words that run surgeon as a process of its own."""
    return [sys.executable, "-m", "surgeon", *(str(argument) for argument in arguments)]


def process(*arguments: str | Path, environ: dict[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Run a command as a process, with nothing on standard input."""
    done = subprocess.run(
        command(*arguments),
        env={**os.environ, **(environ or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def terminal(*arguments: str | Path, columns: int, environ: dict[str, str] | None = None) -> Ran:
    """Run a command on a terminal of its own; all that it wrote there is in ``stdout``."""
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "CI"}}
    env |= {"TERM": "xterm-256color", "COLUMNS": str(columns), **(environ or {})}
    child = subprocess.Popen(command(*arguments), env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    # Linux answers EIO, not an empty read, when the last writer has closed a terminal.
    with contextlib.suppress(OSError), contextlib.closing(os.fdopen(ours, "rb", buffering=0)) as screen:
        while chunk := screen.read(65536):
            written += chunk
    return Ran(child.wait(timeout=60), written.decode(), "")
