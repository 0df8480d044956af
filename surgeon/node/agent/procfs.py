"""What /proc says about processes, their files and the ports they listen on."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# Which words of the line after the command's name in /proc/PID/stat hold what (man 5 proc, minus two).
_STATE, _PPID, _PGID, _SID, _START = 0, 1, 2, 3, 19

# The state of a listening socket in /proc/net/tcp.
_LISTEN = "0A"

_KTHREADD = 2
_IPV4_BYTES = 4

DELETED = " (deleted)"


class Process(NamedTuple):
    """One process, as it was when it was looked at.

    Attributes:
        pid: its id, which the kernel may give to another process later.
        ppid: its parent.
        pgid: its process group.
        sid: its session.
        start_ticks: when it started, in clock ticks after boot. With the pid it names a process for good.
        state: the kernel's letter; Z is a zombie.
        comm: the name of its main thread, at most 15 characters.
        uid: the effective user id.
        argv: its command line; a process may have overwritten it.
    """

    pid: int
    ppid: int
    pgid: int
    sid: int
    start_ticks: int
    state: str
    comm: str
    uid: int
    argv: Tuple[str, ...]

    @property
    def key(self) -> Tuple[int, int]:
        """Return what tells this process from a later one with the same pid."""
        return self.pid, self.start_ticks

    @property
    def title(self) -> str:
        """Return the command line as people see it in ``ps``."""
        return " ".join(self.argv) if self.argv else "[{}]".format(self.comm)

    @property
    def ending(self) -> bool:
        """Tell whether it has run its last: a zombie, or one whose memory is gone and whose files are not closed yet.

        The kernel frees a process's memory, its command line with it, before it closes its sockets and devices
        (do_exit: exit_mm, then exit_files); the more memory it has, the longer that takes: 0.4 s for 1 GiB of 4 KiB
        pages where it was measured, on two busy cores.
        """
        return self.state in "ZX" or not self.argv


class Listener(NamedTuple):
    """One listening TCP socket.

    Attributes:
        address: the local address as text.
        port: the local port.
        inode: the socket's inode, which links it to the processes that hold it.
    """

    address: str
    port: int
    inode: str


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def split_nul(data: bytes) -> List[str]:
    """Split a NUL-separated list such as a command line, keeping bytes that are no UTF-8."""
    return [os.fsdecode(part) for part in data.split(b"\0")]


def process(pid: int) -> Optional[Process]:
    """Look at one process; None when there is none, or when it went away meanwhile."""
    folder = "/proc/{}/".format(pid)
    try:
        before, _, after = _bytes(folder + "stat").rpartition(b")")
        words = after.split()
        cmdline = _bytes(folder + "cmdline")
        uid = os.stat(folder).st_uid
    except OSError:
        return None
    # A process that overwrote its title leaves padding behind it; any other's empty last argument is one.
    padded = b"::" in cmdline.partition(b"\0")[0]
    cmdline = cmdline.rstrip(b"\0") if padded else cmdline[:-1]
    argv = split_nul(cmdline) if cmdline else []
    return Process(
        pid=pid,
        ppid=int(words[_PPID]),
        pgid=int(words[_PGID]),
        sid=int(words[_SID]),
        start_ticks=int(words[_START]),
        state=words[_STATE].decode("ascii"),
        comm=before.partition(b"(")[2].decode("utf-8", "replace"),
        uid=uid,
        argv=tuple(argv),
    )


def scan() -> Dict[int, Process]:
    """Look at every process of the machine (of this pid namespace).

    Kernel threads are left out, and so is a process whose memory is gone and that is no zombie yet.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            one = process(int(name))
            if one is not None and (one.argv or one.state == "Z") and one.ppid != _KTHREADD:
                found[one.pid] = one
    return found


def alive(key: Tuple[int, int]) -> bool:
    """Tell whether that very process still runs; a zombie does not."""
    now = process(key[0])
    return now is not None and now.start_ticks == key[1] and now.state not in "ZX"


