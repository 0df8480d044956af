"""Processes are found by their mark and ended without leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surgeon.errors import SurgeonError
from surgeon.lab import processes

if TYPE_CHECKING:
    from collections.abc import Callable

NOWHERE = Path("/nowhere/at/all")
FAMILY = "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); print('up', flush=True); time.sleep(300)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that will come true in seconds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def detached(folder: Path, code: str, **mark: str) -> int:
    """Start Python code as nobody's child and wait until it says that it is up."""
    log = folder / f"log-{len(list(folder.iterdir()))}"
    pid = processes.detach([sys.executable, "-c", code], log=log, cwd=folder, env={**os.environ, **mark})
    until(lambda: "up" in log.read_text(encoding="utf-8"))
    return pid


def test_what_is_detached_outlives_us_in_a_group_of_its_own(tmp_path: Path) -> None:
    """It is nobody's child, leads its own session and group, and writes to its log."""
    pid = detached(tmp_path, FAMILY)
    try:
        found = processes.look_up(pid)
        assert found is not None
        assert found.parent != os.getpid()
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, pid)
        assert os.getsid(pid) != os.getsid(0)
    finally:
        processes.end(processes.descendants({pid}))


def test_a_program_that_does_not_exist_is_said_in_its_log(tmp_path: Path) -> None:
    """It ends at once and its log says why."""
    log = tmp_path / "log"
    pid = processes.detach(["/nowhere/program"], log=log, cwd=tmp_path)
    until(lambda: processes.look_up(pid) is None)
    assert "/nowhere/program" in log.read_text(encoding="utf-8")


def test_the_marked_and_their_children_are_found_and_nobody_else(tmp_path: Path) -> None:
    """A process with the mark and what it started are ours; one with another lab's mark is not."""
    mine = detached(tmp_path, FAMILY, SURGEON_TEST_MARK="mine")
    other = detached(tmp_path, FAMILY, SURGEON_TEST_MARK="another")
    try:
        found = processes.marked("SURGEON_TEST_MARK", "mine", mapping=NOWHERE)
        assert {process.pid for process in found} == {process.pid for process in processes.descendants({mine})}
        assert len(found) == 2
    finally:
        processes.end([*processes.descendants({mine}), *processes.descendants({other})])


def test_a_process_that_lost_its_mark_is_known_by_what_it_has_mapped(tmp_path: Path) -> None:
    """Workers write over their environment; the interpreter's own libraries show where they come from."""
    pid = detached(tmp_path, FAMILY)
    try:
        mapped = next(
            line.split(maxsplit=5)[5]
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            if "lib-dynload" in line or line.endswith(".so") or ".so." in line
        )
        found = processes.marked("SURGEON_TEST_MARK", "mine", mapping=Path(mapped))
        assert pid in {process.pid for process in found}
        assert pid not in {p.pid for p in processes.marked("SURGEON_TEST_MARK", "mine", mapping=NOWHERE)}
    finally:
        processes.end(processes.descendants({pid}))


def test_ending_takes_the_whole_family(tmp_path: Path) -> None:
    """After `end` neither the parent nor its child runs."""
    pid = detached(tmp_path, FAMILY)
    family = processes.descendants({pid})
    assert len(family) == 2
    processes.end(family)
    assert [process for process in family if processes.alive(process)] == []


def test_one_that_does_not_listen_is_ended_all_the_same(tmp_path: Path) -> None:
    """A process that ignores the request is killed after the grace."""
    pid = detached(tmp_path, STUBBORN)
    family = processes.descendants({pid})
    processes.end(family, grace_s=0.3)
    assert processes.look_up(pid) is None


def test_another_process_with_the_same_number_does_not_count_as_alive() -> None:
    """A number alone names nobody: the start time must match."""
    now = processes.look_up(os.getpid())
    assert now is not None
    before = processes.Process(now.pid, now.parent, now.started - 1, now.argv)
    assert processes.alive(now)
    assert not processes.alive(before)


def test_a_process_that_only_waits_to_be_buried_has_ended() -> None:
    """A zombie is not running."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        until(lambda: processes.look_up(child.pid) is None)


def test_what_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    """A log that cannot be written is reported as the reason."""
    with pytest.raises(SurgeonError, match="could not be started"):
        processes.detach(["true"], log=tmp_path / "no" / "folder" / "log", cwd=tmp_path)
