"""Draws docs/demo.svg: what surgeon prints on the lab, as it prints it.

Run it with ``python docs/record.py`` after ``make demo`` has built the lab. It runs the demo again and draws its words;
where the picture says [...], lines are left out.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from surgeon.lab.paths import paths

HERE = Path(__file__).resolve().parent
WIDTH = 118
# From the first of these to the second nothing is drawn.
CUTS = (
    (r"^\$ surgeon lab up", r"^\$ surgeon inspect topk"),
    (r"^functions that take part", r"^# sglang's own recorder"),
    (r"^\$ surgeon bench smoke", r"^\$ surgeon apply"),
    (r"^--- a", r"^\+    # >>> surgeon"),
    (r"^\+            top_k=", r"^\+        \)"),
    (r"^\$ surgeon status", r"^# sglang's own recorder"),
)
WAITING = re.compile(r"^  (\d+ s: |.* \.\.\.$)")


def main() -> int:
    """Run the demo, draw it."""
    env = {**os.environ, "FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH)}
    done = subprocess.run(
        [sys.executable, "-m", "surgeon.lab.demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stdout)
        return done.returncode
    (HERE / "demo.svg").write_text(draw(done.stdout), encoding="utf-8")
    return 0


def draw(said: str) -> str:
    """The picture of what the demo said."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in kept(said.splitlines()):
        console.print(Text.from_ansi(shortened(line)), soft_wrap=False, no_wrap=True, overflow="ellipsis")
    return console.export_svg(title="surgeon on a real sglang server, no GPU")


def kept(lines: list[str]) -> list[str]:
    """The lines that are drawn."""
    found: list[str] = []
    until: str | None = None
    for line in lines:
        plain = Text.from_ansi(line).plain
        if until is not None:
            if not re.search(until, plain):
                continue
            until = None
        start = next((end for begin, end in CUTS if re.search(begin, plain)), None)
        if start is not None:
            until = start
            found.append("\x1b[2m[...]\x1b[0m")
            continue
        if not WAITING.match(plain):
            found.append(line)
    return found


def shortened(line: str) -> str:
    """Without this machine's cache folder: the picture is of any machine."""
    return line.replace(str(paths().root), "~/.cache/surgeon")


if __name__ == "__main__":
    sys.exit(main())
