"""Whether this machine can build the lab, asked before anything is downloaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.errors import SurgeonError, UsageError
from surgeon.lab import pip

if TYPE_CHECKING:
    from surgeon.lab.recipes import Recipe

_GB = 1_000_000_000
_SMALL_PACKAGE = "einops"
_INDEX_TIMEOUT_S = 60
_PROBE = "import json, sys, venv, ensurepip; print(json.dumps([list(sys.version_info[:2]), sys.platform]))"


@dataclass(frozen=True)
class Interpreter:
    """A Python that environments can be made from.

    Attributes:
        path: the executable.
        version: (major, minor).
    """

    path: Path
    version: tuple[int, int]

    @property
    def text(self) -> str:
        """Such as ``3.11``."""
        return f"{self.version[0]}.{self.version[1]}"


def require_linux() -> None:
    """Refuse other systems: sglang's CPU engine and the lab's process handling are made for Linux.

    Raises:
        SurgeonError: this is not Linux.
    """
    if sys.platform != "linux":
        raise SurgeonError(
            f"The lab needs Linux; this is {sys.platform}.",
            advice="Run it in a Linux machine or container with 8 GB of memory and 10 GB of disk.",
            code="lab-platform",
        )


def choose_python(recipe: Recipe, asked: Path | None) -> Interpreter:
    """An interpreter that the release's wheel installs on.

    Args:
        recipe: of the release.
        asked: what the user asked for; None to look at the running one and then along PATH.

    Returns:
        The first that fits.

    Raises:
        SurgeonError: none fits; the message says which versions do.
    """
    names = [f"python{major}.{minor}" for major, minor in recipe.pythons]
    if asked is not None:
        candidates = [asked]
    else:
        along_path = [Path(found) for name in names if (found := shutil.which(name))]
        candidates = [pip.default_python(), *along_path]
    probed = [_probe(candidate) for candidate in candidates]
    for interpreter in probed:
        if interpreter is not None and interpreter.version in recipe.pythons:
            return interpreter
    wanted = " or ".join(f"{major}.{minor}" for major, minor in recipe.pythons)
    seen = ", ".join(
        f"{path} ({'unusable' if one is None else one.text})" for path, one in zip(candidates, probed, strict=True)
    )
    raise SurgeonError(
        f"sglang {recipe.sglang} needs Python {wanted} with venv and pip; found {seen}.",
        advice=f"Install one of {', '.join(names)} and give it: surgeon lab up --python /path/to/{names[0]}",
        code="lab-python",
    )


def _probe(path: Path) -> Interpreter | None:
    try:
        done = subprocess.run(
            [str(path), "-I", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except OSError:
        return None
    if done.returncode != 0:
        return None
    version, _platform = json.loads(done.stdout)
    return Interpreter(path, (int(version[0]), int(version[1])))


def require_disk(folder: Path, needed_bytes: int) -> None:
    """Refuse to begin what would fill the disk.

    Args:
        folder: where the lab will be built; need not exist.
        needed_bytes: what the missing parts take, with room for unpacking.

    Raises:
        SurgeonError: there is less.
    """
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed_bytes:
        raise SurgeonError(
            f"The lab needs {needed_bytes / _GB:.1f} GB of disk; {there} has {free / _GB:.1f} GB free.",
            advice="Free some, or put the cache elsewhere: SURGEON_CACHE_DIR=/path surgeon lab up",
            where=str(there),
            code="lab-disk",
        )


def require_index(python: Path, version: str) -> None:
    """Ask the package index for one small package, downloading none.

    Args:
        python: the interpreter that environments are made from.
        version: its version, such as ``"3.11"``.

    Raises:
        SurgeonError: the index does not answer.
    """
    tool = pip.tool(python, version)
    arguments = ("install", "--dry-run", "--no-deps", "--ignore-installed", "--retries", "1", "--timeout", "15")
    try:
        pip.run(tool, [*arguments, _SMALL_PACKAGE], what="Asking the package index", timeout_s=_INDEX_TIMEOUT_S)
    except SurgeonError as error:
        raise SurgeonError(
            f"pip reaches no package index, which building the lab needs. {error.message}",
            advice="Look at the network and at `pip config list`. Once built, the lab needs no network.",
            code="lab-network",
        ) from error


def cores_per_rank(ranks: int) -> tuple[str, ...]:
    """The core of each tensor-parallel rank, as ``SGLANG_CPU_OMP_THREADS_BIND`` has it.

    Args:
        ranks: tensor-parallel size.

    Returns:
        One core number per rank.

    Raises:
        UsageError: this process may use fewer cores than that.
    """
    usable = sorted(os.sched_getaffinity(0))
    if not 1 <= ranks <= len(usable):
        raise UsageError(
            f"--tp {ranks} needs one core per rank; this machine lets us use {len(usable)}.",
            advice=f"Choose --tp between 1 and {len(usable)}.",
        )
    return tuple(str(core) for core in usable[:ranks])
