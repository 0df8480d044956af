"""Two real tensor-parallel ranks: both must prove the patch, change settings at one pass, and route alike."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from surgeon.bench.active import from_shares
from surgeon.lab import lifecycle, recorder
from surgeon.lab.loopback import generate, post
from surgeon.lab.paths import paths
from tests.support.command import surgeon
from tests.support.lab import record
from tests.support.witness import cut_files, from_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]

ROWS = 16
LONG_PROMPT = 180


def load(lab: lifecycle.Description) -> None:
    """One long prompt, then sixteen requests that decode together."""
    post(lab.port, "/flush_cache")
    generate(lab.port, 1, input_len=LONG_PROMPT, max_new_tokens=1, seed=4711)
    for seed in (21, 22):
        generate(lab.port, ROWS, input_len=16, max_new_tokens=32, seed=seed, temperature=1.0)


def change(*words: str) -> None:
    """Change settings of the running server."""
    answer = surgeon("set", "oea", *words, "--host", "lab", "--yes", "--json")
    assert answer.code == 0, answer.stdout + answer.stderr


def of_rank(passes: Sequence[recorder.Pass], rank: int) -> list[recorder.Pass]:
    """One rank's recording."""
    return [one for one in passes if one.rank == rank]


def expected_from_shares(passes: Sequence[recorder.Pass]) -> float:
    """T by each expert's own share of the rows, averaged over layers: a bias makes some experts likelier."""
    rows = sum(p.rows for p in passes)
    layers = len(passes[0].counts)
    shares = [[sum(p.counts[layer][e] for p in passes) / rows for e in range(64)] for layer in range(layers)]
    return sum(from_shares(layer, ROWS) for layer in shares) / layers


def test_ranks_prove_the_patch_or_nothing_stays_and_change_settings_as_one(
    lab_up: Callable[[lifecycle.Wanted], lifecycle.Description],
) -> None:
    """Settings unreadable to the second rank: exit 6 and as before. Else both route alike, also across changes."""
    lab = lab_up(lifecycle.Wanted(ranks=2, bias=0.05))
    originals = from_wheel("0.5.23")
    fault = {"unreadable": {"name": "_surgeon_oea.json", "process": 2}}
    paths().faults.write_text(json.dumps(fault), encoding="utf-8")
    try:
        failed = surgeon("apply", "oea", "--k0", "4", "--host", "lab", "--yes", "--no-bench", "--json")
    finally:
        paths().faults.unlink()
    assert failed.code == 6, failed.stdout + failed.stderr
    assert "TP1" in failed.problem["message"]
    assert "rolled back" in failed.problem["message"]
    assert [path.read_bytes() for path in cut_files(lab)] == originals
    assert not list(cut_files(lab)[0].parent.glob("_surgeon*"))
    kinds = [(r["kind"], r["status"]) for r in surgeon("history", "--host", "lab", "--json").result["revisions"]]
    assert kinds == [("apply", "rolled-back"), ("rollback", "applied")]
    native = record(lab, lambda: load(lab))

    applied = surgeon("apply", "oea", "--k0", "4", "--host", "lab", "--yes", "--no-bench", "--json")
    assert applied.code == 0, applied.stdout + applied.stderr
    ranks = surgeon("status", "--host", "lab", "--json").result["ranks"]
    assert sorted(r["beacon"]["rank"] for r in ranks) == [0, 1]
    assert {r["beacon"]["patch_hash"] for r in ranks} == {applied.result["patch_hash"]}

    def across_a_change() -> None:
        load(lab)
        change("--k0", "2")
        load(lab)

    passes = record(lab, across_a_change)
    assert [p.counts for p in of_rank(passes, 0)] == [p.counts for p in of_rank(passes, 1)]
    ranks = surgeon("status", "--host", "lab", "--json").result["ranks"]
    assert len({r["beacon"]["in_force"]["from_pass"] for r in ranks}) == 1
    assert {r["beacon"]["settings"]["k0"] for r in ranks} == {2}

    # Experts are ranked with the bias and not weighted with it; prefill of one long prompt is as unpatched.
    before = [p for p in of_rank(native, 0) if p.rows == ROWS]
    unpatched = recorder.mean_active(before, rows=ROWS)
    assert unpatched == pytest.approx(expected_from_shares(before), rel=0.06)
    decode = [p for p in of_rank(passes, 0) if p.rows == ROWS]
    four, two = decode[: len(decode) // 2], decode[len(decode) // 2 :]
    assert recorder.mean_active(four, rows=ROWS) <= 0.85 * unpatched
    assert recorder.mean_active(two, rows=ROWS) <= 0.85 * recorder.mean_active(four, rows=ROWS)
    long = [p.counts for p in of_rank(native, 0) if p.rows == LONG_PROMPT]
    assert [p.counts for p in of_rank(passes, 0) if p.rows == LONG_PROMPT] == long * 2

    back = surgeon("rollback", "--host", "lab", "--yes", "--no-restart", "--json")
    assert back.code == 0, back.stdout + back.stderr
    assert [path.read_bytes() for path in cut_files(lab)] == originals
