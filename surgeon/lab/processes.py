"""The lab's processes: found in /proc by what marks them, and ended without leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.errors import SurgeonError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_PROC = Path("/proc")
_POLL_S = 0.1
_DETACH = """
import os, subprocess, sys
with open(sys.argv[1], "ab") as log:
    child = subprocess.Popen(
        sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
print(child.pid, flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Process:
    """One running process.

    Attributes:
        pid: its number.
        parent: its parent's.
        started: clock ticks from boot to its start; with pid it names a process for good.
        argv: its command line, or the one word that it has put in its place.
    """

    pid: int
    parent: int
    started: int
    argv: tuple[str, ...]


def detach(argv: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str] | None = None) -> int:
    """Start a program that outlives us, as a user's ``nohup PROGRAM >> LOG 2>&1 &`` does.

    A Python in between starts it and ends, so that it is nobody's child to wait for.

    Args:
        argv: the program and its arguments.
        log: standard output and error are appended there.
        cwd: its working folder.
        env: its environment; None for ours.

    Returns:
        Its number, which is also that of its session and process group.

    Raises:
        SurgeonError: it could not be started.
    """
    command = [sys.executable, "-I", "-c", _DETACH, str(log), "nohup", *argv]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=60
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise SurgeonError(f"{argv[0]} could not be started: {last[0]}", where=argv[0])
    return int(done.stdout)


def look_up(pid: int) -> Process | None:
    """The process of that number, or None if there is none or it has ended and waits for its parent.

    Args:
        pid: its number.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold anything, parentheses too.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] == "Z":
        return None
    argv = tuple(word.decode(errors="replace") for word in command.rstrip(b"\0").split(b"\0"))
    return Process(pid, int(fields[1]), int(fields[19]), argv)


def everything() -> list[Process]:
    """All processes, in order of their numbers."""
    pids = sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [process for pid in pids if (process := look_up(pid)) is not None]


def marked(variable: str, value: str, *, mapping: Path) -> list[Process]:
    """Processes that carry a mark in their environment or have files of a folder mapped, and their descendants.

    sglang's workers write their title over their environment, so that the mark is gone; but they have the compiled
    modules of their environment mapped, whoever their parent is by now. What descends from a process with another
    mark belongs to another lab, which may share those files.

    Args:
        variable: of the environment.
        value: what it is set to.
        mapping: a folder; files whose path begins like it count.
    """
    all_of_them = everything()
    marks = {process.pid: _environment(process.pid, variable) for process in all_of_them}
    foreign = {pid for pid, mark in marks.items() if mark not in {None, value}}
    elsewhere = {process.pid for process in descendants(foreign, among=all_of_them)}
    roots = {
        pid
        for pid, mark in marks.items()
        if mark == value or (pid not in elsewhere and os.fsencode(mapping) in _read(pid, "maps"))
    }
    return descendants(roots, among=all_of_them)


def _environment(pid: int, variable: str) -> str | None:
    name = f"{variable}=".encode()
    found = (entry for entry in _read(pid, "environ").split(b"\0") if entry.startswith(name))
    return next((os.fsdecode(entry[len(name) :]) for entry in found), None)


def _read(pid: int, what: str) -> bytes:
    try:
        return (_PROC / str(pid) / what).read_bytes()
    except OSError:
        return b""  # another user's, or gone


def descendants(roots: Collection[int], *, among: Iterable[Process] | None = None) -> list[Process]:
    """Processes and everything below them.

    Args:
        roots: numbers of the processes to begin with.
        among: where to look; None for all processes.
    """
    candidates = list(everything() if among is None else among)
    chosen = set(roots)
    grown = True
    while grown:
        more = {process.pid for process in candidates if process.parent in chosen} - chosen
        chosen |= more
        grown = bool(more)
    return [process for process in candidates if process.pid in chosen]


def alive(process: Process) -> bool:
    """Whether it still runs; another process that got its number does not count.

    Args:
        process: as it was seen before.
    """
    now = look_up(process.pid)
    return now is not None and now.started == process.started


def end(processes: Collection[Process], *, grace_s: float = 20.0) -> None:
    """End processes: ask, wait, then insist.

    Args:
        processes: as they were seen; ourselves left out.
        grace_s: seconds between asking and insisting.

    Raises:
        SurgeonError: some would not end.
    """
    mine = os.getpid()
    for how, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        left = [process for process in processes if process.pid != mine and alive(process)]
        for process in left:
            _signal(process.pid, how)
        deadline = time.monotonic() + patience_s
        while any(alive(process) for process in left):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        else:
            return
    raise SurgeonError(
        f"Processes that would not end: {', '.join(str(process.pid) for process in left if alive(process))}",
        advice="They may belong to another user, or wait for a disk; look at them with ps.",
    )


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise SurgeonError(
            f"Process {pid} belongs to another user and cannot be ended.",
            advice="Run `surgeon lab down` as the user who ran `surgeon lab up`.",
        ) from error
