"""The verdict of one rule: what it looked at, how bad it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is. Only ``fail`` stops an apply or a restart."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        id: a stable word for programs.
        severity: how bad.
        title: the finding in one line.
        evidence: what was read, and where.
        repair: requirements (``name==version``) that would mend it; empty if nothing to install would.
        advice: what to do, in words.
    """

    id: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    repair: tuple[str, ...] = ()
    advice: str = ""
