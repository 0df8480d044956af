"""The pins of the installed sglang against what is installed.

A pin that is broken is a warning, not a failure: people override pins on purpose (GLM-5 needs a transformers that
sglang 0.5.9 does not pin), ``pip check`` is red while that works and green after a reinstall has undone it. Whether
the model still loads is answered by building its config (probe.py); whether something moved, by the baseline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.markers import InvalidMarker, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from surgeon.environment.checks import Check, Severity
from surgeon.environment.snapshot import normalise

if TYPE_CHECKING:
    from surgeon.environment.baseline import Baseline
    from surgeon.environment.snapshot import Distribution, Snapshot


def check_pins(snapshot: Snapshot, baseline: Baseline | None) -> list[Check]:
    """One check for each requirement that is not met, or one that says all are.

    Versions are compared by PEP 440 with pre-releases admitted; a local label (``+cu128``) does not count.
    """
    installed = snapshot.installed()
    broken: list[Check] = []
    seen = 0
    for line in snapshot.requires:
        requirement = _parse(line, snapshot)
        if requirement is None:
            continue
        seen += 1
        finding = _judge(requirement, installed.get(normalise(requirement.name)), snapshot, baseline)
        if finding is not None:
            broken.append(finding)
    broken.extend(_duplicates(snapshot))
    if broken:
        return broken
    return [Check("pins", Severity.OK, f"all {seen} pins of {snapshot.package} {snapshot.package_version} are met")]


def _parse(line: str, snapshot: Snapshot) -> Requirement | None:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return None
    if requirement.marker is not None:
        env = {**{k: str(v) for k, v in default_environment().items()}, **_node_markers(snapshot), "extra": ""}
        try:
            if not requirement.marker.evaluate(env):
                return None
        except (InvalidMarker, InvalidVersion):
            return None
    return requirement


def _node_markers(snapshot: Snapshot) -> dict[str, str]:
    # The markers are the node's (always Linux), not those of the machine that surgeon runs on.
    return {
        "python_full_version": snapshot.python_version,
        "python_version": ".".join(snapshot.python_version.split(".")[:2]),
        "platform_machine": snapshot.machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
    }


def _judge(
    requirement: Requirement, found: Distribution | None, snapshot: Snapshot, baseline: Baseline | None
) -> Check | None:
    wanted = str(requirement.specifier) or "any version"
    key = normalise(requirement.name)
    source = f"Requires-Dist of {snapshot.package} {snapshot.package_version}: {requirement}"
    if found is None:
        title = f"{requirement.name} is not installed; {snapshot.package} asks for {wanted}"
    else:
        try:
            met = requirement.specifier.contains(Version(found.version), prereleases=True)
        except InvalidVersion:
            met = False
        if met:
            return None
        title = f"{requirement.name} is {found.version}; {snapshot.package} asks for {wanted}"
    present = found.version if found else None
    if baseline is not None and key in baseline.exceptions and baseline.exceptions[key] == present:
        return Check(f"pin:{key}", Severity.INFO, f"{title} (recorded in the baseline as meant so)", (source,))
    return Check(
        f"pin:{key}",
        Severity.WARN,
        title,
        (source,),
        advice="if this is meant, `surgeon verify-env --save` records it; a reinstall of the package would undo it",
    )


def _duplicates(snapshot: Snapshot) -> list[Check]:
    return [
        Check(
            f"duplicate:{key}",
            Severity.WARN,
            f"{key} is installed {len(group)} times: {', '.join(d.version for d in group)}",
            tuple(d.dist_info for d in group),
            advice="Python imports the first one on sys.path; remove the others",
        )
        for key, group in sorted(snapshot.duplicates().items())
        if len({d.dist_info for d in group}) > 1
    ]
