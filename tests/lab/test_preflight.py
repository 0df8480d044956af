"""What the lab says when a machine cannot run it, before anything is downloaded."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from surgeon.errors import SurgeonError, UsageError
from surgeon.lab import lifecycle, preflight
from surgeon.lab.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import Callable


class Usage(NamedTuple):
    """As `shutil.disk_usage` answers."""

    total: int
    used: int
    free: int


def fake_python(folder: Path, version: str) -> Path:
    """A program that says it is another Python, since no machine has all versions."""
    path = folder / f"python{version}"
    path.write_text(f"#!/bin/sh\necho '[[{version.replace('.', ', ')}], \"linux\"]'\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_full_disk_is_refused_before_anything_is_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2 GB free, `up` names what it needs and what there is, and downloads nothing."""
    full: Callable[[object], Usage] = lambda _: Usage(10**12, 10**12, 2 * 10**9)  # noqa: E731 - a stand-in
    monkeypatch.setattr(shutil, "disk_usage", full)
    with pytest.raises(SurgeonError, match=r"needs 3\.\d GB of disk; .* has 2\.0 GB free") as refused:
        lifecycle.up(lifecycle.Wanted(sglang="0.5.9"))
    assert refused.value.code == "lab-disk"
    assert "SURGEON_CACHE_DIR" in refused.value.advice
    assert not list(cache.rglob("*.whl"))
    assert not (cache / "torch").exists()


def test_a_disk_with_room_passes(tmp_path: Path) -> None:
    """What fits is not refused, also where the folder does not exist yet."""
    preflight.require_disk(tmp_path / "not" / "yet", 1)


def test_a_python_that_the_wheel_does_not_fit_is_refused_with_the_one_that_would(tmp_path: Path) -> None:
    """0.5.23's wheel is for CPython 3.11 only: the message says so, what was found, and what to type."""
    with pytest.raises(SurgeonError, match=r"0\.5\.23 needs Python 3\.11 .*\(3\.12\)") as refused:
        preflight.choose_python(recipe("0.5.23"), fake_python(tmp_path, "3.12"))
    assert refused.value.code == "lab-python"
    assert "--python" in refused.value.advice


def test_a_python_without_venv_is_named_unusable(tmp_path: Path) -> None:
    """An interpreter that fails the probe is reported, not used."""
    broken = tmp_path / "python3.11"
    broken.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    with pytest.raises(SurgeonError, match="unusable"):
        preflight.choose_python(recipe("0.5.23"), broken)


def test_a_python_that_fits_is_taken(tmp_path: Path) -> None:
    """0.5.9's wheel is pure Python: 3.13 will do."""
    python = fake_python(tmp_path, "3.13")
    chosen = preflight.choose_python(recipe("0.5.9"), python)
    assert (chosen.path, chosen.version, chosen.text) == (python, (3, 13), "3.13")


@pytest.mark.usefixtures("cache", "no_index")
def test_no_package_index_is_said_before_anything_is_fetched() -> None:
    """Without network the lab says that pip reaches no index."""
    python = Path(sys.executable)
    with pytest.raises(SurgeonError, match="reaches no package index") as refused:
        preflight.require_index(python, "test")
    assert refused.value.code == "lab-network"


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab runs on Linux only, and says so."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SurgeonError, match="needs Linux; this is darwin"):
        preflight.require_linux()


def test_more_ranks_than_cores_are_refused() -> None:
    """Each rank needs a core of its own; the message says how many there are."""
    with pytest.raises(UsageError, match=r"--tp 4096 needs one core per rank; this machine lets us use \d+"):
        preflight.cores_per_rank(4096)


def test_a_release_without_a_recipe_is_refused_with_those_that_have_one() -> None:
    """Only releases that were made to run on a CPU can be asked for."""
    with pytest.raises(UsageError, match=r"0\.5\.23 and 0\.5\.9 on a CPU, not 0\.4\.0"):
        lifecycle.up(lifecycle.Wanted(sglang="0.4.0"))
