"""The installed sglang: which folder is imported, the files that are cut, what lies beside, what can be replaced."""

from __future__ import annotations

import base64
import os
import stat
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional

from . import packages
from .files import digest
from .processes import user_name
from .state import site_id

if TYPE_CHECKING:
    from .interpreter import Interpreter

TOPK = os.path.join("srt", "layers", "moe", "topk.py")
RUNNER = os.path.join("srt", "model_executor", "model_runner.py")


def package(asked: Interpreter, found: List[packages.Installation]) -> Optional[Dict[str, Any]]:
    """Return the sglang that an interpreter imports; None when it imports none, or a bare folder.

    Args:
        asked: the interpreter's answer.
        found: every installation on its path.
    """
    if asked.origin is None or not asked.locations:
        return None
    folder = os.path.realpath(asked.locations[0])
    version, dist_info = packages.owner(found, folder)
    site_packages = os.path.dirname(folder)
    return {
        "dir": folder,
        "version": version,
        "dist_info": dist_info,
        "requires": packages.requires(dist_info) if dist_info is not None else [],
        "site_packages": site_packages,
        "site_id": site_id(site_packages),
    }


def _why_not(folder: str) -> Optional[str]:
    """Say why a file of this folder cannot be created and renamed; None when it can."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "{} is on a read-only file system".format(folder)
    owner = os.stat(folder)
    return "{} belongs to {} (mode {:04o}) and this is {}".format(
        folder, user_name(owner.st_uid), stat.S_IMODE(owner.st_mode), user_name(os.geteuid())
    )


def target(package_dir: str, dist_info: Optional[str], member: str = TOPK) -> Optional[Dict[str, Any]]:
    """Describe one of the package's files with its bytes; None when there is none.

    ``record_sha256`` is what the installer noted, None where it noted nothing (an editable install, no RECORD).
    ``link`` is where it points when it is a symbolic link, which surgeon does not replace.
    """
    path = os.path.join(package_dir, member)
    data = packages.read(path)
    if data is None:
        return None
    status = os.stat(path)
    why_not = _why_not(os.path.dirname(path))
    link = os.readlink(path) if os.path.islink(path) else None
    if link is not None:
        why_not = "it is a symbolic link to {}".format(link)
    return {
        "path": path,
        "b64": base64.b64encode(data).decode("ascii"),
        "sha256": digest(data),
        "mode": stat.S_IMODE(status.st_mode),
        "uid": status.st_uid,
        "gid": status.st_gid,
        "nlink": status.st_nlink,
        "mtime_ns": status.st_mtime_ns,
        "record_sha256": packages.recorded_sha256(dist_info, path) if dist_info is not None else None,
        "link": link,
        "writable": why_not is None,
        "why_not": why_not,
    }


def beside(package_dir: str, module: str, parts: Iterable[str] = ()) -> Dict[str, Any]:
    """Describe what lies beside topk.py: the runtime, the settings, and further modules under their own names.

    Each is None when it is not there.
    """
    folder = os.path.join(package_dir, os.path.dirname(TOPK))
    path = os.path.join(folder, module + ".json")
    settings = packages.read(path, 1 << 20)
    found: Dict[str, Any] = {
        "runtime": _known(os.path.join(folder, module + ".py")),
        "settings": {"path": path, "sha256": digest(settings), "text": settings.decode("utf-8", "replace")}
        if settings is not None
        else None,
    }
    for part in parts:
        found[part] = _known(os.path.join(folder, os.path.basename(part) + ".py"))
    return found


def _known(path: str) -> Optional[Dict[str, Any]]:
    data = packages.read(path)
    return {"path": path, "sha256": digest(data)} if data is not None else None


def present(records: Iterable[Dict[str, Any]]) -> Dict[str, Optional[str]]:
    """Return the sha256 of every file that the ledger ever wrote, by path; None for one that is not there."""
    paths = {str(file["path"]) for record in records for file in record.get("files") or [] if file.get("path")}
    found: Dict[str, Optional[str]] = {}
    for path in sorted(paths):
        data = packages.read(path)
        found[path] = digest(data) if data is not None else None
    return found
