"""Stops a server's own processes and starts it again as it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set, Tuple

from . import launches, lease, masking, processes, procfs, spawn, state, tail
from .boot import make_private
from .protocol import AgentError, Context, verb

if TYPE_CHECKING:
    from .processes import Server

DEFAULT_TIMEOUT_S = 60.0

# What is left of a verb's time after the polite part: to kill, to look again, to start.
_RESERVE_S = 10.0
_KILL_WAIT_S = 4.0
# How long schedulers may outlive their launcher before they are asked themselves, and then until they are killed.
_LEFTOVER_GRACE_S = 1.0
_LEFTOVER_WAIT_S = 2.0
# How long the kernel may take to free the memory of what has ended, and then to close its devices and sockets.
_ENDING_WAIT_S = 60.0
_POLL_S = 0.05

Key = Tuple[int, int]


class _Tree:
    """The processes of one server, each known by pid and start time so that no other is ever signalled."""

    def __init__(self, server: Server) -> None:
        self.launcher = server.process.key
        self.members: Dict[Key, procfs.Process] = {one.key: one for one in server.tree}

    def refresh(self) -> List[procfs.Process]:
        """Take in children that were born meanwhile; return who is alive."""
        everybody = procfs.scan()
        for pid, _ in self.members:
            # One whose memory is gone is in no scan, yet its sockets and its GPU are not free.
            one = procfs.process(pid) if pid not in everybody else None
            if one is not None:
                everybody[pid] = one
        alive = {one.pid for key, one in self.members.items() if key[0] in everybody and everybody[key[0]].key == key}
        for pid in procfs.descendants(alive, procfs.children(everybody)):
            if pid in everybody:
                self.members.setdefault(everybody[pid].key, everybody[pid])
        return [
            everybody[key[0]]
            for key in self.members
            if key[0] in everybody and everybody[key[0]].key == key and everybody[key[0]].state not in "ZX"
        ]

    def wait(self, until: float, done: Callable[[List[procfs.Process]], bool]) -> List[procfs.Process]:
        """Look until ``done`` says so or the time is up; return who is alive."""
        while True:
            alive = self.refresh()
            if not alive or done(alive) or time.monotonic() >= until:
                return alive
            time.sleep(_POLL_S)


def _send(who: List[procfs.Process], number: int) -> Set[int]:
    sent = set()
    for one in who:
        if procfs.alive(one.key):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, number)
                sent.add(one.pid)
    return sent


def _refuse_supervised(server: Server) -> None:
    if server.supervised is not None:
        raise AgentError(
            "does-not-fit",
            "Expected a server that was started by hand; this one is kept by {kind} ({unit}).".format(
                **server.supervised
            ),
            server.supervised["advice"],
            "pid {}".format(server.process.pid),
        )


def _ports(server: Server) -> Set[int]:
    held = procfs.sockets(one.pid for one in server.tree)
    return {one.port for one in procfs.listeners() if one.inode in held} | {server.port}


def _ending_until(context: Context) -> float:
    return time.monotonic() + max(1.0, min(_ENDING_WAIT_S, context.remaining() - _RESERVE_S))


def _terminate(server: Server, timeout_s: float, context: Context) -> Tuple[List[int], List[int]]:
    """End a server's processes: the launcher is asked first, what it leaves behind is asked, then killed.

    Returns:
        The pids that ended, and those of them that had to be killed.

    Raises:
        AgentError: some of them could not be ended.
    """
    tree = _Tree(server)
    until = time.monotonic() + max(1.0, min(timeout_s, context.remaining() - _RESERVE_S))
    try:
        os.kill(server.process.pid, signal.SIGTERM)
    except PermissionError as error:
        raise AgentError(
            "does-not-fit",
            "The server belongs to {} and this user may not stop it.".format(processes.user_name(server.process.uid)),
            "Work as that user, or as root.",
            "pid {}".format(server.process.pid),
        ) from error
    except ProcessLookupError:
        pass
    tree.wait(until, lambda alive: tree.launcher not in {one.key for one in alive})
    left = tree.wait(time.monotonic() + _LEFTOVER_GRACE_S, lambda _alive: False)
    if left and tree.launcher not in {one.key for one in left}:
        _send(left, signal.SIGTERM)
        left = tree.wait(time.monotonic() + _LEFTOVER_WAIT_S, lambda _alive: False)
    killed: Set[int] = set()
    end = time.monotonic() + _KILL_WAIT_S
    while left and time.monotonic() < end:
        killed |= _send(left, signal.SIGKILL) - {one.pid for one in left if one.ending}
        left = tree.wait(min(end, time.monotonic() + 1.0), lambda _alive: False)
    if all(one.ending for one in left):
        left = tree.wait(_ending_until(context), lambda _alive: False)
    if left:
        raise AgentError(
            "failed",
            "These processes of the server did not end, even killed: {}.".format(
                ", ".join("{} ({}, state {})".format(one.pid, one.title[:60], one.state) for one in left)
            ),
            "State D is a process stuck in the driver: look at dmesg; the node may need a reboot.",
            "pid {}".format(server.process.pid),
        )
    return sorted(key[0] for key in tree.members), sorted(killed)


def _kept(port: int, until: float) -> Optional[str]:
    """Wait until a port is free of what has ended; say who keeps it, None when it is free.

    Whoever lives and listens is named at once. A process of many threads is a zombie, and its sockets are nobody's
    that can be seen, before the last of them has let go: what cannot be seen is waited for as what is ending is.
    """
    while procfs.listeners(port):
        who = procfs.holder(port)
        if (who is not None and not who.ending) or time.monotonic() >= until:
            return processes.named(who)
        time.sleep(_POLL_S)
    return None


def _verify_stopped(server: Server, ports: Set[int], context: Context) -> None:
    """Make sure that nobody took the server's place.

    Raises:
        AgentError: something else listens on its ports, or starts it again.
    """
    time.sleep(_POLL_S)
    for one in processes.find()[0]:
        if one.process.argv == server.process.argv and one.port == server.port:
            raise AgentError(
                "failed",
                "Something started the server again at once, as pid {} under pid {}.".format(
                    one.process.pid, one.process.ppid
                ),
                "Stop what keeps it up (a loop in a script, a supervisor) and restart it by its own command.",
                "pid {}".format(one.process.pid),
            )
    until = _ending_until(context)
    for port in sorted(ports):
        stranger = _kept(port, until)
        if stranger is not None:
            raise AgentError(
                "failed",
                "Port {} was the server's and is not free: {} listens there.".format(port, stranger),
                "Free the port, then run `surgeon restart`.",
                "port {}".format(port),
            )


def _stop(server: Server, timeout_s: float, context: Context) -> Dict[str, Any]:
    _refuse_supervised(server)
    launch = launches.of_server(server, context.state)
    ports = _ports(server)
    began = time.monotonic()
    launch = launches.save(context.state, launch, launches.STOPPING)
    ended, killed = _terminate(server, timeout_s, context)
    _verify_stopped(server, ports, context)
    launch = launches.save(context.state, launch, launches.STOPPED)
    return {
        "launch": launch["id"],
        "port": server.port,
        "stopped": ended,
        "killed": killed,
        "log": launch["stdout"],
        "log_offset": tail.size(launch["stdout"]),
        "seconds": round(time.monotonic() - began, 3),
        "notes": launch["notes"],
    }


def _start(launch: Dict[str, Any], context: Context) -> Dict[str, Any]:
    for one in processes.find()[0]:
        # While it loads, a server does not listen yet.
        if one.port == launch["port"]:
            raise AgentError(
                "failed",
                "A server for port {} is running already, as pid {}.".format(launch["port"], one.process.pid),
                "Restart that one instead.",
                "pid {}".format(one.process.pid),
            )
    stranger = processes.stranger_on(launch["port"])
    if stranger is not None:
        raise AgentError(
            "failed",
            "Expected port {} to be free for the server; {} listens there.".format(launch["port"], stranger),
            "Free the port, then run `surgeon restart`.",
            "port {}".format(launch["port"]),
        )
    if launch["own_log"] is not None:
        make_private(os.path.dirname(launch["own_log"]))
    offset = tail.size(launch["stdout"])
    try:
        started = spawn.start(launch)
    except (AgentError, OSError) as error:
        launches.save(context.state, launch, launches.STOPPED)
        if isinstance(error, AgentError):
            raise
        message = "The server could not be started: {}.".format(error)
        raise AgentError("failed", message, "Its saved launch is kept.", launch["stdout"]) from error
    said = masking.text(tail.since(launch["stdout"], offset)[0], masking.secrets(launch["argv"], launch["environ"]))
    if started.exit is not None:
        launches.save(context.state, launch, launches.STOPPED)
        last = " | ".join(said.strip().splitlines()[-5:]) or "nothing"
        raise AgentError(
            "failed",
            "The server ended within a second of its start with exit status {}; its log says: {}".format(
                started.exit, last
            ),
            "Mend the cause, then run `surgeon restart`; its launch is kept.",
            launch["stdout"],
        )
    launch = launches.save(context.state, launch, launches.STARTED, pid=started.pid, start_ticks=started.start_ticks)
    return {
        "pid": started.pid,
        "start_ticks": started.start_ticks,
        "started": procfs.epoch(started.start_ticks),
        "port": launch["port"],
        "launch": launch["id"],
        "log": launch["stdout"],
        "log_offset": offset,
        "notes": launch["notes"],
    }


def _choose(state: str, wanted: Optional[str]) -> Dict[str, Any]:
    if wanted is not None:
        return launches.load(state, str(wanted))
    launch = launches.down_by_us(state)
    if launch is None:
        saved = launches.all_saved(state)
        launch = saved[0] if saved else None
    if launch is None:
        raise AgentError(
            "failed",
            "No server runs here, and no launch of one is saved on this node.",
            "Start the server by hand once; surgeon repeats what it sees running.",
            os.path.join(state, "launch"),
        )
    return launch


@contextlib.contextmanager
def _unbreakable(context: Context) -> Any:
    """Keep a dropped connection or a deadline from leaving the server down halfway."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with context.shield():
            yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def _alone(args: Dict[str, Any], context: Context) -> Any:
    """Let one agent at a time stop and start servers, and only for the client that holds the lease it names.

    An agent goes on when its connection is cut, so the next client's agent may come while it still works; and one
    that waited here for long may belong to a client whose lease another has taken since.

    Raises:
        AgentError: another agent is still at it at the deadline, or the lease is another's now (``locked``).
    """
    with state.locked(state.private(launches.folder(context.state)), context, "the servers of this node"):
        if args.get("site_id") is not None:
            site = state.site_of(args, context)
            with state.locked(site, context):
                lease.require(site, context)
        yield


