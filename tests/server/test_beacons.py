"""What beacons prove."""

from __future__ import annotations

from typing import Any

import pytest

from surgeon.server.beacons import Switch, judge, run_other_code, switches
from surgeon.server.model import Worker

HASH = "a" * 64
WORKERS = tuple(Worker(pid, f"sglang::scheduler_TP{pid - 10}", 1.0, 100 + pid) for pid in (10, 11))


def beacon(worker: int, **changes: Any) -> dict[str, Any]:
    """The beacon of a worker that does all as it should."""
    good = {
        "schema": "surgeon/beacon/1",
        "pid": worker,
        "start_ticks": 100 + worker,
        "alive": True,
        "patch_hash": HASH,
        "generation": 2,
        "settings": {"k0": 4, "enabled": True},
        "settings_source": "file",
        "settings_problem": None,
        "applied": True,
        "written": 5.0,
    }
    return {**good, **changes}


def problems(*beacons: dict[str, Any], **wanted: Any) -> list[str]:
    """Judge beacons against both workers."""
    return judge(beacons, WORKERS, **{"patch_hash": HASH, **wanted})


def test_beacons_of_every_worker_with_the_wanted_patch_are_proof() -> None:
    """All demands at once, and nothing to say."""
    wanted = {"generation": 2, "settings": {"k0": 4}, "need_applied": True}
    assert problems(beacon(10), beacon(11), **wanted) == []


def test_workers_that_run_different_forms_of_the_operator_are_no_proof() -> None:
    """Two forms round differently, so ranks could choose different experts."""
    assert problems(beacon(10, form="triton"), beacon(11, form="triton")) == []
    (found,) = problems(beacon(10, form="triton"), beacon(11, form="torch: no compiler"))
    assert "different forms" in found
    assert "TP1 (pid 11): torch: no compiler" in found


@pytest.mark.parametrize(
    "other",
    [
        {"pid": 99, "start_ticks": 199},
        {"alive": False},
        {"start_ticks": 7},
    ],
)
def test_the_beacon_of_another_process_proves_nothing(other: dict[str, Any]) -> None:
    """A dead process, another pid, or another process with a pid that was given again."""
    (found,) = problems(beacon(10), beacon(11, **other))
    assert found == "sglang::scheduler_TP1 (pid 11) has written no beacon"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch_hash": "b" * 64}, "runs patch bbbbbbbbbbbb; expected aaaaaaaaaaaa"),
        ({"patch_hash": "unset"}, "runs patch unset"),
        ({"settings_problem": "k0: expected 0..64, found 99"}, "refused its settings: k0: expected 0..64"),
        ({"generation": 1}, "generation 1; expected 2"),
        (
            {"settings": {"k0": 8}, "settings_source": "environment"},
            "runs with k0 = 8 (from environment); expected 4",
        ),
        ({"applied": False, "skipped": "rows outside 3..64"}, "re-routed no pass yet: rows outside 3..64"),
        ({"schema": "surgeon/beacon/9"}, "schema 'surgeon/beacon/9'"),
    ],
)
def test_each_demand_that_a_worker_does_not_meet_is_told(change: dict[str, Any], words: str) -> None:
    """With the rank, what was found and what was expected."""
    wanted = {"generation": 2, "settings": {"k0": 4}, "need_applied": True}
    (found,) = problems(beacon(10), beacon(11, **change), **wanted)
    assert found.startswith("sglang::scheduler_TP1 (pid 11) ")
    assert words in found


def test_what_is_not_demanded_is_not_judged() -> None:
    """Before any traffic no pass was re-routed, and that is no fault then."""
    assert problems(beacon(10, applied=False, generation=7), beacon(11, settings={})) == []


def test_of_two_beacons_of_one_worker_the_newer_counts() -> None:
    """Settings that moved to another folder leave the older file behind."""
    assert problems(beacon(10), beacon(11), beacon(11, patch_hash="old", written=1.0)) == []
    assert problems(beacon(10), beacon(11, written=1.0), beacon(11, patch_hash="new")) != []


def test_a_server_without_workers_proves_nothing() -> None:
    """All of none is not every rank."""
    assert judge([beacon(10)], (), patch_hash=HASH) != []


@pytest.mark.parametrize(
    ("beacons", "final"),
    [
        ([], False),
        ([beacon(10), beacon(11, applied=False)], False),
        ([beacon(10, patch_hash="b" * 64, alive=False)], False),
        ([beacon(10), beacon(11, patch_hash="b" * 64)], True),
    ],
    ids=["none-yet", "not-applied-yet", "of-a-dead-process", "other-code"],
)
def test_only_other_code_in_a_living_worker_is_past_waiting_for(beacons: list[dict[str, Any]], *, final: bool) -> None:
    """A beacon may still come or change; what a process has imported it keeps."""
    assert run_other_code(beacons, WORKERS, patch_hash=HASH) is final


def test_how_far_each_rank_has_come_is_read_in_the_order_of_the_workers() -> None:
    """What is armed, refused and in force; a rank that announces no passes cannot change while it runs."""
    counting = {"gate": "forward-mode", "pass": 90, "in_force": {"generation": 2, "from_pass": 40}}
    armed = {**counting, "armed": {"generation": 3, "at_pass": 120, "pass": 88}}
    refused = {**counting, "refused": {"generation": 3, "why": "k0: too odd"}}
    found = switches([beacon(11, **refused), beacon(10, **armed)], WORKERS)
    settings = {"k0": 4, "enabled": True}
    assert found == [
        Switch("sglang::scheduler_TP0 (pid 10)", 90, 2, 40, settings, (3, 120), None),
        Switch("sglang::scheduler_TP1 (pid 11)", 90, 2, 40, settings, None, (3, "k0: too odd")),
    ]
    (fixed,) = switches([beacon(10, gate="row-count", **{"pass": 0})], WORKERS[:1])
    assert (fixed.generation, fixed.passes) == (None, 0)
    assert switches([beacon(10, alive=False)], WORKERS) == []
