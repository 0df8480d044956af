"""Runs surgeon's command line the way a person does: as a process, with its answer read from ``--json``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a command came to."""

    code: int
    stdout: str
    stderr: str

    @property
    def body(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        body: dict[str, Any] = json.loads(self.stdout)
        return body

    @property
    def result(self) -> dict[str, Any]:
        """Its result."""
        result: dict[str, Any] = self.body["result"]
        return result

    @property
    def problem(self) -> dict[str, str]:
        """Its last problem: the error, if there was one."""
        problem: dict[str, str] = self.body["problems"][-1]
        return problem


def surgeon(*words: str, env: dict[str, str] | None = None, timeout_s: float = 900.0) -> Answer:
    """Run ``surgeon WORDS``; its standard input is empty."""
    done = subprocess.run(
        [sys.executable, "-m", "surgeon", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=timeout_s,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)
