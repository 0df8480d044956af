"""How a server was launched, kept on the node so that it can be started again even if everything else is gone."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set, Tuple

from . import identity, masking, procfs
from .boot import make_private, read_private, write_private
from .protocol import AgentError

if TYPE_CHECKING:
    from .processes import Server

# Where a saved launch stands. While it is not "started", the server is down because surgeon stopped it.
STOPPING, STOPPED, STARTED = "stopping", "stopped", "started"

_SIGNALS_KEPT = (1, 2, 3)  # HUP, INT, QUIT: what nohup and shells ignore for their children
_LIMITS = {
    "Max cpu time": "RLIMIT_CPU",
    "Max file size": "RLIMIT_FSIZE",
    "Max data size": "RLIMIT_DATA",
    "Max stack size": "RLIMIT_STACK",
    "Max core file size": "RLIMIT_CORE",
    "Max resident set": "RLIMIT_RSS",
    "Max processes": "RLIMIT_NPROC",
    "Max open files": "RLIMIT_NOFILE",
    "Max locked memory": "RLIMIT_MEMLOCK",
    "Max address space": "RLIMIT_AS",
    "Max pending signals": "RLIMIT_SIGPENDING",
    "Max msgqueue size": "RLIMIT_MSGQUEUE",
}


def _limits(pid: int) -> Dict[str, List[int]]:
    """Return the soft and hard resource limits of a process; -1 is no limit."""
    found = {}
    try:
        with open("/proc/{}/limits".format(pid), encoding="ascii") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in lines:
        for title, name in _LIMITS.items():
            if line.startswith(title):
                words = line[len(title) :].split()
                found[name] = [-1 if word == "unlimited" else int(word) for word in words[:2]]
    return found


def _ignored_signals(status: Dict[str, str]) -> List[int]:
    mask = int(status.get("SigIgn", "0"), 16)
    return [number for number in _SIGNALS_KEPT if mask & (1 << (number - 1))]


def _stream(pid: int, fd: int) -> str:
    """Say in words where a descriptor that is no regular file goes."""
    target = procfs.link(pid, "fd/{}".format(fd)) or "nowhere"
    if target.startswith(("/dev/pts", "/dev/tty")):
        return "a terminal ({})".format(target)
    return "a pipe" if target.startswith("pipe:") else target


def _affinity(pid: int) -> List[int]:
    try:
        return sorted(os.sched_getaffinity(pid))
    except OSError:
        return []


def _niceness(pid: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:
        return 0


def _oom_score(pid: int) -> Optional[str]:
    try:
        with open("/proc/{}/oom_score_adj".format(pid), encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def of_server(server: Server, state: str) -> Dict[str, Any]:
    """Return all that it takes to start a server as it was started.

    Args:
        server: a running server.
        state: surgeon's state directory, for a log where the server had none.

    Raises:
        AgentError: its command line, environment or program cannot be read (``does-not-fit``).
    """
    process = server.process
    where = "pid {}".format(process.pid)
    if server.program is None or server.environ is None or server.cwd is None or server.interpreter is None:
        missing = "command line" if server.program is None else "environment or working directory"
        raise AgentError(
            "does-not-fit",
            "The {} of the server's launcher cannot be read, so it could not be started again.".format(missing),
            "Work as the user who started it ({}), or as root.".format(process.uid),
            where,
        )
    status = procfs.status(process.pid)
    log = procfs.regular_file(process.pid, 1)
    notes = []
    own_log = None
    if log is None or log.startswith(os.path.join(state, "logs") + "/"):
        own_log = os.path.join(state, "logs", "server-{}.log".format(server.port))
    if log is None:
        log = str(own_log)
        notes.append("Its output went to {}; from now on it goes to {}.".format(_stream(process.pid, 1), log))
    return {
        "id": str(server.port),
        "port": server.port,
        "pid": process.pid,
        "start_ticks": process.start_ticks,
        "saved": time.time(),
        "argv": list(process.argv),
        "executable": server.interpreter,
        "environ": server.environ,
        "cwd": server.cwd,
        "uid": process.uid,
        "gid": identity.gid(process.pid),
        "groups": identity.groups(process.pid),
        "umask": int(status.get("Umask", "0022"), 8),
        "limits": _limits(process.pid),
        "ignored": _ignored_signals(status),
        "affinity": _affinity(process.pid),
        "niceness": _niceness(process.pid),
        "oom_score": _oom_score(process.pid),
        "stdout": log,
        "own_log": own_log,
        "stderr": procfs.regular_file(process.pid, 2) or log,
        "notes": notes,
    }


def folder(state: str) -> str:
    """Return where launches are saved."""
    return os.path.join(state, "launch")


def _path(state: str, launch: str) -> str:
    if not launch.isdigit():
        raise AgentError("usage", "A saved launch is named by its port, found {!r}.".format(launch))
    return os.path.join(folder(state), launch + ".json")


def save(state: str, launch: Dict[str, Any], phase: str, **more: Any) -> Dict[str, Any]:
    """Keep a launch with the phase it is in, readable by surgeon's user only; return it as kept."""
    kept = dict(launch, phase=phase, changed=time.time(), **more)
    make_private(folder(state))
    # JSON escapes what of an environment is no UTF-8, so that every byte comes back.
    write_private(_path(state, kept["id"]), json.dumps(kept).encode("ascii"))
    return kept


