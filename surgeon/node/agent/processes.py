"""Finds the sglang servers of a node: the launcher, the processes that belong to it, the port, the log."""

from __future__ import annotations

import pwd
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple

from . import cmdline, masking, procfs
from .interpreter import resolve
from .protocol import AgentError, Context, verb
from .supervisors import supervisor

if TYPE_CHECKING:
    from .cmdline import Program
    from .procfs import Process

# setproctitle gives sglang's children these titles (scheduler.py, detokenizer_manager.py and others of 0.4.6-0.5.23);
# the launcher keeps its own command line.
CHILD_TITLES = (
    "sglang::scheduler",
    "sglang::detokenizer",
    "sglang::data_parallel_controller",
    "sglang::tokenizer_worker",
)
WORKER_TITLE = "sglang::scheduler"


class Server(NamedTuple):
    """One sglang server, unmasked; ``describe`` makes of it what may leave the node.

    Attributes:
        process: the launcher.
        program: its command line taken apart; None when it was overwritten.
        environ: the environment it was started with; None when it may not be read.
        cwd: its working directory.
        interpreter: the Python it was started with, as a path that keeps its virtual environment.
        tree: the launcher and everything that belongs to it.
        port: where it listens, or will.
        host: the address that was asked for.
        listening: its own listening sockets on that port.
        supervised: who would start it again, see ``supervisors``.
    """

    process: Process
    program: Optional[Program]
    environ: Optional[Dict[str, str]]
    cwd: Optional[str]
    interpreter: Optional[str]
    tree: Tuple[Process, ...]
    port: int
    host: str
    listening: Tuple[procfs.Listener, ...]
    supervised: Optional[Dict[str, Any]]

    @property
    def args(self) -> Tuple[str, ...]:
        """Return the server's own arguments."""
        return self.program.args if self.program is not None else ()

    @property
    def log(self) -> Optional[str]:
        """Return the regular file that standard output goes to."""
        return procfs.regular_file(self.process.pid, 1)

    @property
    def api_key(self) -> Optional[str]:
        """Return the key that its endpoints ask for; it never leaves the node."""
        return cmdline.option(self.args, "--api-key") or None

    @property
    def workers(self) -> List[Process]:
        """Return its schedulers: one per rank."""
        return [one for one in self.tree if is_worker(one)]

    def secrets(self) -> Set[str]:
        """Return the values that must not leave the node."""
        return masking.secrets(self.process.argv, self.environ or {})


def is_worker(process: Process) -> bool:
    """Tell whether a process is a scheduler: the process that runs the model."""
    return process.title.startswith(WORKER_TITLE)


def _launch(process: Process) -> Optional[Program]:
    if process.state == "Z" or not process.argv or process.title.startswith(CHILD_TITLES):
        return None
    exe = procfs.link(process.pid, "exe") or ""
    if not cmdline.is_python(process.argv[0]) and not cmdline.is_python(procfs.undeleted(exe)):
        return None
    what = cmdline.program(process.argv)
    return what if what is not None and cmdline.serving(what) else None


def _has_ancestor(process: Process, launchers: Dict[int, Optional[Program]], all_: Dict[int, Process]) -> bool:
    seen = {process.pid}
    parent = all_.get(process.ppid)
    while parent is not None and parent.pid not in seen:
        if parent.pid in launchers:
            return True
        seen.add(parent.pid)
        parent = all_.get(parent.ppid)
    return False


def _employer(worker: Process, all_: Dict[int, Process]) -> Optional[Process]:
    """Return the Python program that owns a scheduler: the first ancestor that is none of sglang's children."""
    parent = all_.get(worker.ppid)
    while parent is not None and parent.title.startswith(CHILD_TITLES):
        parent = all_.get(parent.ppid)
    if parent is None or parent.pid == 1:
        return None
    exe = procfs.undeleted(procfs.link(parent.pid, "exe") or "")
    # One that is ending has neither.
    return parent if cmdline.is_python(exe or "".join(parent.argv[:1])) else None


def _families(
    all_: Dict[int, Process],
) -> Tuple[Dict[int, Tuple[Optional[Program], FrozenSet[int]]], List[Process]]:
    """Return each server's program and pids by its launcher's pid, and the workers that belong to nobody."""
    below = procfs.children(all_)
    found: Dict[int, Optional[Program]] = {}
    for process in all_.values():
        program = _launch(process)
        if program is not None:
            found[process.pid] = program
    # A child that was forked still shows its launcher's command line.
    launchers = {pid: what for pid, what in found.items() if not _has_ancestor(all_[pid], found, all_)}
    owned = procfs.descendants(launchers, below)
    workers = [one for one in all_.values() if is_worker(one) and one.state != "Z"]
    for worker in workers:
        employer = _employer(worker, all_) if worker.pid not in owned else None
        if employer is not None:
            launchers.setdefault(employer.pid, None)
    trees = {pid: procfs.descendants([pid], below) for pid in launchers}
    owned = set().union(*trees.values())
    orphans = [one for one in all_.values() if one.title.startswith(CHILD_TITLES) and one.pid not in owned]
    lost = []
    for orphan in orphans:
        # A session may hold several servers (one script that starts two): then nobody can say whose it is.
        parents = [pid for pid in trees if _same_session(all_[pid], orphan)]
        if len(parents) == 1:
            trees[parents[0]] |= procfs.descendants([orphan.pid], below)
        elif orphan.state != "Z":
            lost.append(orphan)
    return {pid: (what, frozenset(trees[pid])) for pid, what in launchers.items()}, lost


