"""A fake sglang and a node to look at it from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.local_node import local_node
from tests.support.servers import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from surgeon.node.client import Node


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    """An installed sglang; a test starts it."""
    with FakeServer.install(tmp_path / "fake") as server:
        yield server


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """This machine, with a state directory of its own."""
    with local_node(tmp_path / "state") as here:
        # The agent's own file is sent with the first call; the tests' deadlines are for what comes after.
        here.call("ledger", {"site_id": "0" * 12})
        yield here
