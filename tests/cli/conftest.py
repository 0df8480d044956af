"""A person's home for the tests of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from surgeon.lab.paths import cache_root
from surgeon.registry.wheels import unpack

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and current folder: nobody's surgeon.toml or variables decide a test.

    The cache stays where it is: it is no setting, and holds the wheels.
    """
    monkeypatch.setenv("SURGEON_CACHE_DIR", str(cache_root()))
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / ".config"))
    for name in ("HOST", "PROFILE", "CONFIG", "PORT", "PYTHON", "NODE_PYTHON", "STATE_DIR", "HOST_KEY_POLICY"):
        monkeypatch.delenv(f"SURGEON_{name}", raising=False)
    return folder


@pytest.fixture
def site() -> Path:
    """sglang 0.5.9 as pip lays it out; for reading only."""  # noqa: D403 - sglang is spelt so
    return unpack("0.5.9")