def _same_session(launcher: Process, orphan: Process) -> bool:
    related = orphan.sid == launcher.sid or orphan.pgid == launcher.pgid
    return related and orphan.start_ticks >= launcher.start_ticks and orphan.uid == launcher.uid


def _listening(launcher: int, tree: List[Process], asked: int) -> Tuple[int, Tuple[procfs.Listener, ...]]:
    """Return the port that a server answers on, and its sockets there.

    sglang takes another port when the one asked for is in use; then the launcher's only port is the one.
    """
    everything = procfs.listeners()
    # The launcher first: a socket that it shares with its children is its own.
    held = procfs.sockets([launcher, *(one.pid for one in tree)])
    ours = [one for one in everything if one.inode in held]
    ports = {one.port for one in ours}
    own = {one.port for one in ours if held[one.inode] == launcher}
    port = asked if asked in ports or len(own) != 1 else own.pop()
    return port, tuple(one for one in ours if one.port == port)


def _server(process: Process, program: Optional[Program], tree: List[Process], all_: Dict[int, Process]) -> Server:
    environ = procfs.environ(process.pid)
    cwd = procfs.link(process.pid, "cwd")
    args = program.args if program is not None else ()
    port, listening = _listening(process.pid, tree, cmdline.port(args))
    supervised = supervisor(process, all_, environ or {})
    if program is None and supervised is None:
        supervised = {
            "kind": "program",
            "unit": "pid {}".format(process.pid),
            "advice": "Its schedulers belong to another program than sglang's launcher: restart that program.",
        }
    return Server(
        process=process,
        program=program,
        environ=environ,
        cwd=procfs.undeleted(cwd) if cwd else None,
        interpreter=resolve(process, environ or {}, cwd),
        tree=tuple(sorted(tree)),
        port=port,
        host=cmdline.option(args, "--host") or "127.0.0.1",
        listening=listening,
        supervised=supervised,
    )


def find() -> Tuple[List[Server], List[Process]]:
    """Return the servers of this node, oldest first, and the orphaned workers that belong to none of them."""
    all_ = procfs.scan()
    families, lost = _families(all_)
    found = [
        _server(all_[pid], program, [all_[one] for one in pids if all_[one].state != "Z"], all_)
        for pid, (program, pids) in families.items()
    ]
    return sorted(found, key=lambda one: one.process.start_ticks), lost


def of_pid(pid: int) -> Server:
    """Return the server whose launcher has this pid.

    Raises:
        AgentError: no such server (``failed``).
    """
    found, _ = find()
    for server in found:
        if server.process.pid == pid:
            return server
    pids = ", ".join(str(one.process.pid) for one in found) or "none"
    raise AgentError(
        "failed",
        "Expected pid {} to be the launcher of a running sglang server; the launchers here are: {}.".format(pid, pids),
        "Ask for the servers again; it may have ended or been restarted.",
        "pid {}".format(pid),
    )


def stranger_on(port: int) -> Optional[str]:
    """Say who listens on a port; None when nobody does."""
    if not procfs.listeners(port):
        return None
    return named(procfs.holder(port))


def named(holder: Optional[Process]) -> str:
    """Name the process that holds something, its secrets masked; None is one that cannot be seen."""
    if holder is None:
        return "a process that this user cannot see"
    if holder.ending:
        return "pid {} ({}, which has not quite ended)".format(holder.pid, holder.title)
    return "pid {} ({})".format(holder.pid, " ".join(masking.argv(holder.argv))[:200])


def user_name(uid: int) -> str:
    """Return a user's name, or the number of one that has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def home(uid: int) -> str:
    """Return a user's home directory; the root directory for one that has none here."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return "/"


def brief(process: Process) -> Dict[str, Any]:
    """Describe a worker."""
    return {
        "pid": process.pid,
        "title": process.argv[0] if process.argv else process.title,
        "started": procfs.epoch(process.start_ticks),
        "start_ticks": process.start_ticks,
    }


def describe(server: Server) -> Dict[str, Any]:
    """Return what may leave the node of a server: secrets masked, the environment cut to what matters."""
    process = server.process
    return {
        "pid": process.pid,
        "ppid": process.ppid,
        "start_ticks": process.start_ticks,
        "started": procfs.epoch(process.start_ticks),
        "uid": process.uid,
        "user": user_name(process.uid),
        "argv": masking.argv(process.argv),
        "cwd": server.cwd,
        "interpreter": server.interpreter,
        "port": server.port,
        "host": server.host,
        "listening": bool(server.listening),
        "model_path": cmdline.option(server.args, "--model-path", "--model"),
        "log": server.log,
        "workers": [brief(one) for one in server.workers],
        "tree": [one.pid for one in server.tree],
        "env": masking.environ(server.environ or {}),
        "env_readable": server.environ is not None,
        "supervised": server.supervised,
    }


@verb("processes")
def processes(_args: Dict[str, Any], _context: Context) -> Dict[str, Any]:
    """Answer ``processes``: the servers, and the workers that a dead server left behind."""
    found, lost = find()
    return {"servers": [describe(one) for one in found], "orphans": [brief(one) for one in lost]}
