"""Runs pip, which is how the lab gets packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.errors import SurgeonError
from surgeon.lab.paths import locked, paths

if TYPE_CHECKING:
    from collections.abc import Sequence

_QUIET = ("--quiet", "--disable-pip-version-check", "--no-input")
_TIMEOUT_S = 1800


def run(python: Path, arguments: Sequence[str], *, what: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Run pip to its end.

    Args:
        python: an interpreter that has pip.
        arguments: pip's, from the command on.
        what: what it is for, for the message.
        timeout_s: seconds after which it is given up.

    Raises:
        SurgeonError: pip failed; its last words are in the message.
    """
    command = [str(python), "-m", "pip", *_QUIET, *arguments]
    environment = os.environ | {"PYTHONNOUSERSITE": "1"}
    environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise SurgeonError(
            f"{what}: pip was not done after {timeout_s:.0f} s.",
            advice=f"Run it by hand to see what it waits for: {' '.join(command)}",
        ) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise SurgeonError(
            f"{what}: pip failed: {' / '.join(lines[-3:]) or 'it said nothing'}",
            advice=f"Run it by hand: {' '.join(command)}",
        )


def plan(python: Path, requirements: Sequence[str]) -> list[dict[str, Any]]:
    """What pip would install into an empty environment, without installing it.

    Args:
        python: an interpreter that has pip 22.2 or later.
        requirements: what to install.

    Returns:
        The ``install`` list of pip's report: ``metadata`` and ``download_info`` of each package.

    Raises:
        SurgeonError: pip found no answer.
    """
    report = paths().root / f"plan-{os.getpid()}.json"
    try:
        arguments = ("install", "--dry-run", "--ignore-installed", "--report", str(report), *requirements)
        run(python, arguments, what=f"Asking what {requirements[0]} would bring")
        installed: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    finally:
        report.unlink(missing_ok=True)
    return installed


def tool(python: Path, version: str) -> Path:
    """An interpreter with a pip of its own, which installs into folders, whatever the user's environment lacks.

    Args:
        python: the interpreter to make it from.
        version: its version, such as ``"3.11"``.

    Returns:
        The interpreter of a bare virtual environment in the cache.

    Raises:
        SurgeonError: the interpreter cannot make virtual environments.
    """
    folder = paths().root / "pip" / f"py{version}"
    with locked(f"pip-{version}"):
        if not (folder / "complete").exists():
            make_venv(python, folder)
            (folder / "complete").touch()
    return folder / "bin" / "python"


def make_venv(python: Path, folder: Path) -> None:
    """Make an empty virtual environment with pip in it, over whatever half-made one is there.

    Args:
        python: the interpreter to make it from.
        folder: where.

    Raises:
        SurgeonError: the interpreter cannot make virtual environments.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [str(python), "-m", "venv", str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise SurgeonError(
            f"{python} could not make a virtual environment: {said[-1] if said else 'it said nothing'}",
            advice="On Debian and Ubuntu install the package python3-venv, or give another interpreter: --python",
            where=str(folder),
        )


def default_python() -> Path:
    """The interpreter behind the one that runs surgeon, outside any virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()
