"""The cache folder on this machine, which several clones and programs share."""

from __future__ import annotations

import contextlib
import fcntl
import os
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
