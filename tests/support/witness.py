"""What surgeon is compared with: the files as the registry's wheels bring them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.registry import wheels

if TYPE_CHECKING:
    from surgeon.lab import lifecycle

MEMBER = "sglang/srt/layers/moe/topk.py"


def topk_file(lab: lifecycle.Description) -> Path:
    """The installed file."""
    (path,) = Path(lab.python).parent.parent.glob(f"lib/python*/site-packages/{MEMBER}")
    return path


def from_wheel(version: str) -> bytes:
    """The file as the registry's wheel brings it: the outside witness of a rollback."""
    with zipfile.ZipFile(wheels.fetch(version)) as wheel:
        return wheel.read(MEMBER)
