"""Starts a program as it was started before: same words, environment, folder, user, limits; free of our session."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from typing import Any, Dict, NamedTuple, Optional

from . import procfs
from .protocol import AgentError

# How long a program is watched for an immediate end. After that its exit status is init's to know.
WATCH_S = 1.0

_POLL_S = 0.02


class Started(NamedTuple):
    """What became of a start.

    Attributes:
        pid: the program's process.
        start_ticks: when it started, in clock ticks after boot.
        exit: its exit status if it ended within a second, negative for a signal; None while it runs.
    """

    pid: int
    start_ticks: int
    exit: Optional[int]


def _say(pipe: int, **words: Any) -> None:
    os.write(pipe, json.dumps(words).encode("ascii") + b"\n")


def _limit(limits: Dict[str, Any]) -> None:
    for name, (soft, hard) in limits.items():
        # A hard limit above our own needs root; then as much as is allowed.
        with contextlib.suppress(ValueError, OSError):
            kind = getattr(resource, name)
            ceiling = resource.getrlimit(kind)[1]
            if hard == resource.RLIM_INFINITY and ceiling != hard and os.geteuid() != 0:
                hard = ceiling  # noqa: PLW2901 - cut to what this user may have
            resource.setrlimit(kind, (soft, hard))


def _become(launch: Dict[str, Any]) -> None:
    """Turn the forked process into what ``launch`` describes, all but the program itself."""
    for number in range(1, signal.NSIG):
        # Python ignores SIGPIPE for itself; the program is to have what it had.
        wanted = signal.SIG_IGN if number in launch["ignored"] else signal.SIG_DFL
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(launch["umask"])
    _limit(launch["limits"])
    if launch["affinity"]:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, launch["affinity"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, launch["niceness"])
    if launch["oom_score"] is not None:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(launch["oom_score"])
    if os.geteuid() == 0 and launch["uid"] != 0:
        os.setgroups(launch["groups"])
        os.setgid(launch["gid"])
        os.setuid(launch["uid"])
    os.chdir(launch["cwd"])


def _open_log(path: str, launch: Dict[str, Any]) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666 & ~launch["umask"])


def _streams(launch: Dict[str, Any], private: Optional[int]) -> Dict[int, int]:
    """Open what the program reads and writes, as its own user: a log's folder is that user's to arrange."""
    streams = {0: os.open(os.devnull, os.O_RDONLY)}
    for number, name in ((1, "stdout"), (2, "stderr")):
        if private is not None and launch[name] == launch["own_log"]:
            streams[number] = private
        else:
            streams[number] = _open_log(launch[name], launch)
    return streams


def _program(launch: Dict[str, Any], private: Optional[int], pipe: int) -> None:
    """Run in the grandchild; never returns."""
    try:
        _become(launch)
        for target, source in _streams(launch, private).items():
            os.dup2(source, target)
        # The pipe closes on exec; nothing else of ours is to live on in the server.
        os.set_inheritable(pipe, False)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in {0, 1, 2, pipe}:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.execve(launch["executable"], launch["argv"], launch["environ"])  # noqa: S606 - no shell is wanted
    except Exception as error:  # noqa: BLE001 - a forked process has nobody else to tell
        _say(pipe, error="{}: {}".format(type(error).__name__, error))
    finally:
        os._exit(127)


def _keeper(launch: Dict[str, Any], private: Optional[int], pipe: int) -> None:
    """Run in the child: start the program in a new session, watch it for a second, leave it to init."""
    try:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            _program(launch, private, pipe)
        process = procfs.process(pid)
        _say(pipe, pid=pid, start_ticks=process.start_ticks if process is not None else 0)
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                _say(pipe, exit=code)
                break
            time.sleep(_POLL_S)
    except Exception as error:  # noqa: BLE001 - a forked process has nobody else to tell
        _say(pipe, error="{}: {}".format(type(error).__name__, error))
    finally:
        os._exit(0)


def start(launch: Dict[str, Any]) -> Started:
    """Start what ``launch`` describes and watch it for a second.

    Args:
        launch: as ``launches.of_server`` returns it.

    Raises:
        AgentError: it could not be started.
    """
    private = None
    if launch["own_log"] is not None:
        # It lies in surgeon's private folder, where only the agent's user can open it.
        private = _open_log(launch["own_log"], launch)
    reading, writing = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        _keeper(launch, private, writing)
    os.close(writing)
    if private is not None:
        os.close(private)
    said: Dict[str, Any] = {}
    with os.fdopen(reading, "rb") as pipe:
        for line in pipe:
            said.update(json.loads(line.decode("ascii")))
    os.waitpid(keeper, 0)
    if "error" in said or "pid" not in said:
        raise AgentError(
            "failed",
            "The server could not be started: {}.".format(said.get("error", "its starter died")),
            "Its saved launch is kept; mend the cause and run `surgeon restart`.",
            launch["executable"],
        )
    return Started(said["pid"], said["start_ticks"], said.get("exit"))
