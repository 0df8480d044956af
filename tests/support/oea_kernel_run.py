"""Runs random cases of the fused operator in Triton's interpreter, in a process of its own: prints one line of JSON.

The interpreter must be chosen before Triton is imported, and once chosen it stays; so this is a program, not a fixture.
Started by tests/patches/oea/test_kernel.py with TRITON_INTERPRET=1 and SURGEON_LAYERS (folders with torch and Triton)
as ``oea_kernel_run.py FIRST COUNT [--unchanged]``: seeds from FIRST on. ``--unchanged`` takes the interpreter as it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

sys.path.extend(os.environ["SURGEON_LAYERS"].split(os.pathsep))
sys.path.insert(0, os.fspath(__file__).rpartition("/tests/")[0])

import torch

from tests.gpu import cases
from tests.support import oea_reference as reference

torch.set_num_threads(1)
warnings.simplefilter("ignore")  # numpy warns of each infinity and NaN that a case is about
_TOLERANCE = 1e-6


def by_loops(case: cases.Case, scores: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> bool:
    """Compare what the kernel gave with plain loops; False where no two roundings need agree."""
    given_weights, given_ids, _, bias, _, _, rule = case.given
    policy, k = case.policy, rule.k
    experts = scores.shape[1]
    rank = scores if bias is None else scores + bias
    wanted = reference.Wanted(
        k0=policy.schedule[0][2],
        p=policy.p,
        k_max=policy.k_max or None,
        max_rank=policy.max_rank or None,
        refill=policy.refill,
        native_total=policy.denominator == "native_topk",
        budget=policy.budget,
        by_all=policy.utility == "all",
    )
    model = reference.Model(
        k=k,
        renormalize=rule.renormalize,
        scale=rule.scale,
        groups=rule.groups,
        groups_kept=rule.groups_kept,
        paired=rule.scoring == "sigmoid",
    )
    silent = set(range(len(given_ids)))
    if case.is_touched:
        for i in range(case.held):
            row = given_ids[i].tolist()
            sound = all(0 <= one < experts for one in row[:k]) and all(one >= experts for one in row[k:])
            if sound and not rank[i].isnan().any() and not (rule.scoring == "sqrtsoftplus" and scores[i].isinf().any()):
                silent.discard(i)
    try:
        expected = reference.route(
            scores.tolist(), rank.tolist(), given_ids[:, :k].tolist(), model, wanted, frozenset(silent)
        )
    except reference.TooCloseToTell:
        return False
    weights, ids, changed = found
    assert ids[:, :k].tolist() == [row.experts for row in expected], "ids are not those of the plain loops"
    assert changed.tolist() == [row.changed for row in expected]
    for i, row in enumerate(expected):
        for slot, expert in enumerate(row.experts if row.changed else ()):
            right = row.weights.get(expert, 0.0)
            assert abs(weights[i, slot].item() - right) <= _TOLERANCE * max(1.0, abs(right)), "a weight"
        assert torch.equal(weights[i, k:], given_weights[i, k:])
    return True


def main(first: int, count: int, *, unchanged: bool) -> dict[str, Any]:
    """Run cases; the first that fails ends it, named by its seed."""
    if not unchanged:
        from tests.support.quick_triton import quicken

        quicken("_or")
    began = time.monotonic()
    told = {"cases": 0, "rows": 0, "changed": 0, "by_loops": 0}
    for seed in range(first, first + count):
        case = cases.draw(seed)
        try:
            scores, found = cases.check(case)
            told["by_loops"] += case.is_topk and by_loops(case, scores, found)
        except Exception as error:
            error.add_note(f"seed {seed}: {case}")
            raise
        told["cases"] += 1
        told["rows"] += len(case.given[1])
        told["changed"] += int(found[2].sum())
    return {**told, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), unchanged="--unchanged" in sys.argv[3:])))  # noqa: T201 - its answer
