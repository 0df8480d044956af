"""Reads what is installed from the files that installers leave, without importing or running anything."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

# Name and Version stand in the first lines of METADATA, before a licence text that may follow in the same header.
_HEAD_BYTES = 4096
_VERSION = re.compile(r"""^__version__\s*(?::\s*str\s*)?=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]""", re.MULTILINE)


class Installation(NamedTuple):
    """One place from which sglang could be imported.

    Attributes:
        package_dir: the folder ``sglang``.
        version: from its metadata, else from its own version file; None when neither says.
        dist_info: the metadata folder; None when there is none.
        python: the interpreter that finds it.
        regular: False for a folder without ``__init__.py``, which Python takes for a namespace package.
    """

    package_dir: str
    version: Optional[str]
    dist_info: Optional[str]
    python: str
    regular: bool


def read(path: str, limit: int = -1) -> Optional[bytes]:
    """Return a file's bytes, at most ``limit``; None when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return None


def canonical(name: str) -> str:
    """Return a distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _field(header: bytes, name: bytes) -> Optional[str]:
    match = re.search(rb"^" + name + rb":[ \t]*([^\r\n]*)", header, re.MULTILINE | re.IGNORECASE)
    return match.group(1).decode("utf-8", "replace").strip() if match else None


def distribution(folder: str) -> Optional[Dict[str, Any]]:
    """Describe one ``*.dist-info`` or ``*.egg-info``; None when it has no metadata."""
    file = os.path.join(folder, "METADATA" if folder.endswith(".dist-info") else "PKG-INFO")
    header = read(file, _HEAD_BYTES)
    if header is None and folder.endswith(".egg-info"):
        header = read(folder, _HEAD_BYTES)
    if header is None:
        return None
    name, version = _field(header, b"Name"), _field(header, b"Version")
    if name is None or version is None:
        # Fields may come in any order: read it all before giving up.
        header = read(file) or b""
        name, version = _field(header, b"Name"), _field(header, b"Version")
    installer = read(os.path.join(folder, "INSTALLER"), 64)
    direct_url = None
    with contextlib.suppress(ValueError, TypeError):
        direct_url = json.loads(read(os.path.join(folder, "direct_url.json")) or b"null")
    return {
        "name": name or os.path.basename(folder).partition("-")[0],
        "version": version or "",
        "dist_info": folder,
        "installer": installer.decode("utf-8", "replace").strip() if installer is not None else None,
        "direct_url": direct_url,
    }


def distributions(sys_path: Sequence[str]) -> List[Dict[str, Any]]:
    """Describe every distribution on an import path, in import order; a name that is there twice is listed twice."""
    found = []
    for folder in dict.fromkeys(os.path.realpath(entry) for entry in sys_path):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                one = distribution(os.path.join(folder, name))
                if one is not None:
                    found.append(one)
    return found


def requires(dist_info: str) -> List[str]:
    """Return the Requires-Dist lines of a distribution's metadata."""
    data = read(os.path.join(dist_info, "METADATA")) or read(os.path.join(dist_info, "PKG-INFO")) or b""
    header = re.split(rb"\r?\n\r?\n", data, maxsplit=1)[0]
    lines = re.findall(rb"^Requires-Dist:[ \t]*([^\r\n]*)", header, re.MULTILINE | re.IGNORECASE)
    return [line.decode("utf-8", "replace").strip() for line in lines]


def recorded_sha256(dist_info: str, path: str) -> Optional[str]:
    """Return the hash that RECORD holds for a file, as hexadecimal; None when it has none."""
    record = read(os.path.join(dist_info, "RECORD"))
    if record is None:
        return None
    relative = os.path.relpath(path, os.path.dirname(dist_info)).replace(os.sep, "/").encode("utf-8")
    match = re.search(rb'^"?' + re.escape(relative) + rb'"?,sha256=([A-Za-z0-9_-]+)', record, re.MULTILINE)
    if match is None:
        return None
    digest = match.group(1)
    return base64.urlsafe_b64decode(digest + b"=" * (-len(digest) % 4)).hex()


def _own_version(package_dir: str) -> Optional[str]:
    # 0.5.7 and later keep the number in _version.py, earlier releases in version.py.
    for name in ("_version.py", "version.py"):
        match = _VERSION.search((read(os.path.join(package_dir, name)) or b"").decode("utf-8", "replace"))
        if match:
            return match.group(1)
    return None


def _describes(dist: Dict[str, Any], package_dir: str) -> bool:
    """Tell whether a distribution is the one that this package folder belongs to."""
    if os.path.dirname(dist["dist_info"]) == os.path.dirname(package_dir):
        return True
    url = (dist["direct_url"] or {}).get("url", "")
    return url.startswith("file://") and (package_dir + "/").startswith(url[len("file://") :].rstrip("/") + "/")


def installations(
    python: str, sys_path: Sequence[str], locations: Sequence[str], dists: List[Dict[str, Any]]
) -> List[Installation]:
    """Return every place on an import path that holds sglang, the one that Python would take first.

    Args:
        python: the interpreter that has this import path.
        sys_path: its folders.
        locations: where it would import sglang from (an editable install may lie outside of ``sys_path``).
        dists: what is installed on that path.
    """
    folders = [*locations, *(os.path.join(entry, "sglang") for entry in sys_path)]
    folders = [one for one in dict.fromkeys(os.path.realpath(folder) for folder in folders) if os.path.isdir(one)]
    ours = [dist for dist in dists if canonical(dist["name"]) == "sglang"]
    found = []
    for folder in folders:
        regular = os.path.isfile(os.path.join(folder, "__init__.py"))
        owners = [dist for dist in ours if _describes(dist, folder)]
        if not regular and owners:
            # An editable install's metadata lies beside a left-over folder without being about it.
            owners = [dist for dist in owners if not (dist["direct_url"] or {}).get("dir_info", {}).get("editable")]
        candidates: List[Optional[Dict[str, Any]]] = [*owners] or [None]
        for dist in candidates:
            version = dist["version"] if dist is not None else _own_version(folder)
            where = dist["dist_info"] if dist is not None else None
            found.append(Installation(folder, version, where, python, regular))
    return found


def owner(found: List[Installation], package_dir: str) -> Tuple[Optional[str], Optional[str]]:
    """Return the version and the metadata folder of the installation at ``package_dir``."""
    for one in found:
        if one.package_dir == package_dir:
            return one.version, one.dist_info
    return None, None
