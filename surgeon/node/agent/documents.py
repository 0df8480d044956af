"""Small JSON documents that surgeon keeps about one site-packages: the baseline, results of benchmarks."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any, Dict, Optional

from .protocol import AgentError, Context, verb

_NAME = re.compile(r"[a-z][a-z0-9-]{0,40}\Z")
_LIMIT = 4 * 1024 * 1024


def _path(state: str, site_id: str, name: str) -> str:
    if not re.match(r"[0-9a-f]{6,64}\Z", site_id) or not _NAME.match(name):
        raise AgentError("usage", "no document can be called {!r} in {!r}".format(name, site_id))
    return os.path.join(state, site_id, "documents", name + ".json")


def read_all(state: str, site_id: str) -> Dict[str, Any]:
    """Every document of that site-packages, by name; one that cannot be read is left out."""
    folder = os.path.join(state, site_id, "documents")
    found: Dict[str, Any] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return found
    for name in names:
        if name.endswith(".json") and os.path.getsize(os.path.join(folder, name)) <= _LIMIT:
            value = _read(os.path.join(folder, name))
            if value is not None:
                found[name[:-5]] = value
    return found


def _read(path: str) -> Optional[Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


@verb("document")
def document(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Put a document, or append to one that is a list (the newest ``keep`` entries are kept).

    Args: ``site_id``, ``name``, ``value``, and for a list ``append`` true and ``keep``.
    A dict that is stored gets ``saved``, the node's time in seconds since the epoch.
    """
    path = _path(context.state, str(args["site_id"]), str(args["name"]))
    value = args["value"]
    if isinstance(value, dict):
        value = dict(value, saved=time.time())
    if args.get("append"):
        earlier = _read(path)
        listed = earlier if isinstance(earlier, list) else []
        value = [*listed, value][-int(args.get("keep") or 50) :]
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = "{}.{}.tmp".format(path, os.getpid())
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return {"path": path}
