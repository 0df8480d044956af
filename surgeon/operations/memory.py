"""Sites that were found before, on this machine: the same topk.py lies on many nodes, and is looked at many times.

Searching a file is pure work over its bytes, and importing the parser for it costs as much again. What was found is
kept under the hash of the file and of the code that searched, so that neither another file nor another surgeon is ever
answered from it. A graft is proved on its result all the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon import surgery

if TYPE_CHECKING:
    from surgeon.surgery import Outcome, Place


def locate(source: bytes, place: Place = surgery.EXPERTS) -> Outcome:
    """As :func:`surgeon.surgery.locate`, without a search where an earlier one found the site in this very file."""
    path = _kept(source, place)
    site = _read(path)
    if site is not None:
        surgery.know(source, site, place)
        return surgery.locate(source, place)
    outcome = surgery.locate(source, place)
    if isinstance(outcome, surgery.Found):
        # A cache that cannot be written is only slower.
        with suppress(OSError):
            _write(path, outcome)
    return outcome


def _kept(source: bytes, place: Place) -> Path:
    import platformdirs

    chosen = os.environ.get("SURGEON_CACHE_DIR")
    root = Path(chosen) if chosen else platformdirs.user_cache_path("surgeon")
    code = hashlib.sha256()
    for module in sorted(Path(surgery.__file__).parent.glob("*.py")):
        code.update(module.read_bytes())
    code.update(place.name.encode())
    return root / "sites" / f"{hashlib.sha256(code.digest() + source).hexdigest()}.json"


def _read(path: Path) -> surgery.Found | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return surgery.Found(**{**kept, "bound": frozenset(kept["bound"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, site: surgery.Found) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({**asdict(site), "bound": sorted(site.bound)}), encoding="utf-8")
    temporary.replace(path)
