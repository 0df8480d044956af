"""Where the lab keeps things: one cache folder that several clones share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.cache import cache_root, locked

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LabPaths", "cache_root", "locked", "paths"]


@dataclass(frozen=True)
class LabPaths:
    """The folders of one cache.

    Attributes:
        root: the cache folder.
    """

    root: Path

    @property
    def wheels(self) -> Path:
        """Wheels as the index gave them."""
        return self.root / "wheels"

    @property
    def torch(self) -> Path:
        """One folder per torch build; every environment sees it through a ``.pth`` file."""
        return self.root / "torch"

    @property
    def lab(self) -> Path:
        """Environments, models and the node."""
        return self.root / "lab"

    @property
    def models(self) -> Path:
        """One folder per random model."""
        return self.lab / "models"

    @property
    def node(self) -> Path:
        """The node's home: keys, SSH configuration, state, logs."""
        return self.lab / "node"

    @property
    def state(self) -> Path:
        """Surgeon's state on the node, in place of ``/var/lib/surgeon``."""
        return self.node / "state"

    @property
    def logs(self) -> Path:
        """Logs of the server and of the SSH server."""
        return self.node / "logs"

    @property
    def recordings(self) -> Path:
        """Where sglang's expert-distribution recorder writes."""
        return self.node / "recordings"

    @property
    def faults(self) -> Path:
        """The file that injects faults into the server; normally absent."""
        return self.node / "faults.json"

    @property
    def description(self) -> Path:
        """What is running now, as JSON."""
        return self.lab / "lab.json"


def paths() -> LabPaths:
    """The folders of the cache in force."""
    return LabPaths(cache_root())
