"""Holding the node's lease while something is changed, so that two people cannot cut at once."""

from __future__ import annotations

import getpass
import os
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import SurgeonError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surgeon.ledger.records import Lease
    from surgeon.node.client import Node
    from surgeon.operations.observer import Observer
    from surgeon.operations.survey import Survey

# Longer than the verbs between two renewals, but for those that run programs, which `renew` covers. A client that died
# frees its own machine's lease at once.
TTL_S: Final = 180.0


def whoami() -> tuple[str, str]:
    """The user and the machine that this surgeon runs as and on."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return user, socket.gethostname()


def claim() -> dict[str, Any]:
    """Who asks for the lease, and for how long."""
    user, host = whoami()
    return {"owner": user, "host": host, "pid": os.getpid(), "ttl_s": TTL_S}


@contextmanager
def held(node: Node, survey: Survey, observer: Observer, *, break_lock: bool = False) -> Iterator[None]:
    """Hold the lease of this site-packages; it is let go on the way out, whatever happens.

    Raises:
        LockedError: somebody else holds it.
    """
    site_id = survey.installed.site_id
    present = survey.ledger.lease
    host = whoami()[1]
    request = {"action": "acquire", "site_id": site_id, **claim()}
    if break_lock and present is not None:
        observer.warn(f"breaking the lease of {present.describe()}")
        request["action"] = "break"
    elif present is not None and _is_dead(present, host):
        request |= {"dead": True, "token": present.token}
    answer = node.call("lease", request)
    node.lease = str(answer["token"])
    try:
        yield
    finally:
        # A connection that is already cut cannot release; the lease then ends by itself.
        with suppress(SurgeonError):
            if node.lease is not None:
                node.call("lease", {"action": "release", "site_id": site_id})
        node.lease = None


def renew(node: Node, site_id: str, *, busy_s: float = 0.0, deadline_s: float = 30.0) -> None:
    """Keep the lease through a long wait.

    Args:
        node: where.
        site_id: of the site-packages.
        busy_s: how long the node will be at work without another renewal.
        deadline_s: how long to wait for an agent that is at work on the files.
    """
    args = {"action": "renew", "site_id": site_id, "ttl_s": TTL_S + busy_s}
    node.call("lease", args, deadline_s=deadline_s)


def lives(lease: Lease | None, now: float) -> bool:
    """Whether that lease still keeps others out. ``now`` is the node's time."""
    return lease is not None and lease.expires > now and not _is_dead(lease, whoami()[1])


def _is_dead(lease: Lease, host: str) -> bool:
    """Whether it was taken on this machine by a process that is gone."""
    if lease.host != host or lease.pid == os.getpid():
        return False
    try:
        os.kill(lease.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
