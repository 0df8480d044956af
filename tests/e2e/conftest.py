"""The lab, for tests that need a whole server; one runs at a time, and the last one is taken down at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from surgeon.lab import lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A lab may have to be built first: the download and the unpacking of torch take minutes.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session")
def lab_up() -> Iterator[Callable[[lifecycle.Wanted], lifecycle.Description]]:
    """Bring up the lab that is asked for, with the package as its wheel brings it and an empty node."""

    def up(wanted: lifecycle.Wanted) -> lifecycle.Description:
        return lifecycle.up(wanted, fresh=True).description

    yield up
    lifecycle.down()
