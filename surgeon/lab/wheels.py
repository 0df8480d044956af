"""sglang's wheels: fetched once with pip, kept in the cache, unpacked on demand."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from surgeon.errors import SurgeonError
from surgeon.lab.paths import locked, paths

# sglang 0.5.23's wheel is built for CPython 3.11 only, older ones for any Python 3: this asks for either,
# whatever interpreter runs surgeon.
_WHEEL_PYTHON = "3.11"
_WHEEL_PLATFORM = "manylinux_2_34_x86_64"
_DOWNLOAD_TIMEOUT_S = 900


def cached(version: str) -> Path | None:
    """The wheel of one sglang release, if the cache has it.

    Args:
        version: the release, for example ``"0.5.23"``.
    """
    found = sorted(paths().wheels.glob(f"sglang-{version}-*.whl"))
    return found[0] if found else None


def fetch(version: str) -> Path:
    """The wheel of one sglang release, downloaded (10 to 40 MB) unless the cache has it.

    Args:
        version: the release, for example ``"0.5.23"``.

    Returns:
        The ``.whl`` file in the cache. It is complete: a download is renamed into place when it is done.

    Raises:
        SurgeonError: pip could not get it.
    """
    found = cached(version)
    if found is not None:
        return found
    folder = paths().wheels
    folder.mkdir(parents=True, exist_ok=True)
    with locked(f"wheel-{version}"):
        found = cached(version)
        if found is not None:
            return found
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            _download(version, Path(temporary))
            (wheel,) = Path(temporary).glob("*.whl")
            return wheel.rename(folder / wheel.name)


def unpack(version: str) -> Path:
    """One sglang release as ``pip install`` would lay it out, for reading; copy it before changing anything.

    Args:
        version: the release, for example ``"0.5.23"``.

    Returns:
        A folder that holds ``sglang/`` and ``sglang-<version>.dist-info/``, shared by everyone who asks.

    Raises:
        SurgeonError: the wheel could not be had.
    """
    wheel = fetch(version)
    folder = paths().wheels / f"sglang-{version}"
    with locked(f"unpack-{version}"):
        if not folder.is_dir():
            temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpack-"))
            try:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(temporary)
                temporary.rename(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    return folder


def _download(version: str, into: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
        *("--no-deps", "--only-binary=:all:", "--python-version", _WHEEL_PYTHON),
        *(() if sys.platform == "linux" else ("--platform", _WHEEL_PLATFORM)),
        *("--dest", str(into), f"sglang=={version}"),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SurgeonError(
            f"Downloading the wheel of sglang {version} took more than {_DOWNLOAD_TIMEOUT_S} s.",
            advice="Look at the network, or at the index that pip uses (`pip config list`).",
            where=f"sglang=={version}",
        ) from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise SurgeonError(
            f"pip could not download the wheel of sglang {version}: {last[0]}",
            advice=f"Try it by hand: {' '.join(command)}",
            where=f"sglang=={version}",
        )