def load(state: str, launch: str) -> Dict[str, Any]:
    """Return a saved launch.

    Raises:
        AgentError: there is none of that name, or it cannot be read.
    """
    path = _path(state, launch)
    try:
        kept = json.loads(read_private(path).decode("ascii"))
    except (OSError, ValueError) as error:
        raise AgentError(
            "failed",
            "There is no saved launch for port {} on this node ({}).".format(launch, error),
            "Start the server by hand, as it was started before.",
            path,
        ) from error
    return dict(kept)


def all_saved(state: str) -> List[Dict[str, Any]]:
    """Return every saved launch, the one that changed last first; an unreadable one is left out."""
    found = []
    try:
        names = os.listdir(folder(state))
    except OSError:
        return []
    for name in names:
        if name.endswith(".json") and name[:-5].isdigit():
            try:
                found.append(load(state, name[:-5]))
            except AgentError:
                continue
    return sorted(found, key=lambda one: -float(one.get("changed") or 0))


def _is_down(launch: Dict[str, Any]) -> bool:
    return launch["phase"] == STOPPED or (
        launch["phase"] == STOPPING and not procfs.alive((launch["pid"], launch["start_ticks"]))
    )


def down_by_us(state: str) -> Optional[Dict[str, Any]]:
    """Return the launch of a server that is down because surgeon stopped it; None when there is none."""
    return next((one for one in all_saved(state) if _is_down(one)), None)


def of_port(state: str, port: Optional[int]) -> Optional[Dict[str, Any]]:
    """Return the saved launch for a port; for any port (None) the one that is down, else the last. None without one."""
    saved = [one for one in all_saved(state) if port in (None, one["port"])]
    return next((one for one in saved if _is_down(one)), saved[0] if saved else None)


def secrets(state: str, port: int) -> Set[str]:
    """Return the values that must not leave the node in the log of a server that was launched for a port."""
    for launch in all_saved(state):
        if launch["port"] == port:
            return masking.secrets(launch["argv"], launch["environ"])
    return set()


def summary(launch: Dict[str, Any]) -> Dict[str, Any]:
    """Return what may leave the node of a saved launch."""
    key: Tuple[int, int] = (launch["pid"], launch["start_ticks"])
    return {
        "id": launch["id"],
        "port": launch["port"],
        "phase": launch["phase"],
        "pid": launch["pid"],
        "alive": procfs.alive(key),
        "saved": launch["saved"],
        "changed": launch["changed"],
        "argv": masking.argv(launch["argv"]),
        "cwd": launch["cwd"],
        "log": launch["stdout"],
        "notes": launch["notes"],
    }
