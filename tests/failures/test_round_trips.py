"""How often a command crosses the wire: people wait for each crossing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.bed import Bed

pytestmark = pytest.mark.wheels


def crossings(stderr: str) -> int:
    """What ``--verbose`` says of the transport's counter."""
    found = re.search(r"(\d+) round trips? to ", stderr)
    assert found is not None, stderr
    return int(found[1])


def test_inspect_takes_at_most_three_round_trips_the_first_time_and_one_from_then_on(serving: Bed) -> None:
    """The first command also brings the agent; afterwards one survey answers everything."""
    first = serving.surgeon("inspect", "topk", "--verbose")
    again = serving.surgeon("inspect", "topk", "--verbose")
    assert (first.code, again.code) == (0, 0)
    assert crossings(first.stderr) <= 3
    assert crossings(again.stderr) == 1


def test_a_write_without_restart_takes_two_round_trips(serving: Bed) -> None:
    """Survey and commit: the commit takes the lease, closes its revision and lets the lease go itself."""
    serving.surgeon("inspect", "topk")
    applied = serving.surgeon("apply", "oea", "--k0", "4", "--yes", "--no-restart", "--verbose")
    assert applied.code == 0, applied.stderr
    assert crossings(applied.stderr) == 2
