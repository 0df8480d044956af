"""Which node to work on and how to get there: plain data, filled from options and configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

LOCAL = "local"


@dataclass(frozen=True)
class Target:
    """A node and what is known about the server on it.

    Attributes:
        host: a name that the user's ``ssh`` knows, or ``local`` for this machine.
        ssh_config: a file to use instead of the user's ssh configuration.
        host_key_policy: ``strict`` refuses a host whose key is not known; ``accept-new`` writes it down. A key that
            has changed is refused either way.
        python: the interpreter that has sglang; None to take it from the running server.
        node_python: what runs the agent; None to look for a Python 3.8 or later.
        state_dir: where the agent keeps its state, absolute; None for the usual places.
        port: the port of the server meant, when there are several.
        pid: the process of the server meant, when there are several.
        connect_timeout_s: seconds within which the connection must stand.
    """

    host: str
    ssh_config: Path | None = None
    host_key_policy: Literal["strict", "accept-new"] = "strict"
    python: str | None = None
    node_python: str | None = None
    state_dir: str | None = None
    port: int | None = None
    pid: int | None = None
    connect_timeout_s: float = 15
