"""Where the state of one site-packages is kept, and the lock that two agents cannot both hold."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from typing import Any, Dict, Iterator

from .boot import BootError, make_private
from .protocol import AgentError, Context


def site_id(site_packages: str) -> str:
    """Return the short name of a site-packages directory: 12 hex digits of the sha256 of its real path."""
    return hashlib.sha256(os.fsencode(os.path.realpath(site_packages))).hexdigest()[:12]


def private(path: str) -> str:
    """Make a directory of the state private and return it.

    Raises:
        AgentError: others could write it, or it cannot be made.
    """
    try:
        make_private(path)
    except BootError as refusal:
        raise AgentError(**refusal.error) from refusal
    except OSError as error:
        raise AgentError("failed", "Cannot make {}: {}.".format(path, error.strerror), where=path) from error
    return path


def site_path(state: str, site: str) -> str:
    """Return the folder of a site's ledger, whether or not it exists.

    Raises:
        AgentError: ``site`` is not a site's short name.
    """
    if not re.match(r"[0-9a-f]{12}\Z", site):
        raise AgentError("usage", "A site_id is 12 hex digits, found {!r}.".format(site))
    return os.path.join(state, site)


def site_of(args: Dict[str, Any], context: Context) -> str:
    """Return the folder of the site that a verb's ``site_id`` names, made if need be."""
    return private(site_path(context.state, str(args.get("site_id") or "")))


@contextlib.contextmanager
def locked(folder: str, context: Context, what: str = "this installation") -> Iterator[None]:
    """Hold a folder's lock; only one agent at a time changes what it is about.

    Args:
        folder: a site's folder for its ledger, lease and files; the folder of launches for the node's servers.
        context: its deadline ends the wait.
        what: what the lock is about, for the refusal.

    Raises:
        AgentError: another agent still holds it at the deadline.
    """
    path = os.path.join(folder, "lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if context.remaining() <= 1.0:
                    message = "Another surgeon is at work on {} right now.".format(what)
                    raise AgentError("locked", message, "Wait for it to end, then try again.", path) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
