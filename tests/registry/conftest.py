"""A machine whose settings name no index, and an index of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.local_index import LocalIndex, local_index

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and cache, and no variable of pip or uv."""
    home = tmp_path / "home"
    home.mkdir()
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    monkeypatch.setenv("SURGEON_CACHE_DIR", str(tmp_path / "cache"))
    return home


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    """An index with nothing in it yet."""
    with local_index(tmp_path / "index") as served:
        yield served
