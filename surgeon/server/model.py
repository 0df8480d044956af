"""A serving process as the node's agent describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Worker:
    """A scheduler: the process that runs the model for one rank.

    Attributes:
        pid: its id on the node.
        title: its process title, such as ``sglang::scheduler_TP0``.
        started: seconds since the epoch.
        start_ticks: clock ticks after boot; with the pid it names the process for good.
    """

    pid: int
    title: str
    started: float
    start_ticks: int


@dataclass(frozen=True)
class Supervisor:
    """What would start a server again behind our back, or go down with it.

    Attributes:
        kind: ``systemd``, ``docker``, ``container-init``, ``supervisord``, ``program``, ...
        unit: which one.
        advice: how to restart the server then.
    """

    kind: str
    unit: str
    advice: str


@dataclass(frozen=True)
class Server:
    """A running sglang server. Secrets are masked; the environment is cut to what decides where code comes from.

    Attributes:
        pid: the launcher's id.
        start_ticks: when the launcher started, clock ticks after boot.
        started: the same, seconds since the epoch.
        uid: whom it runs as.
        user: that user's name.
        argv: its command line.
        cwd: its working directory.
        interpreter: the Python it was started with; None when that cannot be told.
        port: where it listens, or will.
        host: the address that it was asked to listen on.
        listening: whether its own processes listen on that port now.
        model_path: the model it was asked to serve; empty when its command line does not say.
        log: the file that its standard output goes to; None for a terminal or a pipe.
        workers: its schedulers, one per rank.
        tree: the pids of all of its processes.
        env: the shown part of its environment.
        supervised: who would start it again; None for one that was started by hand.
    """

    pid: int
    start_ticks: int
    started: float
    uid: int
    user: str
    argv: tuple[str, ...]
    cwd: str | None
    interpreter: str | None
    port: int
    host: str
    listening: bool
    model_path: str
    log: str | None
    workers: tuple[Worker, ...]
    tree: tuple[int, ...]
    env: Mapping[str, str] = field(repr=False)
    supervised: Supervisor | None = None


@dataclass(frozen=True)
class Started:
    """A server that was just started.

    Attributes:
        pid: the launcher's id.
        start_ticks: when it started, clock ticks after boot; None when the agent does not say.
        port: where it will listen.
        log: the file that it writes to.
        log_offset: where in it this start begins, in bytes.
        notes: what is different from how it was started before.
    """

    pid: int
    port: int
    log: str
    log_offset: int
    start_ticks: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A launch that is saved on the node.

    Attributes:
        id: the name it is saved under.
        port: the server's port.
        phase: ``stopping``, ``stopped`` or ``started``; anything but the last while the server is down because of us.
        pid: the last process of it.
        alive: whether that very process runs.
        argv: its command line, secrets masked.
        log: the file that it writes to.
        changed: when the phase changed, seconds since the epoch.
    """

    id: str
    port: int
    phase: str
    pid: int
    alive: bool
    argv: tuple[str, ...]
    log: str
    changed: float


def parse_worker(raw: Mapping[str, Any]) -> Worker:
    """A worker from the agent's words."""
    return Worker(
        pid=int(raw["pid"]),
        title=str(raw["title"]),
        started=float(raw["started"]),
        start_ticks=int(raw["start_ticks"]),
    )


def parse_server(raw: Mapping[str, Any]) -> Server:
    """A server from one entry of ``survey`` or ``processes``."""
    supervised = raw.get("supervised")
    return Server(
        pid=int(raw["pid"]),
        start_ticks=int(raw["start_ticks"]),
        started=float(raw["started"]),
        uid=int(raw["uid"]),
        user=str(raw["user"]),
        argv=tuple(raw["argv"]),
        cwd=raw.get("cwd"),
        interpreter=raw.get("interpreter"),
        port=int(raw["port"]),
        host=str(raw["host"]),
        listening=bool(raw["listening"]),
        model_path=str(raw.get("model_path") or ""),
        log=raw.get("log"),
        workers=tuple(parse_worker(one) for one in raw["workers"]),
        tree=tuple(raw["tree"]),
        env=dict(raw["env"]),
        supervised=Supervisor(supervised["kind"], supervised["unit"], supervised["advice"]) if supervised else None,
    )


def parse_started(raw: Mapping[str, Any]) -> Started:
    """What ``start`` and ``restart`` answered."""
    return Started(
        pid=int(raw["pid"]),
        port=int(raw["port"]),
        log=str(raw["log"]),
        log_offset=int(raw["log_offset"]),
        start_ticks=int(raw["start_ticks"]) if raw.get("start_ticks") is not None else None,
        notes=tuple(raw.get("notes") or ()),
    )


def parse_launch(raw: Mapping[str, Any] | None) -> Launch | None:
    """The saved launch of a survey, if there is one."""
    if not raw:
        return None
    return Launch(
        id=str(raw["id"]),
        port=int(raw["port"]),
        phase=str(raw["phase"]),
        pid=int(raw["pid"]),
        alive=bool(raw["alive"]),
        argv=tuple(raw["argv"]),
        log=str(raw["log"]),
        changed=float(raw["changed"]),
    )
