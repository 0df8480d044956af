"""Where the lab keeps things: one cache folder that several clones share."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def cache_root() -> Path:
    """The cache folder: ``$SURGEON_CACHE_DIR``, else the platform's own place for caches.

    Returns:
        An absolute path, not created.
    """
    chosen = os.environ.get("SURGEON_CACHE_DIR")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("surgeon").absolute()


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


@contextlib.contextmanager
def locked(name: str, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold one of the cache's locks, so that two clones do not build the same thing at once.

    Args:
        name: what is being built.
        waiting: called once if another process holds the lock, before waiting for it.

    Yields:
        Nothing; the lock ends with the block, or with the process.
    """
    folder = cache_root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