@verb("stop")
def stop(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Stop a server: its own process tree and nothing else.

    Args:
        args: ``pid``, the launcher's; ``timeout_s`` for it to end by itself (60 unless said); ``site_id`` of the
            lease that must be held, if one must.
        context: its deadline cuts the timeout short.

    Returns:
        ``launch`` (the name it is saved under), ``port``, ``stopped`` and ``killed`` pids, ``log``, ``log_offset``,
        ``seconds``, ``notes``.
    """
    with _alone(args, context):
        server = processes.of_pid(int(args["pid"]))
        return _stop(server, float(args.get("timeout_s") or DEFAULT_TIMEOUT_S), context)


@verb("start")
def start(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Start a server from a saved launch.

    Args:
        args: ``launch``, the name it was saved under; None for the server that surgeon stopped. ``site_id`` as for
            ``stop``.
        context: holds the state directory.

    Returns:
        ``pid``, ``start_ticks``, ``started`` (epoch), ``port``, ``launch``, ``log``, ``log_offset``, ``notes``.
    """
    wanted = args.get("launch")
    with _alone(args, context), _unbreakable(context):
        return _start(_choose(context.state, str(wanted) if wanted is not None else None), context)


def _meant(pid: Optional[int], port: Optional[int]) -> Optional[Server]:
    """Return the server that a restart is about; None when it does not run.

    Raises:
        AgentError: no server has that pid, and no port says whose place it had.
    """
    if port is None:
        return processes.of_pid(pid) if pid is not None else None
    return next((one for one in processes.find()[0] if one.port == port), None)


@verb("restart")
def restart(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Stop a server and start it again as it was started; where none runs, start the one that was saved.

    Args:
        args: ``port``, where the server listens or will, whichever process that is by now; or ``pid``, for the
            launcher with just this pid; neither, for the server that surgeon stopped. ``launch`` for the saved
            launch to start where none runs. ``timeout_s`` for it to end by itself; ``site_id`` as for ``stop``.
        context: its deadline cuts the timeout short.

    Returns:
        As ``start``, with ``stopped`` and ``killed``.
    """
    pid, port, launch = args.get("pid"), args.get("port"), args.get("launch")
    if launch is None and port is not None:
        launch = str(int(port))
    with _alone(args, context), _unbreakable(context):
        server = _meant(int(pid) if pid is not None else None, int(port) if port is not None else None)
        ended: Dict[str, Any] = {"launch": launch, "stopped": [], "killed": []}
        if server is not None:
            ended = _stop(server, float(args.get("timeout_s") or DEFAULT_TIMEOUT_S), context)
        started = _start(_choose(context.state, ended["launch"]), context)
    return dict(started, stopped=ended["stopped"], killed=ended["killed"])
