"""This machine as a node, with a state directory of the test's own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from surgeon.node.agent.protocol import Context
from surgeon.node.client import Node, connect
from surgeon.node.target import Target

if TYPE_CHECKING:
    from pathlib import Path


def local_node(state: Path, **target: Any) -> Node:
    """Return a node whose agent runs here as a process of its own, as it would behind SSH."""
    return connect(Target(host="local", state_dir=str(state), **target))


def context(state: Path, seconds: float = 30.0) -> Context:
    """Return what a verb gets that is called in this process."""
    return Context(str(state), None, time.monotonic() + seconds)


def server_at(node: Node, port: int) -> dict[str, Any]:
    """Return the server on a port, as the node's agent describes it; others may run on this machine too."""
    found = [one for one in node.call("processes")["servers"] if one["port"] == port]
    assert len(found) == 1, found
    return dict(found[0])
