"""Reads the beacons that the runtime wrote from inside the server's processes, and tells which are of living ones."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Iterable, List, Optional

from . import procfs
from .packages import read

_MOST = 256
_LARGEST = 64 * 1024


def folder_for(state: str, uid: Optional[int], home: str) -> str:
    """Return where the processes of a server can write beacons.

    Args:
        state: surgeon's state directory, which only the agent's own user can enter.
        uid: the server's user; None when no server runs.
        home: that user's home directory.
    """
    if uid is None or uid == os.geteuid():
        return os.path.join(state, "beacons")
    return os.path.join(home, ".local", "state", "surgeon", "beacons")


def configured(settings: Optional[str]) -> Optional[str]:
    """Return the folder that a settings file names, when it is an absolute path."""
    try:
        value = json.loads(settings or "null")
    except ValueError:
        return None
    folder = value.get("beacon_dir") if isinstance(value, dict) else None
    return folder if isinstance(folder, str) and os.path.isabs(folder) else None


def _living(beacon: Dict[str, Any]) -> bool:
    """Tell whether the very process that wrote a beacon still runs: its pid and its start time."""
    pid, ticks = beacon.get("pid"), beacon.get("start_ticks")
    if not isinstance(pid, int) or not isinstance(ticks, int):
        return False
    return procfs.alive((pid, ticks))


def collect(folders: Iterable[Optional[str]]) -> List[Dict[str, Any]]:
    """Read every beacon of these folders; each gets ``path`` and ``alive``, an unreadable one ``problem``."""
    found: List[Dict[str, Any]] = []
    for folder in dict.fromkeys(one for one in folders if one):
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        except OSError:
            continue
        for name in names[:_MOST]:
            path = os.path.join(folder, name)
            data = read(path, _LARGEST + 1)
            if data is None:
                # It was replaced or removed between the listing and now.
                continue
            try:
                beacon = json.loads(data.decode("utf-8")) if len(data) <= _LARGEST else None
            except ValueError:
                beacon = None
            if isinstance(beacon, dict):
                found.append({**beacon, "path": path, "alive": _living(beacon)})
            else:
                found.append({"path": path, "alive": False, "problem": "it is no JSON object of less than 64 KiB"})
    return found
