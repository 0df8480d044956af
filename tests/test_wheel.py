"""The wheel, as people install it: built, put into an environment of its own, and run away from the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from surgeon import patches
from surgeon.node.bundle import bundle
from surgeon.registry.wheels import unpack
from tests.support.standins import Environment

TOP = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this working tree, by the build backend that is installed here."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(TOP)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("surgeon-*.whl")
    return built


class Installed:
    """An environment with the wheel, and a folder to run it in."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        environment = Environment(folder / "venv", wheel.parent)
        done = environment.pip("install", "--no-index", "--no-deps", "--quiet", str(wheel))
        assert done.returncode == 0, done.stderr
        # What the wheel depends on is taken from here instead of from an index. A path in a .pth file is only added to
        # the import path: the editable surgeon there stays out of sight.
        (environment.site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        self.bin = environment.python.parent
        self.site_packages = environment.site_packages
        self.cwd = folder / "elsewhere"
        self.cwd.mkdir()

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of the environment's programs far from the repository."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SURGEON_"))}
        return subprocess.run(
            [self.bin / program, *arguments],
            env=kept | {"HOME": str(self.cwd)},
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, installed by pip."""
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    """Every module, the patches and recipes of the repository byte for byte; no test, no bytecode."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    assert {name.split("/")[0] for name in held} == {"surgeon", f"surgeon-{wheel.name.split('-')[1]}.dist-info"}
    assert not [name for name in held if name.endswith(".pyc")]
    expected = {f"surgeon/{p.relative_to(TOP / 'surgeon')}" for p in (TOP / "surgeon").rglob("*.py")}
    assert {name for name in held if name.endswith(".py") and "/_data/" not in name} == expected
    assert "surgeon/py.typed" in held
    for path in (TOP / "surgeon" / "bench" / "data").glob("*.toml"):
        assert held[str(path.relative_to(TOP))] == path.read_bytes()
    for kind in ("patches", "recipes"):
        for path in (TOP / kind).rglob("*.toml"):
            assert held[f"surgeon/_data/{path.relative_to(TOP)}"] == path.read_bytes()
    assert held["surgeon/_data/patches/oea/runtime.py"] == (TOP / "patches/oea/runtime.py").read_bytes()


def test_help_and_version_run_from_the_wheel(installed: Installed) -> None:
    """The console script starts, and imports the installed package rather than the repository's."""
    shown = installed.run("surgeon", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    for command in ("inspect", "apply", "rollback", "verify-env", "lab"):
        assert command in shown.stdout
    assert installed.run("surgeon", "--version").stdout == "surgeon 0.1.0\n"
    origin = installed.run("python", "-c", "import surgeon; print(surgeon.__file__)").stdout.strip()
    assert origin == str(installed.site_packages / "surgeon" / "__init__.py")


def test_the_wheel_ships_the_agent_and_the_patch_of_the_repository(installed: Installed) -> None:
    """What a node would be sent from the wheel is what it would be sent from here."""
    code = """
from surgeon.node.bundle import bundle
from surgeon.patches import load
print(load("oea").hash, bundle().sha256)
"""
    said = installed.run("python", "-c", code)
    assert said.stdout.split() == [patches.load("oea").hash, bundle().sha256], said.stderr


@pytest.mark.wheels
def test_inspect_and_a_dry_run_work_away_from_the_repository(installed: Installed) -> None:
    """On a real release: the site is found, and the diff carries the stamp of the shipped patch."""
    patch = patches.load("oea")
    site = str(unpack("0.5.9"))
    seen = installed.run("surgeon", "inspect", "topk", "--site", site, "--json")
    assert json.loads(seen.stdout)["result"]["site"]["outcome"] == "found", seen.stderr
    planned = installed.run("surgeon", "apply", "oea", "--dry-run", "--site", site)
    assert planned.returncode == 0, planned.stderr
    assert f"+    # >>> surgeon oea {patch.version} {patch.stamp}" in planned.stdout
