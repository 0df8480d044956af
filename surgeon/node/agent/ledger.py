"""The ledger: every change of an installation, one line each, only ever appended to."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Tuple

from . import lease
from .boot import read_private
from .protocol import AgentError, Context, verb
from .state import site_path


def _path(folder: str) -> str:
    return os.path.join(folder, "ledger.jsonl")


def read_lines(folder: str) -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
    """Return what every readable line says, and the lines that cannot be read, as ``{"line", "text"}``.

    A crash in the middle of an append leaves a line cut short; it is reported, and the lines around it still count.
    """
    try:
        data = read_private(_path(folder))
    except FileNotFoundError:
        return [], []
    whole: List[Dict[str, Any]] = []
    torn: List[Dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
            whole.append(dict(record, revision=int(record["revision"])))
        except (ValueError, KeyError, TypeError):
            torn.append({"line": number, "text": line[:200].decode("utf-8", "replace")})
    return whole, torn


def records(folder: str) -> List[Dict[str, Any]]:
    """Return the records of a site by revision; of two lines on one revision the later one counts."""
    latest: Dict[int, Dict[str, Any]] = {}
    for record in read_lines(folder)[0]:
        latest[record["revision"]] = record
    return [latest[revision] for revision in sorted(latest)]


def append(folder: str, record: Dict[str, Any]) -> None:
    """Append one record and wait until it is on the disk. The caller holds the site's lock."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(_path(folder), flags, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        line = json.dumps(record, sort_keys=True).encode("ascii") + b"\n"
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            # A line that a crash cut short stays on its own line.
            line = b"\n" + line
        while line:
            line = line[os.write(descriptor, line) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_site(state: str, site: str) -> Dict[str, Any]:
    """Return a site's ``records``, its ``lease`` (or None) and its ``torn`` lines.

    Args:
        state: the state directory.
        site: the site's short name.

    Raises:
        AgentError: the ledger is there and cannot be read.
    """
    folder = site_path(state, site)
    try:
        torn = read_lines(folder)[1]
        return {"records": records(folder), "lease": lease.public(lease.current(folder)), "torn": torn}
    except OSError as error:
        where = _path(folder)
        raise AgentError("failed", "Cannot read the ledger: {}.".format(error.strerror), where=where) from error


@verb("ledger")
def ledger(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Return the ``records``, ``lease`` and ``torn`` lines of the site that ``site_id`` names."""
    return read_site(context.state, str(args.get("site_id") or ""))
