"""Stands for the node's python3: runs the agent as python3 would, and breaks something at one precise moment.

Called by the script that ``tests.support.bed`` names as ``node_python``: ``faulty_python.py PLAN python's words...``.
PLAN is a JSON file with ``verb``, ``at``, ``do`` and what ``do`` needs; ``tests.support.bed.Bed.break_at`` lists them.
Its suffix becomes ``.fired`` when its moment has come, so that it counts once and the test can see that it did.
"""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS = {"kill-client": signal.SIGKILL, "interrupt-client": signal.SIGINT}


def session_of(pid: int, server: int) -> int:
    """Return the process of the SSH server that serves the connection which ``pid`` runs in."""
    while pid > 1:
        parent = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        if parent == server:
            return pid
        pid = parent
    raise SystemExit("no SSH server is above this process")


def strike(path: Path, plan: dict[str, Any]) -> None:
    """Do what the plan says."""
    path.rename(path.with_suffix(".fired"))
    for deed in plan["do"]:
        if deed == "cut":
            os.kill(session_of(os.getpid(), plan["ssh_server"]), signal.SIGKILL)
        elif deed in NUMBERS:
            os.kill(int(Path(plan["client"]).read_text(encoding="ascii")), NUMBERS[deed])
        elif deed == "wait":
            time.sleep(plan["wait_s"])
        elif deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)


def guard(call: Callable[..., Any], chosen: Callable[..., bool], deed: Callable[[], None]) -> Callable[..., Any]:
    """Return ``call`` with the deed done before the first time that its arguments are chosen."""
    left = [deed]

    @functools.wraps(call)
    def guarded(*args: Any, **options: Any) -> Any:
        if left and chosen(*args):
            left.pop()()
        return call(*args, **options)

    return guarded


def second(chosen: Callable[..., bool]) -> Callable[..., bool]:
    """Choose what is chosen the second time."""
    seen: list[bool] = []

    def again(*args: Any) -> bool:
        if chosen(*args):
            seen.append(True)
        return len(seen) > 1

    return again


def is_replacing(source: object, *_: object) -> bool:
    """Whether a rename puts a staged file in its place."""
    return ".surgeon-" in Path(str(source)).name


def is_shipped(path: object, *_: object) -> bool:
    """Whether a file is one that surgeon put beside topk.py."""
    return Path(str(path)).name.startswith("_surgeon_")


def arm(plan: dict[str, Any], deed: Callable[[], None]) -> None:
    """Have the deed done when the agent gets to the plan's moment."""
    moment = plan["at"]
    if moment == "start":
        deed()
    elif moment == "compile":
        setattr(subprocess, "Popen", guard(subprocess.Popen, lambda *_: True, deed))  # noqa: B010 - a class to mypy
    elif moment == "first-rename":
        os.rename = guard(os.rename, is_replacing, deed)
    elif moment == "second-rename":
        os.rename = guard(os.rename, second(is_replacing), deed)
    elif moment == "unlink":
        os.unlink = guard(os.unlink, is_shipped, deed)
    elif moment == "term":
        os.kill = guard(os.kill, lambda _pid, number: number == signal.SIGTERM, deed)
    elif moment == "spawn":
        os.fork = guard(os.fork, lambda: True, deed)
    else:
        raise SystemExit(f"no such moment: {moment}")


def main() -> None:
    """Be python3 for the agent's boot program."""
    path, words = Path(sys.argv[1]), sys.argv[2:]
    place = words.index("-c")
    data = sys.stdin.buffer.read()
    sys.stdin = io.TextIOWrapper(io.BytesIO(data))
    head, _, body = data.partition(b"\n")
    request = json.loads(body[int(head.split()[0]) :])
    if path.exists():
        plan = json.loads(path.read_text(encoding="utf-8"))
        if plan["verb"] == request["verb"]:
            arm(plan, functools.partial(strike, path, plan))
    sys.argv = ["-c", *words[place + 2 :]]
    exec(compile(words[place + 1], "<agent>", "exec"), {"__name__": "__main__"})  # noqa: S102 - this is what -c does


if __name__ == "__main__":
    main()
