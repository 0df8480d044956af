"""`python -m tests.support.oracle WHEEL 9.0`: the cells of one release on one GPU, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.support.oracle.derive import Release


def main() -> None:
    """Derive the cells and print them."""
    major, minor = (int(part) for part in sys.argv[2].split("."))
    release = Release(Path(sys.argv[1]), (major, minor))
    print(json.dumps([asdict(cell) for cell in release.cells(quick="--quick" in sys.argv[3:])]))  # noqa: T201


main()
