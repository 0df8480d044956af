"""``make demo``: surgeon's whole job on the lab, one command after the other, as a person would type them.

It runs the real command line and measures experts per decode pass with sglang's own recorder, which knows nothing of
surgeon. Nothing here is special to the demo: each line after ``$`` can be typed by hand.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from surgeon.errors import SurgeonError
from surgeon.lab import recorder
from surgeon.lab.loopback import generate
from surgeon.lab.paths import paths

if TYPE_CHECKING:
    from collections.abc import Sequence

K0 = 4
TOP_K = 8
EXPERTS = 64
IN_FLIGHT = 16


def main() -> int:
    """Run the demo; the exit code is that of the first command that fails."""
    console = Console(highlight=False)
    began = time.monotonic()
    try:
        _show(console)
    except subprocess.CalledProcessError as error:
        console.print(f"[red]`{_typed(error.cmd)}` ended with {error.returncode}[/red]")
        return int(error.returncode)
    except SurgeonError as error:
        console.print(f"[red]error:[/red] {error.message}\n[bold]try:[/bold]   {error.advice}")
        return error.exit_code
    console.print(f"\n[bold]done in {time.monotonic() - began:.0f} s[/bold]; `surgeon lab down` stops the lab")
    return 0


def _show(console: Console) -> None:
    _surgeon(console, "lab", "up", "--fresh")
    file = _json("inspect", "topk", "--host", "lab")
    original = _digest(file["path"])
    _surgeon(console, "inspect", "topk", "--host", "lab")
    before = _measure(console)
    _surgeon(console, "bench", "smoke", "--host", "lab")
    _surgeon(console, "apply", "oea", "--k0", str(K0), "--host", "lab", "--yes")
    _surgeon(console, "status", "--host", "lab")
    after = _measure(console)
    _surgeon(console, "rollback", "--host", "lab", "--yes")
    restored = _digest(file["path"])
    _compare(console, before, after)
    same = original == restored
    console.print(f"topk.py before  {original}\ntopk.py after   {restored}")
    console.print("[green]identical[/green]" if same else "[red]different[/red]")
    if not same:
        raise SurgeonError(f"{file['path']} is not what it was", advice="look at it with `surgeon diff --host lab`")


def _measure(console: Console) -> float:
    """Mean active experts per layer over decode passes of IN_FLIGHT rows, by sglang's recorder."""
    lab = json.loads(paths().description.read_text(encoding="utf-8"))
    console.print(f"\n[dim]# sglang's own recorder, {IN_FLIGHT} requests in flight[/dim]")
    passes = recorder.record(
        int(lab["port"]),
        paths().recordings,
        lambda: generate(int(lab["port"]), IN_FLIGHT, input_len=96, max_new_tokens=32, seed=7, temperature=1.0),
        python=Path(lab["python"]),
        top_k=TOP_K,
    )
    mean = recorder.mean_active(passes, rows=IN_FLIGHT)
    console.print(f"T = [bold]{mean:.1f}[/bold] of {EXPERTS} experts per layer and decode pass")
    return mean


def _compare(console: Console, before: float, after: float) -> None:
    native = recorder.expected_active(EXPERTS, TOP_K, IN_FLIGHT)
    core = recorder.expected_active(EXPERTS, K0, IN_FLIGHT)
    console.print(f"\nexperts per decode pass, {IN_FLIGHT} requests in flight, by sglang's recorder:")
    console.print(f"  unpatched  {before:.1f}  [dim](uniform routing would give {native:.1f})[/dim]")
    console.print(f"  k0 = {K0}     {after:.1f}  [dim](uniform routing would give {core:.1f})[/dim]")
    console.print(f"  ratio      {after / before:.2f}")


def _surgeon(console: Console, *words: str) -> None:
    console.print(f"\n[bold cyan]$ surgeon {' '.join(words)}[/bold cyan]")
    subprocess.run([sys.executable, "-m", "surgeon", *words], check=True, stdin=subprocess.DEVNULL)


def _json(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "surgeon", *words, "--json"]
    done = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)["result"]
    return result


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _typed(command: str | Sequence[str]) -> str:
    return command if isinstance(command, str) else " ".join(["surgeon", *command[3:]])


if __name__ == "__main__":
    sys.exit(main())
