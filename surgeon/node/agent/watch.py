"""One look at a server that is starting: its processes, its port, its health, its log, its beacons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional

from . import beacons, launches, loopback, masking, processes, procfs, tail
from .protocol import Context, verb

if TYPE_CHECKING:
    from .processes import Server

HEALTH_TIMEOUT_S = 5.0


def _server(pid: int, start_ticks: Optional[int]) -> Optional[Server]:
    for one in processes.find()[0]:
        if one.process.pid == pid and start_ticks in (None, one.process.start_ticks):
            return one
    return None


def _new_log(path: Optional[str], offset: int, server: Optional[Server], launch_port: int, state: str) -> Any:
    if not path:
        return "", offset
    text, end = tail.since(path, offset)
    secrets = server.secrets() if server is not None else launches.secrets(state, launch_port)
    return masking.text(text, secrets), end


def _beacon_dir(state: str, server: Optional[Server]) -> str:
    uid = server.process.uid if server is not None else None
    return beacons.folder_for(state, uid, processes.home(uid) if uid is not None else "/")


@verb("watch")
def watch(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Look at a server once.

    Args:
        args: ``pid`` and, to be sure of it, ``start_ticks``; ``port``; ``log`` and ``offset``; ``health``: whether to
            ask /health, for at most ``health_timeout_s`` (5 unless said); ``beacon_dirs``: more folders of beacons.
        context: holds the state directory.

    Returns:
        ``alive`` (that very process), ``exit`` (None: init reaps it), ``tree`` pids, ``workers``, ``listening``,
        ``listener_is_ours``, ``listener`` (who else listens), ``health`` status or None, ``log`` (what is
        new of it, at most 256 KiB), ``offset`` of its end, ``beacons``.
    """
    pid, port = int(args["pid"]), int(args["port"])
    server = _server(pid, args.get("start_ticks"))
    open_ = bool(procfs.listeners(port))
    ours = server is not None and server.port == port and bool(server.listening)
    health = None
    if args.get("health") and ours and server is not None:
        limit = min(float(args.get("health_timeout_s") or HEALTH_TIMEOUT_S), max(0.1, context.remaining() - 1.0))
        health = loopback.Endpoint(port, server).request("GET", "/health", None, limit)["status"]
    log, offset = _new_log(args.get("log"), int(args.get("offset") or 0), server, port, context.state)
    return {
        "alive": server is not None,
        "exit": None,
        "tree": [one.pid for one in server.tree] if server is not None else [],
        "workers": [processes.brief(one) for one in server.workers] if server is not None else [],
        "listening": open_,
        "listener_is_ours": ours,
        "listener": processes.stranger_on(port) if open_ and not ours else None,
        "health": health,
        "log": log,
        "offset": offset,
        "beacons": beacons.collect([_beacon_dir(context.state, server), *(args.get("beacon_dirs") or ())]),
    }
