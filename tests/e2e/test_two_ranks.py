"""Two real tensor-parallel ranks: the beacons of both are demanded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from surgeon.lab import lifecycle
from surgeon.lab.loopback import generate
from surgeon.lab.paths import paths
from tests.support.command import surgeon
from tests.support.witness import from_wheel, topk_file

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]


def test_a_rank_that_misses_the_patch_fails_the_gate_and_everything_comes_back(
    lab_up: Callable[[lifecycle.Wanted], lifecycle.Description],
) -> None:
    """With the settings unreadable to the second rank, apply exits 6 and restores; without it both prove it."""
    lab = lab_up(lifecycle.Wanted(ranks=2))
    path = topk_file(lab)
    fault = {"unreadable": {"name": "_surgeon_oea.json", "process": 2}}
    paths().faults.write_text(json.dumps(fault), encoding="utf-8")
    try:
        failed = surgeon("apply", "oea", "--k0", "4", "--host", "lab", "--yes", "--no-bench", "--json")
    finally:
        paths().faults.unlink()
    assert failed.code == 6, failed.stdout + failed.stderr
    assert "TP1" in failed.problem["message"]
    assert "rolled back" in failed.problem["message"]
    assert path.read_bytes() == from_wheel("0.5.23")
    assert not list(path.parent.glob("_surgeon*"))
    assert [c.tokens for c in generate(lab.port, 4, max_new_tokens=8)] == [8, 8, 8, 8]
    kinds = [(r["kind"], r["status"]) for r in surgeon("history", "--host", "lab", "--json").result["revisions"]]
    assert kinds == [("apply", "rolled-back"), ("rollback", "applied")]

    applied = surgeon("apply", "oea", "--k0", "4", "--host", "lab", "--yes", "--no-bench", "--json")
    assert applied.code == 0, applied.stdout + applied.stderr
    ranks = surgeon("status", "--host", "lab", "--json").result["ranks"]
    assert sorted(r["beacon"]["rank"] for r in ranks) == [0, 1]
    assert {r["beacon"]["patch_hash"] for r in ranks} == {applied.result["patch_hash"]}
    back = surgeon("rollback", "--host", "lab", "--yes", "--no-restart", "--json")
    assert back.code == 0, back.stdout + back.stderr
    assert path.read_bytes() == from_wheel("0.5.23")
