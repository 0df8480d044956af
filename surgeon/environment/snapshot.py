"""What a node's environment looks like: the facts that the rules of this room judge."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class Distribution:
    """One installed distribution, as its dist-info folder says."""

    name: str
    version: str
    dist_info: str = ""
    installer: str = ""

    @property
    def key(self) -> str:
        """The name as PEP 503 normalises it."""
        return normalise(self.name)


@dataclass(frozen=True)
class Snapshot:
    """An environment at one moment.

    Attributes:
        python: path of the interpreter.
        python_version: for example ``3.11.7``.
        package: the distribution whose pins are checked.
        package_version: its version.
        requires: its Requires-Dist lines.
        distributions: everything installed, duplicates included.
        machine: the node's architecture as ``uname -m`` says it; markers ask for it.
    """

    python: str
    python_version: str
    package: str
    package_version: str
    requires: tuple[str, ...]
    distributions: tuple[Distribution, ...] = field(repr=False)
    machine: str = "x86_64"

    def installed(self) -> dict[str, Distribution]:
        """By normalised name; of duplicates the first on sys.path, which is the one that is imported."""
        found: dict[str, Distribution] = {}
        for dist in self.distributions:
            found.setdefault(dist.key, dist)
        return found

    def duplicates(self) -> dict[str, tuple[Distribution, ...]]:
        """Names that have more than one dist-info."""
        groups: dict[str, list[Distribution]] = {}
        for dist in self.distributions:
            groups.setdefault(dist.key, []).append(dist)
        return {key: tuple(group) for key, group in groups.items() if len(group) > 1}


def normalise(name: str) -> str:
    """A distribution's name by PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_distributions(raw: Iterable[Mapping[str, Any]]) -> tuple[Distribution, ...]:
    """Distributions from a survey's list."""
    return tuple(
        Distribution(
            str(d.get("name", "")),
            str(d.get("version", "")),
            str(d.get("dist_info", "")),
            str(d.get("installer") or ""),
        )
        for d in raw
    )
