"""What has ended but for the kernel's own work on it: its sockets and its GPU are not free yet."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from surgeon.errors import SurgeonError
from surgeon.node.agent import lifecycle, procfs
from surgeon.node.agent.protocol import AgentError
from tests.support.local_node import context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from surgeon.node.client import Node
    from tests.support.servers import FakeServer


class Unmapped:
    """Has processes look as the kernel shows them between freeing their memory and closing their files.

    How long that takes is up to the kernel; here the process still lives, until it is killed.
    """

    def __init__(self, patch: pytest.MonkeyPatch, after: Path) -> None:
        """Look so once the file ``after`` says that the server is being stopped."""
        self.pids: set[int] = set()
        self._read, self._after = procfs._bytes, after
        patch.setattr(procfs, "_bytes", self)

    def __call__(self, path: str) -> bytes:
        """Read a file of /proc; the command line of these processes is empty."""
        stopping = self._after.exists() and b'"stopp' in self._after.read_bytes()
        return b"" if stopping and path in {f"/proc/{pid}/cmdline" for pid in self.pids} else self._read(path)


@pytest.fixture
def unmapped(fake: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Unmapped:
    """Processes without memory, once the fake is being stopped."""
    return Unmapped(monkeypatch, tmp_path / "state" / "launch" / f"{fake.port}.json")


@contextlib.contextmanager
def beside(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that listens on a server's port, at another address, so that it can from the start."""
    code = (
        "import socket; here = socket.socket(); "
        f"here.bind(('127.0.0.2', {port})); here.listen(); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        yield listener
        listener.kill()


def test_a_restart_waits_for_the_last_thread_to_let_go_of_the_port(fake: FakeServer, node: Node) -> None:
    """A server of many threads is a zombie before its port is free; it is no stranger that took the port."""
    fake.behave(linger_s=2.0)
    fake.start()
    began = time.monotonic()
    node.call("stop", {"pid": fake.pid, "timeout_s": 10})
    assert time.monotonic() - began >= 2.0
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taker.bind(("127.0.0.1", fake.port))


@pytest.mark.parametrize("timeout_s", [10, 1])
def test_a_process_without_memory_whose_files_are_open_has_not_ended(
    timeout_s: int, fake: FakeServer, unmapped: Unmapped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows no command line and is no zombie, and what it holds of a GPU is not free; no signal makes it faster."""
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: pid in unmapped.pids or kill(pid, number))
    monkeypatch.setattr(lifecycle, "_LEFTOVER_GRACE_S", 0.1)
    monkeypatch.setattr(lifecycle, "_KILL_WAIT_S", 0.5)
    fake.start()
    unmapped.pids.add(fake.pid)
    threading.Timer(2.5, kill, (fake.pid, signal.SIGKILL)).start()
    stopped = lifecycle.stop({"pid": fake.pid, "timeout_s": timeout_s}, context(tmp_path / "state"))
    assert stopped["seconds"] >= 2.0
    assert fake.pid in stopped["stopped"]
    assert fake.pid not in stopped["killed"]
    assert procfs.listeners(fake.port) == []


def test_a_port_is_waited_for_while_what_listens_there_is_ending(
    fake: FakeServer, unmapped: Unmapped, tmp_path: Path
) -> None:
    """It may be a child that no longer belonged to the server's tree when it was stopped."""
    fake.start()
    with beside(fake.port) as listener:
        unmapped.pids.add(listener.pid)
        threading.Timer(2.0, listener.kill).start()
        stopped = lifecycle.stop({"pid": fake.pid, "timeout_s": 10}, context(tmp_path / "state"))
        assert listener.pid not in stopped["stopped"]
        assert procfs.listeners(fake.port) == []


def test_what_never_ends_keeps_the_port_until_the_deadline_and_is_named(
    fake: FakeServer, unmapped: Unmapped, tmp_path: Path
) -> None:
    """The wait has an end, within the verb's time."""
    fake.start()
    with beside(fake.port) as listener:
        unmapped.pids.add(listener.pid)
        with pytest.raises(AgentError, match=rf"pid {listener.pid} \(.*, which has not quite ended\) listens there"):
            lifecycle.stop({"pid": fake.pid, "timeout_s": 10}, context(tmp_path / "state", 12.0))


def test_a_living_process_on_the_servers_port_is_named_at_once(fake: FakeServer, node: Node) -> None:
    """Nothing would come of a wait."""
    fake.start()
    with beside(fake.port) as listener:
        began = time.monotonic()
        with pytest.raises(SurgeonError, match=rf"not free: pid {listener.pid} \(.*socket.* listens there"):
            node.call("stop", {"pid": fake.pid, "timeout_s": 10})
        assert time.monotonic() - began < 10
    assert fake.pids() == []
