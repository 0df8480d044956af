"""The lease: who is changing an installation, from where, and until when."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any, Dict, Optional

from .boot import read_private, write_private
from .protocol import AgentError, Context, verb
from .state import locked, site_of

DEFAULT_TTL_S = 900.0


def current(folder: str) -> Optional[Dict[str, Any]]:
    """Return the lease of a site as it was last written, expired or not; None when there is none.

    A lease that cannot be read as JSON is nobody's: it is always written whole.
    """
    try:
        lease = json.loads(read_private(os.path.join(folder, "lease.json")).decode("utf-8"))
    except (OSError, ValueError):
        return None
    return lease if isinstance(lease, dict) and "token" in lease else None


def public(lease: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Return a lease with ``expired`` worked out on the node's clock."""
    if lease is None:
        return None
    return dict(lease, expired=float(lease["expires"]) <= time.time())


def require(folder: str, context: Context, ttl_s: Optional[float] = None) -> Dict[str, Any]:
    """Make sure that the client holds the lease, and extend it.

    Args:
        folder: the site's folder.
        context: holds the client's token.
        ttl_s: by how much, counted from now; None for the lease's own length.

    Raises:
        AgentError: it has none, or another holds it now.
    """
    lease = current(folder)
    if lease is None or not context.lease or lease["token"] != context.lease:
        holder = "nobody" if lease is None else _holder(lease)
        message = "This change needs the lease of the installation, which {} holds.".format(holder)
        raise AgentError("locked", message, "Take the lease first; run the command again.", folder)
    lease["expires"] = time.time() + float(ttl_s or lease["ttl_s"])
    _write(folder, lease)
    return lease


def _holder(lease: Dict[str, Any]) -> str:
    return "{} on {} (pid {})".format(lease["owner"], lease["host"], lease["pid"])


def _write(folder: str, lease: Dict[str, Any]) -> None:
    write_private(os.path.join(folder, "lease.json"), json.dumps(lease).encode("ascii"))


def _take(folder: str, args: Dict[str, Any]) -> Dict[str, Any]:
    ttl = float(args.get("ttl_s") or DEFAULT_TTL_S)
    now = time.time()
    lease = {
        "token": os.urandom(16).hex(),
        "owner": str(args.get("owner") or "somebody"),
        "host": str(args.get("host") or "an unknown host"),
        "pid": int(args.get("pid") or 0),
        "ttl_s": ttl,
        "time": now,
        "expires": now + ttl,
    }
    _write(folder, lease)
    return lease


def acquire(folder: str, args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Take the lease if nobody living holds it; the args are those of the verb."""
    held = current(folder)
    if held is not None and context.lease == held["token"]:
        return dict(require(folder, context), took_over=None)
    living = held is not None and float(held["expires"]) > time.time()
    known_dead = bool(args.get("dead")) and held is not None and args.get("token") == held["token"]
    if held is not None and living and not known_dead:
        message = "{} holds the lease of this installation for another {:.0f} s.".format(
            _holder(held), float(held["expires"]) - time.time()
        )
        raise AgentError("locked", message, "Wait for it, or break it with --break-lock.", folder)
    return dict(_take(folder, args), took_over=public(held))


def let_go(folder: str, context: Context) -> bool:
    """Remove the lease if it is the client's; return whether it was."""
    held = current(folder)
    ours = held is not None and held["token"] == context.lease
    if ours:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, "lease.json"))
    return ours


@verb("lease")
def lease(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Acquire, renew, release or break the lease of a site.

    Args:
        args: ``site_id``; ``action``; for ``acquire`` and ``break`` also ``owner``, ``host``, ``pid`` and ``ttl_s``
            (seconds), which ``renew`` takes too, for one long wait. A client that knows the holder is dead passes
            ``dead`` and the ``token`` it saw.
        context: holds the token that ``renew`` and ``release`` are about.

    Returns:
        The lease (``token``, ``expires`` in epoch seconds, ...), with ``took_over`` or ``broke``: the lease that was
        there before, or None. ``release`` returns ``released``.

    Raises:
        AgentError: another holds it (``locked``), or there is no such action (``usage``).
    """
    folder = site_of(args, context)
    action = args.get("action")
    with locked(folder, context):
        if action == "acquire":
            return acquire(folder, args, context)
        if action == "renew":
            return require(folder, context, args.get("ttl_s"))
        if action == "break":
            held = current(folder)
            return dict(_take(folder, args), broke=public(held))
        if action == "release":
            return {"released": let_go(folder, context)}
    raise AgentError("usage", "A lease can be acquired, renewed, released or broken, not {!r}.".format(action))
