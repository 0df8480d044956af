"""A node to operate on, for the tests of what can go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.bed import make_bed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.bed import Bed


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """A node with sglang installed; nothing serves."""
    with make_bed(tmp_path / "bed") as node:
        yield node


@pytest.fixture
def serving(bed: Bed) -> Bed:
    """A node whose server runs, with two ranks' worth of nothing wrong."""
    bed.fake.start()
    return bed