def children(processes: Dict[int, Process]) -> Dict[int, List[int]]:
    """Return every parent's children."""
    table: Dict[int, List[int]] = {}
    for one in processes.values():
        table.setdefault(one.ppid, []).append(one.pid)
    return table


def descendants(roots: Iterable[int], table: Dict[int, List[int]]) -> Set[int]:
    """Return the roots and everything below them."""
    found: Set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(table.get(pid, ()))
    return found


def environ(pid: int) -> Optional[Dict[str, str]]:
    """Return the environment a process was started with; None when it may not be read.

    A process that called setproctitle has overwritten it; sglang's launcher never does, its children do.
    """
    try:
        data = _bytes("/proc/{}/environ".format(pid))
    except OSError:
        return None
    pairs = (item.partition("=") for item in split_nul(data) if item)
    return {name: value for name, separator, value in pairs if separator and name}


def link(pid: int, name: str) -> Optional[str]:
    """Return where ``cwd``, ``exe``, ``root`` or ``fd/N`` points; None when it may not be read."""
    try:
        return os.readlink("/proc/{}/{}".format(pid, name))
    except OSError:
        return None


def undeleted(path: str) -> str:
    """Drop the kernel's remark that a file is gone."""
    return path[: -len(DELETED)] if path.endswith(DELETED) else path  # noqa: FURB188 - removesuffix needs 3.9


def regular_file(pid: int, fd: int) -> Optional[str]:
    """Return the path of a descriptor when it is a regular file (it may be deleted by now)."""
    path = link(pid, "fd/{}".format(fd))
    if path is None or not path.startswith("/") or path.startswith(("/dev/", "/proc/")):
        return None
    return undeleted(path)


def status(pid: int) -> Dict[str, str]:
    """Return the fields of /proc/PID/status; empty when the process is gone."""
    try:
        text = _bytes("/proc/{}/status".format(pid)).decode("utf-8", "replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}


def epoch(start_ticks: int) -> float:
    """Turn a start time in ticks after boot into seconds since the epoch, good to a tick.

    /proc/stat's btime has whole seconds only: a server that was restarted right after a write would look older than it.
    """
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return round(boot + start_ticks / TICKS_PER_SECOND, 2)


def _address(text: str) -> str:
    words = bytes.fromhex(text)
    native = b"".join(struct.pack("=I", word) for word in struct.unpack(">{}I".format(len(words) // 4), words))
    return socket.inet_ntop(socket.AF_INET if len(words) == _IPV4_BYTES else socket.AF_INET6, native)


def listeners(port: Optional[int] = None) -> List[Listener]:
    """Return the listening TCP sockets of this network namespace, or those of one port."""
    found = []
    for table in ("tcp", "tcp6"):
        lines: List[str] = []
        with contextlib.suppress(OSError):
            lines = _bytes("/proc/net/" + table).decode("ascii").splitlines()[1:]
        for line in lines:
            words = line.split()
            address, _, hexport = words[1].rpartition(":")
            if words[3] == _LISTEN and (port is None or int(hexport, 16) == port):
                found.append(Listener(_address(address), int(hexport, 16), words[9]))
    return found


def sockets(pids: Iterable[int]) -> Dict[str, int]:
    """Return which of these processes holds which socket: inode to pid."""
    found: Dict[str, int] = {}
    for pid in pids:
        folder = "/proc/{}/fd".format(pid)
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError):
                target = os.readlink(folder + "/" + name)
                if target.startswith("socket:["):
                    found.setdefault(target[8:-1], pid)
    return found


def holder(port: int) -> Optional[Process]:
    """Return the process that listens on a port; None when nobody does, or when it cannot be seen."""
    inodes = {one.inode for one in listeners(port)}
    if not inodes:
        return None
    everybody = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for inode, pid in sockets(everybody).items():
        if inode in inodes:
            return process(pid)
    return None
