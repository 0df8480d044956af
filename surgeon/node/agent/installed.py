"""The installed sglang: which folder is imported, its topk.py, what lies beside it, whether it can be replaced."""

from __future__ import annotations

import base64
import os
import stat
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from . import packages
from .files import digest
from .processes import user_name
from .state import site_id

if TYPE_CHECKING:
    from .interpreter import Interpreter

TOPK = os.path.join("srt", "layers", "moe", "topk.py")


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


def topk(package_dir: str, dist_info: Optional[str]) -> Optional[Dict[str, Any]]:
    """Describe the package's topk.py with its bytes; None when there is none.

    ``record_sha256`` is what the installer noted, None where it noted nothing (an editable install, no RECORD).
    ``link`` is where it points when it is a symbolic link, which surgeon does not replace.
    """
    path = os.path.join(package_dir, TOPK)
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


def beside(package_dir: str, module: str) -> Dict[str, Any]:
    """Describe the runtime and the settings beside topk.py; each is None when it is not there."""
    stem = os.path.join(package_dir, os.path.dirname(TOPK), module)
    runtime, settings = packages.read(stem + ".py"), packages.read(stem + ".json", 1 << 20)
    return {
        "runtime": {"path": stem + ".py", "sha256": digest(runtime)} if runtime is not None else None,
        "settings": {
            "path": stem + ".json",
            "sha256": digest(settings),
            "text": settings.decode("utf-8", "replace"),
        }
        if settings is not None
        else None,
    }
