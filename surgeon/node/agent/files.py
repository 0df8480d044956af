"""One file of the installed package at a time: what is there, a replacement staged beside it, its bytecode gone."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import stat
from typing import Any, Dict, List, NamedTuple, Optional

from .protocol import AgentError, Context, verb

READ_LIMIT = 1 << 20


class Present(NamedTuple):
    """A regular file as it is on the node.

    Attributes:
        data: its bytes.
        mode: its permission bits.
        uid: its owner.
        gid: its group.
        nlink: how many names it has; above 1 it is shared with an installer's cache or another environment.
        mtime: when it was last written, epoch seconds, whole.
    """

    data: bytes
    mode: int
    uid: int
    gid: int
    nlink: int
    mtime: int


def digest(data: bytes) -> str:
    """Return the sha256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


def refusal(error: OSError, path: str) -> AgentError:
    """Put what the operating system says about ``path`` in the agent's words."""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        message = "The package is read-only for this user: {} ({}).".format(path, error.strerror)
        advice = "Work as the user who owns the installation, or make that directory writable."
        return AgentError("does-not-fit", message, advice, path)
    return AgentError("failed", "Cannot write {}: {}.".format(path, error.strerror or error), where=path)


def examine(path: str, limit: Optional[int] = None) -> Optional[Present]:
    """Return a regular file, or None when nothing is there.

    Args:
        path: an absolute path.
        limit: at most so many bytes are read; None reads all.

    Raises:
        AgentError: it is a link or anything else than a regular file, or it cannot be read.
    """
    if not os.path.isabs(path):
        raise AgentError("usage", "A path on the node must be absolute, found {!r}.".format(path), where=path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            message = "{} is a symbolic link to {}.".format(path, os.path.realpath(path))
            advice = "surgeon changes regular files only; reinstall the package with copies or hard links."
            raise AgentError("does-not-fit", message, advice, path) from error
        raise AgentError("failed", "Cannot read {}: {}.".format(path, error.strerror), where=path) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise AgentError("does-not-fit", "{} is not a regular file.".format(path), where=path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(-1 if limit is None else limit)
    mode = stat.S_IMODE(status.st_mode)
    return Present(data, mode, status.st_uid, status.st_gid, status.st_nlink, int(status.st_mtime))


def temporary_prefix(path: str) -> str:
    """Return how the names of ``path``'s temporary files begin."""
    return ".{}.surgeon-".format(os.path.basename(path))


def temporary(path: str, revision: int) -> str:
    """Return the temporary file that revision ``revision`` stages for ``path``, in the same directory."""
    return os.path.join(os.path.dirname(path), "{}{}.tmp".format(temporary_prefix(path), revision))


def sweep(path: str) -> List[str]:
    """Remove the temporary files that an agent cut short left beside ``path``; return their paths."""
    folder, prefix = os.path.dirname(path), temporary_prefix(path)
    swept = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(folder)):
            if name.startswith(prefix) and name.endswith(".tmp"):
                os.unlink(os.path.join(folder, name))
                swept.append(os.path.join(folder, name))
    return swept


def stage(path: str, target: str, wanted: Present) -> None:
    """Write a temporary file that is ready to take ``target``'s place, down on the disk and read back.

    Args:
        path: the temporary file; must not exist.
        target: the file it will replace.
        wanted: its bytes, mode and owner; ``mtime`` is that of the file replaced, which is never kept.

    Raises:
        AgentError: the owner cannot be kept, or the disk gave back other bytes than it was given.
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(wanted.data)
        file.flush()
        status = os.fstat(descriptor)
        if (status.st_uid, status.st_gid) != (wanted.uid, wanted.gid):
            try:
                os.fchown(descriptor, wanted.uid, wanted.gid)
            except PermissionError as error:
                message = "{} belongs to {}:{} and this user cannot keep it so.".format(target, wanted.uid, wanted.gid)
                advice = "Work as the user who owns the installation."
                raise AgentError("does-not-fit", message, advice, target) from error
        os.fchmod(descriptor, wanted.mode)
        if int(status.st_mtime) == wanted.mtime:
            # Bytecode that is kept elsewhere is told apart by size and whole seconds only.
            os.utime(descriptor, (wanted.mtime + 1, wanted.mtime + 1))
        os.fsync(descriptor)
    back = examine(path)
    if back is None or back.data != wanted.data:
        raise AgentError("failed", "{} did not read back as it was written.".format(path), where=path)


def sync_folder(folder: str) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def purge_bytecode(path: str) -> List[str]:
    """Remove the compiled forms of a module of every interpreter and level; return their paths."""
    folder, name = os.path.split(path)
    stem, extension = os.path.splitext(name)
    if extension != ".py":
        return []
    cache = os.path.join(folder, "__pycache__")
    purged = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in sorted(os.listdir(cache)):
            if entry.startswith(stem + ".") and entry.endswith(".pyc"):
                os.unlink(os.path.join(cache, entry))
                purged.append(os.path.join(cache, entry))
    return purged


@verb("read")
def read(args: Dict[str, Any], _context: Context) -> Dict[str, Any]:
    """Return a file of the node: ``exists`` and, if it does, ``b64``, ``sha256``, ``truncated`` and its status.

    Args:
        args: ``path``, absolute; ``max_bytes``, 1 MiB unless said. The hash is that of the bytes returned.
        _context: not needed.
    """
    path, limit = str(args["path"]), int(args.get("max_bytes") or READ_LIMIT)
    found = examine(path, limit + 1)
    if found is None:
        return {"path": path, "exists": False}
    data = found.data[:limit]
    return {
        "path": path,
        "exists": True,
        "b64": base64.b64encode(data).decode("ascii"),
        "sha256": digest(data),
        "truncated": len(found.data) > limit,
        "mode": found.mode,
        "uid": found.uid,
        "gid": found.gid,
        "nlink": found.nlink,
        "mtime": found.mtime,
    }
