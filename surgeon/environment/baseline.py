"""A saved picture of an environment that worked, and what has moved since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from surgeon.environment.checks import Check, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surgeon.environment.snapshot import Snapshot

SCHEMA: Final = "surgeon/baseline/1"


@dataclass(frozen=True)
class Baseline:
    """Versions by normalised name, and the pins that were broken on purpose when it was saved.

    Attributes:
        saved: seconds since the epoch by the node's clock.
        who: who saved it.
        python: the interpreter's path.
        versions: version by normalised name.
        exceptions: for each pin that was not met, the version that was there (None: not installed).
        reason: why, in the words of whoever saved it.
    """

    saved: float
    who: str
    python: str
    versions: Mapping[str, str] = field(repr=False)
    exceptions: Mapping[str, str | None] = field(default_factory=dict)
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the node keeps it."""
        return {
            "schema": SCHEMA,
            "saved": self.saved,
            "who": self.who,
            "python": self.python,
            "versions": dict(self.versions),
            "exceptions": dict(self.exceptions),
            "reason": self.reason,
        }


def parse_baseline(raw: Mapping[str, Any] | None) -> Baseline | None:
    """A baseline from the node, or None if there is none or it is not one."""
    if not raw or raw.get("schema") != SCHEMA:
        return None
    return Baseline(
        saved=float(raw.get("saved") or 0.0),
        who=str(raw.get("who", "")),
        python=str(raw.get("python", "")),
        versions=dict(raw.get("versions") or {}),
        exceptions=dict(raw.get("exceptions") or {}),
        reason=str(raw.get("reason", "")),
    )


def take(snapshot: Snapshot, checks: list[Check], *, saved: float, who: str, reason: str) -> Baseline:
    """A baseline of this snapshot; pins that are not met are recorded as exceptions."""
    installed = snapshot.installed()
    broken = [c.id.removeprefix("pin:") for c in checks if c.id.startswith("pin:")]
    return Baseline(
        saved=saved,
        who=who,
        python=snapshot.python,
        versions={key: dist.version for key, dist in sorted(installed.items())},
        exceptions={key: installed[key].version if key in installed else None for key in broken},
        reason=reason,
    )


def check_drift(snapshot: Snapshot, baseline: Baseline | None) -> list[Check]:
    """What was added, removed or moved since the baseline was saved.

    A package that moved or is gone is a failure: it is how a working server stops loading its model. One that was
    added is only told.
    """
    if baseline is None:
        return [
            Check(
                "baseline",
                Severity.INFO,
                "no baseline is saved: when the server runs well, `surgeon verify-env --save` records one",
            )
        ]
    present = snapshot.installed()
    found: list[Check] = []
    for key, version in sorted(baseline.versions.items()):
        now = present.get(key)
        if now is None:
            found.append(
                Check(
                    f"drift:{key}",
                    Severity.FAIL,
                    f"{key} {version} was removed since the baseline",
                    repair=(f"{key}=={version}",),
                )
            )
        elif now.version != version:
            found.append(
                Check(
                    f"drift:{key}",
                    Severity.FAIL,
                    f"{key} moved from {version} to {now.version} since the baseline",
                    (now.dist_info,) if now.dist_info else (),
                    repair=(f"{key}=={version}",),
                )
            )
    found.extend(
        Check(f"drift:{key}", Severity.INFO, f"{key} {dist.version} was added since the baseline")
        for key, dist in sorted(present.items())
        if key not in baseline.versions
    )
    if any(c.severity is Severity.FAIL for c in found):
        return found
    return [
        *found,
        Check("baseline", Severity.OK, f"nothing moved since the baseline ({len(baseline.versions)} packages)"),
    ]
