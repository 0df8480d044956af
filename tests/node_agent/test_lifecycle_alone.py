"""Two agents that stop and start at once: one waits for the other, and each finds what runs by then."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.errors import LockedError, SurgeonError
from tests.support.local_node import local_node, server_at

if TYPE_CHECKING:
    from pathlib import Path

    from surgeon.node.client import Node
    from tests.support.servers import FakeServer

SITE = "0123456789ab"


class Restarting(threading.Thread):
    """A restart by another client, which has begun to stop the server by the time this returns."""

    def __init__(self, fake: FakeServer, state: Path, *, timeout_s: float) -> None:
        super().__init__(daemon=True)
        self.answer: dict[str, Any] = {}
        self._fake, self._state, self._timeout_s = fake, state, timeout_s
        self.start()
        while '"stopping"' not in self._launch():
            time.sleep(0.02)

    def _launch(self) -> str:
        path = self._state / "launch" / f"{self._fake.port}.json"
        return path.read_text(encoding="ascii") if path.exists() else ""

    def run(self) -> None:
        """Restart."""
        with local_node(self._state) as node:
            self.answer = node.call("restart", {"port": self._fake.port, "timeout_s": self._timeout_s})


def test_a_restart_that_comes_during_another_waits_and_restarts_what_that_one_started(
    fake: FakeServer, node: Node, tmp_path: Path
) -> None:
    """The pid that the second client saw is gone by its turn; the port says which server it meant."""
    fake.behave(ignore_term=True)
    seen = fake.start()
    first = Restarting(fake, tmp_path / "state", timeout_s=1)
    second = node.call("restart", {"pid": seen, "port": fake.port, "timeout_s": 1}, deadline_s=60)
    first.join(30)
    assert first.answer["pid"] in second["stopped"]
    assert server_at(node, fake.port)["pid"] == second["pid"]


def test_a_start_that_comes_during_a_restart_waits_and_starts_no_twin(
    fake: FakeServer, node: Node, tmp_path: Path
) -> None:
    """Between a stop and a start the port is free, and two servers on one GPU would both die."""
    fake.behave(ignore_term=True)
    fake.start()
    first = Restarting(fake, tmp_path / "state", timeout_s=1)
    with pytest.raises(SurgeonError, match=r"running already, as pid \d+"):
        node.call("start", {"launch": str(fake.port)}, deadline_s=60)
    first.join(30)
    assert server_at(node, fake.port)["pid"] == first.answer["pid"]


def test_a_stop_that_cannot_wait_any_longer_says_who_is_at_work(fake: FakeServer, node: Node, tmp_path: Path) -> None:
    """It gives up at its own deadline, with the code for a node that another works on, and touches nothing."""
    fake.behave(ignore_term=True)
    fake.start()
    first = Restarting(fake, tmp_path / "state", timeout_s=4)
    with pytest.raises(LockedError, match="at work on the servers of this node"):
        node.call("stop", {"pid": fake.pid, "timeout_s": 1}, deadline_s=2)
    first.join(30)
    assert server_at(node, fake.port)["pid"] == first.answer["pid"]


def test_a_server_that_is_gone_is_started_from_the_launch_of_its_port(fake: FakeServer, node: Node) -> None:
    """It died by itself since it was seen, so nothing says that surgeon stopped it; its launch is kept all the same."""
    started = node.call("restart", {"pid": fake.start(), "timeout_s": 10})
    fake.end()
    again = node.call("restart", {"pid": started["pid"], "port": fake.port, "timeout_s": 10})
    assert again["stopped"] == []
    fake.wait_listening()
    assert server_at(node, fake.port)["pid"] == again["pid"]


def test_a_port_where_nothing_runs_and_nothing_is_saved_is_refused(fake: FakeServer, node: Node) -> None:
    """The launch of another port is no substitute for the one that is missing."""
    node.call("stop", {"pid": fake.start(), "timeout_s": 10})
    with pytest.raises(SurgeonError, match="no saved launch for port 1 "):
        node.call("restart", {"port": 1})
    assert fake.pids() == []


def test_a_restart_is_refused_once_the_lease_is_anothers(fake: FakeServer, node: Node) -> None:
    """A restart that waited, for a client that is gone, must not end the server of the one that came after it."""
    fake.start()
    mine = node.call("lease", {"site_id": SITE, "action": "acquire", "owner": "me", "host": "here", "pid": 1})
    node.lease = mine["token"]
    theirs = {"site_id": SITE, "action": "break", "owner": "she", "host": "there", "pid": 2}
    node.call("lease", theirs)
    with pytest.raises(LockedError, match="she on there"):
        node.call("restart", {"port": fake.port, "site_id": SITE})
    assert fake.pid in fake.pids()
