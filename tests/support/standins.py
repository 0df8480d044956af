"""Wheels made by hand and virtual environments without a network: what pip really does, with packages of ten lines."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import venv
import zipfile
from typing import TYPE_CHECKING

from surgeon.environment.snapshot import Snapshot, parse_distributions
from surgeon.node.agent import packages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def wheel(
    folder: Path, name: str, version: str, *, requires: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> Path:
    """Write a wheel that pip installs.

    Args:
        folder: where to.
        name: of the distribution, and of its one empty module unless ``files`` says otherwise.
        version: its version.
        requires: its Requires-Dist lines.
        files: text by path inside the wheel.
    """
    contents = dict(files if files is not None else {f"{name}.py": f'__version__ = "{version}"\n'})
    info = f"{name}-{version}.dist-info"
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    contents[f"{info}/METADATA"] = "\n".join(head) + "\n"
    contents[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return target


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


class Environment:
    """A virtual environment that holds nothing, and a pip that sees no index.

    Args:
        folder: where it is made.
        wheels: the only place where pip looks.
    """

    def __init__(self, folder: Path, wheels: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        self.wheels = wheels
        (self.site_packages,) = (folder / "lib").glob("python3.*/site-packages")

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pip on this environment; its output is kept, and it may fail."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        return subprocess.run(
            [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Install, from the stand-in wheels only."""
        return self.pip("install", "--no-index", "--find-links", str(self.wheels), "--quiet", *arguments)

    def snapshot(self, package: str) -> Snapshot:
        """What surgeon's agent reads in this environment.

        Args:
            package: the distribution whose pins count.
        """
        raw = packages.distributions([str(self.site_packages)])
        (own,) = (one for one in raw if one["name"] == package)
        return Snapshot(
            python=str(self.python),
            python_version=".".join(map(str, sys.version_info[:3])),
            package=package,
            package_version=own["version"],
            requires=tuple(packages.requires(own["dist_info"])),
            distributions=parse_distributions(raw),
        )
