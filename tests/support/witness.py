"""What surgeon is compared with: the files as the registry's wheels bring them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.registry import wheels

if TYPE_CHECKING:
    from surgeon.lab import lifecycle

MEMBERS = ("sglang/srt/layers/moe/topk.py", "sglang/srt/model_executor/model_runner.py")


def cut_files(lab: lifecycle.Description) -> list[Path]:
    """The installed files that surgeon cuts."""
    site = Path(lab.python).parent.parent
    return [path for member in MEMBERS for path in site.glob(f"lib/python*/site-packages/{member}")]


def from_wheel(version: str) -> list[bytes]:
    """The same files as the registry's wheel brings them: the outside witness of a rollback."""
    with zipfile.ZipFile(wheels.fetch(version)) as wheel:
        return [wheel.read(member) for member in MEMBERS]
