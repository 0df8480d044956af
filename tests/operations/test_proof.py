"""What the settings file and the beacons on a node say, before anything is written or demanded."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from surgeon import patches
from surgeon.operations import proof

OEA = patches.load("oea")


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, 8),
        ({"min_rows": 16}, 16),
        ({"max_rows": 4}, 4),
        ({"k0_schedule": [[1, 2, 8], [3, 4, 6], [5, 8, 5], [9, 64, 4]]}, 9),
        ({"k0_schedule": [[1, 2, 8], [3, 4, 4], [5, 64, 6]]}, 4),
        ({"k0_schedule": [], "min_rows": 1, "max_rows": 64}, 8),
    ],
)
def test_the_proof_sends_as_many_rows_as_the_settings_act_on(settings: dict[str, Any], rows: int) -> None:
    """Eight where that lies inside; else the nearest number of the range that keeps the fewest experts."""
    assert proof.rows_that_count(OEA, settings) == rows


@pytest.mark.parametrize("text", [None, "", "{", "[]", "7"])
def test_a_settings_file_that_cannot_be_read_is_generation_0_and_wants_nothing(text: str | None) -> None:
    """So that the next one written counts from there."""
    assert proof.read_settings(text) == {}
    assert proof.present_settings(text, {"k0": 4}) == (0, False)


def test_present_settings_are_compared_by_what_is_wanted_the_switch_included() -> None:
    """How a file was written does not count: generation, pass and folder; being off does."""
    text = json.dumps({"schema": "x", "generation": 3, "at_pass": 9, "beacon_dir": "/b", "enabled": True, "k0": 4})
    assert proof.present_settings(text, {"enabled": True, "k0": 4, "at_pass": None}) == (3, True)
    assert proof.present_settings(text, {"enabled": True, "k0": 5}) == (3, False)
    assert proof.present_settings(text, {"enabled": False, "k0": 4}) == (3, False)


@pytest.mark.parametrize(
    ("beacons", "expected"),
    [
        ((), 4),
        (({"alive": True, "generation": 5, "in_force": {"generation": 5}},), 6),
        (({"alive": True, "generation": 1, "armed": {"generation": 7}},), 8),
        (({"alive": True, "generation": 1, "refused": {"generation": 9}, "armed": None},), 10),
        (({"alive": False, "generation": 99},), 4),
    ],
)
def test_a_new_generation_is_above_all_that_a_living_process_has_seen(beacons: Any, expected: int) -> None:
    """In force, armed or refused: a number that was refused once would be taken for refused again."""
    seen: Any = SimpleNamespace(beside={"settings": {"text": '{"generation": 3}'}}, beacons=beacons)
    assert proof.next_generation(seen) == expected
