"""Finds out who would start a server again behind our back, or take its whole container down with it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Dict, Optional

from . import procfs

if TYPE_CHECKING:
    from .procfs import Process

# Programs that restart what they started. A shell, nohup, tmux, screen or sshd does not.
_RESTARTERS = {
    "supervisord": "supervisorctl restart",
    "runsv": "sv restart",
    "s6-supervise": "s6-svc -r",
    "circusd": "circusctl restart",
    "monit": "monit restart",
    "pm2": "pm2 restart",
    "slurmstepd": "scontrol requeue",
    "raylet": "ray's own commands",
}
_SHELLS = {"sh", "bash", "dash", "zsh", "ash", "fish"}
_INITS = {"tini", "docker-init", "dumb-init", "catatonit", "s6-svscan", "podman-init"}

_CONTAINER = re.compile(r"(docker|libpod|cri-containerd|crio|kubepods|containerd|lxc)\S*?[-/:]([0-9a-f]{12,64})")
_UNIT = re.compile(r"/([^/]+\.service)(?:/[^/]*)?$")


def _cgroup(pid: int) -> str:
    try:
        with open("/proc/{}/cgroup".format(pid), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def supervisor(launcher: Process, processes: Dict[int, Process], environ: Dict[str, str]) -> Optional[Dict[str, Any]]:
    """Return who supervises a server: ``kind``, ``unit`` and ``advice``; None when nobody does.

    A launcher that was started by hand (shell, nohup, tmux, ssh) has no supervisor, even where the session itself
    belongs to a systemd unit.
    """
    return (
        _other_namespace(launcher)
        or _container_init(launcher, processes)
        or _systemd(launcher, environ)
        or _ancestor(launcher, processes)
    )


def _other_namespace(launcher: Process) -> Optional[Dict[str, Any]]:
    theirs, ours = procfs.link(launcher.pid, "ns/mnt"), procfs.link(os.getpid(), "ns/mnt")
    if theirs is None or ours is None or theirs == ours:
        return None
    match = _CONTAINER.search(_cgroup(launcher.pid))
    kind = {"libpod": "podman"}.get(match.group(1), match.group(1)) if match else "container"
    unit = match.group(2)[:12] if match else ""
    return {
        "kind": kind,
        "unit": unit,
        "advice": "Its files are inside a container: connect to the container itself, or restart it with "
        "its own command ({} restart {}).".format(kind, unit or "NAME"),
    }


def _container_init(launcher: Process, processes: Dict[int, Process]) -> Optional[Dict[str, Any]]:
    advice = "The container ends with it: restart the container with its own command."
    if launcher.pid == 1:
        return {"kind": "container-init", "unit": "pid 1", "advice": advice}
    init = processes.get(1)
    if launcher.ppid != 1 or init is None or init.comm not in _INITS:
        return None
    # An init that was given this command line; what `docker exec` started is its child too, once orphaned.
    if tuple(init.argv[-len(launcher.argv) :]) == launcher.argv or init.argv[-1:] == launcher.argv[-1:]:
        return {"kind": "container-init", "unit": init.comm, "advice": advice}
    return None


def _systemd(launcher: Process, environ: Dict[str, str]) -> Optional[Dict[str, Any]]:
    # systemd gives this variable to what it runs as a service; sshd and login shells do not pass it on.
    if "INVOCATION_ID" not in environ:
        return None
    for line in _cgroup(launcher.pid).splitlines():
        match = _UNIT.search(line.split(":", 2)[-1])
        if match and not match.group(1).startswith("user@"):
            user = " --user" if "/user@" in line else ""
            command = "systemctl{} restart {}".format(user, match.group(1))
            return {
                "kind": "systemd",
                "unit": match.group(1),
                "advice": "systemd runs it as {0}: restart it with `{1}`.".format(match.group(1), command),
            }
    return None


def _ancestor(launcher: Process, processes: Dict[int, Process]) -> Optional[Dict[str, Any]]:
    parent = processes.get(launcher.ppid)
    while parent is not None and parent.comm in _SHELLS:
        parent = processes.get(parent.ppid)
    if parent is None:
        return None
    names = {parent.comm, *(os.path.basename(word) for word in parent.argv[:2])}
    for name in sorted(names & set(_RESTARTERS)):
        return {
            "kind": name,
            "unit": "pid {}".format(parent.pid),
            "advice": "{} started it and would start it again: use `{}`.".format(name, _RESTARTERS[name]),
        }
    return None
