"""Starts the agent on a node: picks a state directory nobody else can write, runs the agent kept there by its hash.

The client sends this file's text as the program of ``python3 -c``, so it stands alone; inside the agent the same
functions guard the other files of the state directory.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import json
import os
import pwd
import stat
import sys
from typing import Dict, Tuple

SYSTEM_STATE = "/var/lib/surgeon"
USER_STATE = "~/.local/state/surgeon"

# What the client looks for in standard output, whatever a shell's start-up files printed before it.
FRAME = "surgeon-answer"


class BootError(Exception):
    """The agent cannot be started here; ``error`` is what the client is told."""

    def __init__(self, code: str, message: str, advice: str = "", where: str = "") -> None:
        """Take the same four fields as an ``AgentError``."""
        super().__init__(message)
        self.error = {"code": code, "message": message, "advice": advice, "where": where}


def _private_group(gid: int, uid: int) -> bool:
    """Tell whether a group holds its user alone, as distributions set up for a umask of 002."""
    try:
        name = pwd.getpwuid(uid).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _loose(status: os.stat_result) -> bool:
    """Tell whether somebody else than its owner (or root) can rename what is in a directory."""
    if status.st_mode & stat.S_ISVTX or not status.st_mode & 0o022:
        return False
    return bool(status.st_mode & 0o002) or not _private_group(status.st_gid, status.st_uid)


def check_private(path: str) -> None:
    """Make sure that only this user (and root) decides what ``path`` holds, and that it is 0700.

    Raises:
        BootError: it is a link, or no directory, or somebody else's, or others can write it or a folder above it.
    """
    advice = "Name another state directory (state_dir), or take write permission on it from others."
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise BootError("does-not-fit", "The state directory {} is {}.".format(path, kind), advice, path)
    if status.st_uid != os.geteuid():
        owner = "uid {}".format(status.st_uid)
        raise BootError("does-not-fit", "The state directory {} belongs to {}.".format(path, owner), advice, path)
    if status.st_mode & 0o022:
        message = "Others can write the state directory {} (mode {:04o}, expected 0700).".format(
            path, stat.S_IMODE(status.st_mode)
        )
        raise BootError("does-not-fit", message, advice, path)
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)
    above = os.path.realpath(os.path.dirname(path))
    while True:
        status = os.lstat(above)
        if status.st_uid not in (0, os.geteuid()) or _loose(status):
            message = "Others can replace the state directory {}: they can write {} (mode {:04o}).".format(
                path, above, stat.S_IMODE(status.st_mode)
            )
            raise BootError("does-not-fit", message, advice, above)
        if above == os.path.dirname(above):
            return
        above = os.path.dirname(above)


def make_private(path: str) -> None:
    """Make a directory with mode 0700, and those above it, unless it is there; then check it.

    Raises:
        OSError: it cannot be made.
        BootError: see ``check_private``.
    """
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):
            os.makedirs(path, 0o700)
    check_private(path)


def choose_state(requested: str) -> str:
    """Return the state directory, made if need be.

    Args:
        requested: the directory to use; empty for the first writable of the two usual ones.

    Raises:
        BootError: none can be written, or the one to use is not private.
    """
    usual = [SYSTEM_STATE, os.path.expanduser(USER_STATE)]
    candidates = [os.path.expanduser(requested)] if requested else usual
    reasons = []
    for path in candidates:
        if not os.path.isabs(path):
            message = "The state directory must be an absolute path, found {!r}.".format(path)
            raise BootError("usage", message, "Set state_dir to an absolute path.", path)
        try:
            if os.path.isdir(path) and not os.access(path, os.W_OK | os.X_OK):
                reasons.append("{}: {}".format(path, os.strerror(errno.EACCES)))
                continue
            make_private(path)
        except OSError as error:
            reasons.append("{}: {}".format(path, error.strerror))
        else:
            return path
    message = "No state directory can be written on the node ({}).".format("; ".join(reasons))
    raise BootError("does-not-fit", message, "Name a writable one with state_dir.", candidates[-1])


def read_private(path: str) -> bytes:
    """Read a file of the state directory, never through a link.

    Raises:
        OSError: it is not there, or it is a link.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read()


def write_private(path: str, data: bytes) -> None:
    """Put a file of mode 0600 in the state directory, whole or not at all.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    temporary = "{}.{}.tmp".format(path, os.getpid())
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def provide(state: str, sha256: str, sent: bytes) -> str:
    """Return the path of the cached agent, which is what its name says, or an empty string when it must be sent.

    Args:
        state: the state directory.
        sha256: the hash of the agent the client wants.
        sent: the agent, when the client has sent it; else empty.
    """
    folder = os.path.join(state, "agent")
    make_private(folder)
    path = os.path.join(folder, sha256 + ".pyz")
    if sent:
        if hashlib.sha256(sent).hexdigest() != sha256:
            raise BootError("failed", "The agent arrived damaged.", "Try again.", path)
        write_private(path, sent)
    try:
        found = hashlib.sha256(read_private(path)).hexdigest()
    except OSError:
        return ""
    return path if found == sha256 else ""


def receive(data: bytes) -> Tuple[bytes, bytes]:
    """Take apart what the client sent: a line with two sizes, then the agent (or nothing) and the request.

    Raises:
        BootError: it was cut short on the way.
    """
    head, _, body = data.partition(b"\n")
    sizes = [int(word) for word in head.split()]
    if len(sizes) != 2 or sum(sizes) != len(body):  # noqa: PLR2004 - the agent's size and the request's
        raise BootError("failed", "The request arrived cut short; nothing was done.", "Try again.")
    return body[: sizes[0]], body[sizes[0] :]


def boot(sha256: str, requested: str, nonce: str) -> None:
    """Answer the request on standard input.

    Args:
        sha256: the hash of the agent that the client speaks to.
        requested: the state directory; empty for the usual ones.
        nonce: a word of the client's, repeated before the answer.
    """
    out = os.dup(1)
    # Nothing that a verb or its children print may stand between the client and the answer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def send(data: bytes) -> None:
        left = "\n{} {} {}\n".format(FRAME, nonce, len(data)).encode("ascii") + data + b"\n"
        # A client that has gone away cannot be told; the ledger has what it will want to know.
        with contextlib.suppress(BrokenPipeError):
            while left:
                left = left[os.write(out, left) :]

    def tell(reply: Dict[str, object]) -> None:
        send(json.dumps(reply).encode("ascii"))

    try:
        sent, request = receive(sys.stdin.buffer.read())
        state = choose_state(requested)
        agent = provide(state, sha256, sent)
    except BootError as refusal:
        tell({"ok": False, "error": refusal.error})
        return
    except OSError as error:
        where = str(error.filename or "")
        message = "Cannot keep the agent on the node: {}.".format(error.strerror)
        tell({"ok": False, "error": {"code": "failed", "message": message, "advice": "", "where": where}})
        return
    if not agent:
        tell({"need": sha256})
        return
    sys.path.insert(0, agent)
    from surgeon_agent.__main__ import main  # type: ignore[import-not-found]

    main(request, state, send)
