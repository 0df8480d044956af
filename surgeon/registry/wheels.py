"""sglang's wheels: fetched once with pip, kept in the cache, unpacked on demand."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from surgeon.cache import cache_root, locked
from surgeon.errors import SurgeonError
from surgeon.registry import index as registry

_DOWNLOAD_TIMEOUT_S = 900


def folder() -> Path:
    """Where wheels are kept, as the index gave them."""
    return cache_root() / "wheels"


def cached(version: str) -> Path | None:
    """The wheel of one sglang release, if the cache has it.

    Args:
        version: the release, for example ``"0.5.23"``.
    """
    found = sorted(folder().glob(f"sglang-{version}-*.whl"))
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
    kept = folder()
    kept.mkdir(parents=True, exist_ok=True)
    with locked(f"wheel-{version}"):
        found = cached(version)
        if found is not None:
            return found
        with tempfile.TemporaryDirectory(dir=kept, prefix=".fetch-") as temporary:
            _download(version, Path(temporary))
            (wheel,) = Path(temporary).glob("*.whl")
            return wheel.rename(kept / wheel.name)


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
    unpacked = folder() / f"sglang-{version}"
    with locked(f"unpack-{version}"):
        if not unpacked.is_dir():
            temporary = Path(tempfile.mkdtemp(dir=unpacked.parent, prefix=".unpack-"))
            try:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(temporary)
                temporary.rename(unpacked)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    return unpacked


def fetch_from(index: registry.Index, version: str) -> Path:
    """The wheel of one release from one index; for reading.

    Args:
        index: where to get it. What comes from an index that is not this machine's own is kept apart, so that it is
            never taken for one that may be installed here.
        version: the release.

    Returns:
        The ``.whl`` file in the cache.

    Raises:
        RegistryError: it could not be had.
    """
    kept = folder() if index.own else folder() / f"from-{hashlib.sha256(index.shown.encode()).hexdigest()[:12]}"
    found = sorted(kept.glob(f"sglang-{version}-*.whl"))
    if found:
        return found[0]
    kept.mkdir(parents=True, exist_ok=True)
    with locked(f"wheel-{kept.name}-{version}"), tempfile.TemporaryDirectory(dir=kept, prefix=".fetch-") as temporary:
        words = ("download", "-vv", "--no-deps", "--only-binary=:all:", *registry.target(), "--dest", temporary)
        registry.run(index, (*words, f"sglang=={version}"), timeout_s=_DOWNLOAD_TIMEOUT_S)
        (wheel,) = Path(temporary).glob("*.whl")
        return wheel.rename(kept / wheel.name)


def _download(version: str, into: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
        *("--no-deps", "--only-binary=:all:", *registry.target()),
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
