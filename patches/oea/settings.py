"""The settings of the OEA runtime: which file is believed, what may stand in it, and what it asks of the operator.

surgeon puts this file beside ``_surgeon_oea.py`` as ``_surgeon_oea_settings.py``. patch.toml describes each setting.
Python 3.8 or later.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any, Dict, Mapping, NamedTuple, Optional, Tuple

if TYPE_CHECKING:
    from pathlib import Path

    from patches.oea import operator as _operator
else:
    from . import _surgeon_oea_operator as _operator

SCHEMA = "surgeon/oea-settings/1"
ENVIRONMENT = "SGLANG_OEA_K0"
_MOST_BYTES = 65536
_MOST_RANGES = 64


class Settings(NamedTuple):
    """The settings in force; patch.toml describes each, and ``at_pass`` is described in :mod:`_surgeon_oea`."""

    enabled: bool = True
    k0: int = 4
    k0_schedule: Tuple[Tuple[int, int, int], ...] = ()
    refill: str = "native"
    denominator: str = "kept"
    p: float = 1.0
    k_max: int = 0
    max_rank: int = 0
    budget: int = 0
    utility: str = "own_topk"
    verify: bool = True
    min_rows: int = 3
    max_rows: int = 64
    stats: bool = False
    generation: int = 0
    at_pass: Optional[int] = None
    beacon_dir: str = ""

    @property
    def is_on(self) -> bool:
        """Whether any pass may be re-routed."""
        return self.enabled and (self.k0 > 0 or bool(self.k0_schedule))

    @property
    def operator_policy(self) -> _operator.Policy:
        """What the operator is asked for; a policy without ranges if the patch is off."""
        ranges = self.k0_schedule or ((self.min_rows, self.max_rows, self.k0),)
        return _operator.Policy(
            schedule=ranges if self.is_on else (),
            refill=self.refill,
            denominator=self.denominator,
            p=self.p,
            max_rank=self.max_rank,
            k_max=self.k_max,
            budget=self.budget,
            utility=self.utility,
        )


class Loaded(NamedTuple):
    """Settings, where k0 came from (``file`` or ``environment``), and what was wrong on the way."""

    settings: Settings
    source: str
    problem: Optional[str]


INTEGERS = {
    "k0": (0, 64),
    "k_max": (0, 64),
    "max_rank": (0, _operator.MOST_EXPERTS),
    "budget": (0, _operator.MOST_EXPERTS),
    "min_rows": (1, _operator.MAX_ROWS),
    "max_rows": (1, _operator.MAX_ROWS),
    "generation": (0, 2**53),
}
SWITCHES = ("enabled", "verify", "stats")
CHOICES = {
    "refill": _operator.REFILLS,
    "denominator": _operator.DENOMINATORS,
    "utility": _operator.UTILITIES,
}
LEAST_P, MOST_P = 0.001, 1.0


def is_ours(status: os.stat_result) -> bool:
    """Whether only this process's user, or root, could have written it."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read_trusted(path: Path) -> Dict[str, Any]:
    """The settings file as JSON; ValueError or OSError if it is not one that this process may believe."""
    handle = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or not is_ours(status):
            found = f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
            raise ValueError(f"expected a plain file that only uid {os.geteuid()} or root can write, found {found}")
        body = json.loads(file.read(_MOST_BYTES).decode("utf-8"))
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object, found {type(body).__name__}")  # noqa: TRY004 - one error for all content
    return body


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_schedule(value: Any) -> bool:
    """Whether it is a list of [low, high, k0], in rising order and without overlap."""
    if not isinstance(value, list) or len(value) > _MOST_RANGES:
        return False
    before = 0
    for part in value:
        if not isinstance(part, list) or len(part) != 3 or not all(_is_integer(n, 0, 2**31) for n in part):  # noqa: PLR2004 - low, high, k0
            return False
        low, high, k0 = part
        if not before < low <= high <= _operator.MAX_ROWS or k0 > INTEGERS["k0"][1]:
            return False
        before = high
    return True


def _fault(key: str, value: Any) -> Optional[str]:
    """What is wrong with one setting, or None."""
    expected = None
    if key in INTEGERS:
        low, high = INTEGERS[key]
        expected = None if _is_integer(value, low, high) else f"an integer in {low}..{high}"
    elif key in SWITCHES:
        expected = None if isinstance(value, bool) else "true or false"
    elif key == "schema":
        expected = None if value == SCHEMA else SCHEMA
    elif key in CHOICES:
        expected = None if isinstance(value, str) and value in CHOICES[key] else f"one of {', '.join(CHOICES[key])}"
    elif key == "k0_schedule":
        expected = None if _is_schedule(value) else "a list of [low, high, k0] in rising order without overlap"
    elif key == "p":
        fine = type(value) in (int, float) and LEAST_P <= value <= MOST_P
        expected = None if fine else f"a number in {LEAST_P}..{MOST_P}"
    elif key == "at_pass":
        expected = None if value is None or _is_integer(value, 0, 2**53) else "an integer, or null"
    elif key == "beacon_dir":
        fine = isinstance(value, str) and (not value or value.startswith("/"))
        expected = None if fine else "an absolute path"
    else:
        return f"{key}: no such setting"
    return None if expected is None else f"{key}: expected {expected}, found {repr(value)[:200]}"


def read_settings(path: Path, environ: Mapping[str, str]) -> Loaded:
    """Read the settings file and SGLANG_OEA_K0.

    The file is believed only if this process's user or root owns it and nobody else can write it, and only as a
    whole: one unknown key or value out of range, and the patch stays off. The variable overrides the file's switch,
    schedule and k0 (0 is off); it cannot turn on a patch whose file is not fit to be read.
    """
    off = Settings(enabled=False, k0=0)
    try:
        body = _read_trusted(path)
    except (OSError, ValueError, RecursionError) as error:
        return Loaded(off, "file", f"{path.name}: {error}")
    faults = [fault for fault in (_fault(key, body[key]) for key in sorted(body)) if fault]
    if "schema" not in body:
        faults.append("schema: missing")
    known = {key: value for key, value in body.items() if key in Settings._fields and not _fault(key, value)}
    if "k0_schedule" in known:
        known["k0_schedule"] = tuple(tuple(part) for part in known["k0_schedule"])
    settings = Settings(**known)
    if settings.min_rows > settings.max_rows:
        faults.append(f"min_rows {settings.min_rows} is more than max_rows {settings.max_rows}")
    if faults:
        kept = off._replace(beacon_dir=settings.beacon_dir, generation=settings.generation)
        return Loaded(kept, "file", f"{path.name}: {'; '.join(faults)}")
    asked = environ.get(ENVIRONMENT)
    if asked is None:
        return Loaded(settings, "file", None)
    low, high = INTEGERS["k0"]
    k0 = int(asked) if asked.isascii() and asked.isdigit() and len(asked) <= len(str(high)) else -1
    if not low <= k0 <= high:
        return Loaded(settings, "file", f"{ENVIRONMENT}: expected an integer in {low}..{high}, found {asked[:40]!r}")
    return Loaded(settings._replace(enabled=k0 > 0, k0=k0, k0_schedule=()), "environment", None)
