"""Runs programs as a server's own user, so that root leaves no files of root's in that user's folders."""

from __future__ import annotations

import os
import sys
from typing import List, Sequence

from . import procfs

# Runs in a fresh interpreter, because changing the user between fork and exec is not safe beside threads.
_DEMOTE = (
    "import os,sys;u,g,s=sys.argv[1:4];os.setgroups([int(i) for i in s.split(',') if i]);os.setgid(int(g));"
    "os.setuid(int(u));os.execvp(sys.argv[4],sys.argv[4:])"
)


def groups(pid: int) -> List[int]:
    """Return the supplementary groups of a process."""
    return [int(word) for word in procfs.status(pid).get("Groups", "").split()]


def gid(pid: int) -> int:
    """Return the effective group of a process, or the agent's own when it has gone."""
    words = procfs.status(pid).get("Gid", "").split()
    return int(words[1]) if len(words) > 1 else os.getegid()


def foreign(uid: int) -> bool:
    """Tell whether the agent is root and this user is another, so that it can and should step down."""
    return os.geteuid() == 0 and uid != 0


def as_owner(argv: Sequence[str], pid: int, uid: int) -> List[str]:
    """Return a command line that runs ``argv`` as the owner of process ``pid``, when the agent is root and it is not.

    Args:
        argv: the program; its first word is a path.
        pid: a process of that user, for its groups.
        uid: that user.
    """
    if not foreign(uid) or not sys.executable:
        return list(argv)
    belongs = ",".join(str(one) for one in groups(pid))
    return [sys.executable, "-I", "-S", "-c", _DEMOTE, str(uid), str(gid(pid)), belongs, *argv]
