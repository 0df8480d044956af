"""Speed where people wait, as ratios measured side by side: ``make bench``.

Each pair is run interleaved on this machine, so that what else runs on it slows both; the median counts. Absolute times
differ between machines and are shown only to judge the ratios by. The lab is brought up if it is not. One run of each
goes unmeasured: it leaves the agent on the node, the site in the cache and bytecode beside the modules.

    surgeon --help                            against a Typer app of two commands: at most 1.3
    surgeon inspect topk --host lab           against ``ssh HOST true``: at most 5
    surgeon apply oea --yes --no-restart      against an Ansible playbook that reads the version and runs blockinfile:
                                              at most 0.5 (ansible-core is installed into an environment of its own)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
SURGEON = [sys.executable, "-m", "surgeon"]
TYPER_APP = """
import typer
app = typer.Typer()
@app.command()
def one(name: str) -> None:
    "First."
@app.command()
def two(name: str) -> None:
    "Second."
app()
"""
PLAYBOOK = """
- hosts: lab
  gather_facts: false
  tasks:
    - name: read the version
      ansible.builtin.command: "{{ python }} -c 'import importlib.metadata as m; print(m.version(\\"sglang\\"))'"
      changed_when: false
    - name: put the block in
      ansible.builtin.blockinfile:
        path: "{{ file }}"
        insertbefore: "^def select_experts"
        marker: "# {mark} surgeon benchmark"
        block: "import os as _benchmark"
"""


@dataclass(frozen=True)
class Pair:
    """One comparison: what surgeon does, what it is set beside, and the most that the ratio may be."""

    name: str
    beside: str
    limit: float
    ours: Callable[[], None]
    theirs: Callable[[], None]
    between: Callable[[], None] = lambda: None
    runs: int = 7

    def measure(self) -> tuple[float, float]:
        """Medians in seconds, ours and theirs, of interleaved runs after one unmeasured run of each."""
        ours: list[float] = []
        theirs: list[float] = []
        for run in range(self.runs + 1):
            for work, times in ((self.ours, ours), (self.theirs, theirs)):
                began = time.perf_counter()
                work()
                if run:
                    times.append(time.perf_counter() - began)
                self.between()
        return statistics.median(ours), statistics.median(theirs)


def run(command: Sequence[str], **extra: str) -> None:
    """Run a command that must succeed, as an installed program runs: with its bytecode cached."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | extra
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        sys.exit(f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def ansible(folder: Path) -> Path:
    """An environment with ansible-core."""
    kept = folder / "ansible"
    if not (kept / "bin" / "ansible-playbook").exists():
        run([sys.executable, "-m", "venv", str(kept)])
        run([str(kept / "bin" / "python"), "-m", "pip", "install", "--quiet", "ansible-core"])
    return kept / "bin" / "ansible-playbook"


def pairs(folder: Path, lab: dict[str, str], playbook: Path) -> list[Pair]:
    """The three comparisons."""
    two = folder / "two.py"
    two.write_text(TYPER_APP, encoding="utf-8")
    book = folder / "play.yml"
    book.write_text(PLAYBOOK, encoding="utf-8")
    hosts = folder / "hosts"
    hosts.write_text(
        f"lab ansible_python_interpreter={lab['python']} ansible_ssh_common_args='-F {lab['ssh_config']}'\n",
        encoding="utf-8",
    )
    (target,) = Path(lab["python"]).parent.parent.glob("lib/python*/site-packages/sglang/srt/layers/moe/topk.py")
    copy = folder / "topk.py"
    ssh = ["ssh", "-F", lab["ssh_config"], "lab", "true"]
    inspect = [*SURGEON, "inspect", "topk", "--host", "lab"]
    apply = [*SURGEON, "apply", "oea", "--k0", "4", "--yes", "--no-restart", "--host", "lab"]
    back = [*SURGEON, "rollback", "--yes", "--no-restart", "--host", "lab"]
    play = [str(playbook), "-i", str(hosts), "-e", f"python={lab['python']}", "-e", f"file={copy}", str(book)]

    def reset() -> None:
        run(back)
        copy.write_bytes(target.read_bytes())

    reset()
    return [
        Pair(
            "surgeon --help",
            "a two-command Typer app's --help",
            1.3,
            lambda: run([*SURGEON, "--help"]),
            lambda: run([sys.executable, str(two), "--help"]),
            runs=15,
        ),
        Pair("surgeon inspect topk", "ssh HOST true", 5.0, lambda: run(inspect), lambda: run(ssh), runs=9),
        Pair(
            "surgeon apply oea --yes --no-restart",
            "the Ansible playbook",
            0.5,
            lambda: run(apply),
            lambda: run(play, ANSIBLE_HOST_KEY_CHECKING="True", ANSIBLE_NOCOWS="1"),
            reset,
            runs=5,
        ),
    ]


def main() -> int:
    """Measure, print, and fail if a ratio is over its limit."""
    run([*SURGEON, "lab", "up"])
    from surgeon.lab.paths import paths

    lab = json.loads(paths().description.read_text(encoding="utf-8"))
    over = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = paths().root / "benchmarks"
        cache.mkdir(parents=True, exist_ok=True)
        print(f"{'surgeon':<40} {'set beside':<34} {'s':>6} {'s':>6} {'ratio':>6} {'limit':>6}")
        for pair in pairs(folder, lab, ansible(cache)):
            ours, theirs = pair.measure()
            ratio = ours / theirs
            over += ratio > pair.limit
            print(f"{pair.name:<40} {pair.beside:<34} {ours:6.2f} {theirs:6.2f} {ratio:6.2f} {pair.limit:6.2f}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
