"""The runtime against plain loops of the paper's algorithms, on random batches of many shapes.

SURGEON_OEA_CASES says how many batches (4000 if it is not set), SURGEON_OEA_SEED which.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import oea_reference as reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

CASES = int(os.environ.get("SURGEON_OEA_CASES", "4000"))
SEED = int(os.environ.get("SURGEON_OEA_SEED", "20251102"))
EXPERTS = (8, 60, 64, 128, 160, 256, 384, 512)
GROUPS = {8: (2, 1), 60: (4, 2), 64: (8, 4), 128: (4, 2), 160: (8, 3), 256: (8, 4), 384: (8, 4), 512: (16, 6)}
# Small batches are the common case here: the reference is loops, and what is special happens when experts run out.
MOST_ROWS = (3, 6, 6, 12, 20, 64)


@dataclass(frozen=True)
class Case:
    """One batch as it stands at the grafted line, with all that select_experts would pass."""

    weights: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    scores: torch.Tensor
    rank_by: torch.Tensor
    model: reference.Model
    names: dict[str, Any]


def scored(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """The scores that a release computes of its logits."""
    wide = logits.float()
    if scoring == "sigmoid":
        return wide.sigmoid()
    return wide.softmax(-1) if scoring == "softmax" else torch.nn.functional.softplus(wide).sqrt()


def model_of(dice: random.Random, experts: int, scoring: str) -> tuple[reference.Model, int, dict[str, Any]]:
    """A model, how many shared experts it fuses in, and how select_experts is told of all that."""
    grouped = scoring != "sqrtsoftplus" and dice.random() < 0.5
    limited = grouped and dice.random() < 0.5
    groups, kept = GROUPS[experts] if limited else (1, 1)
    k = dice.randint(1, min(10, experts - 1, kept * experts // groups))
    # Groups that are renormalised by some kernels and not by others are left alone, see the runtime.
    renormalize = (grouped and scoring == "sigmoid") or dice.random() < 0.7
    scale = dice.choice((None, 1.0, 2.5)) if renormalize else None
    on_output = dice.random() < 0.5
    shared = dice.choice((0, 0, 1, 2)) if renormalize else 0
    model = reference.Model(
        k=k,
        renormalize=renormalize,
        scale=scale if scale and on_output else 1.0,
        groups=groups,
        groups_kept=kept,
        paired=scoring == "sigmoid",
    )
    names = {
        "top_k": k + shared,
        "renormalize": renormalize,
        "use_grouped_topk": grouped,
        "scoring_func": "softmax" if grouped else scoring,
        "num_expert_group": groups if grouped else None,
        "topk_group": kept if grouped else None,
        dice.choice(("num_fused_shared_experts", "num_shared_topk_slots")): shared,
        "routed_scaling_factor": scale,
        "apply_routed_scaling_factor_on_output": on_output,
    }
    return model, shared, names


def case_of(dice: random.Random, experts: int) -> Case:
    """A random batch: scoring, bias, groups, shared columns, scaling, ties, dtypes, infinities."""
    scoring = dice.choice(("softmax", "sigmoid", "sigmoid", "sqrtsoftplus"))
    model, shared, names = model_of(dice, experts, scoring)
    rows = dice.randint(1, dice.choice(MOST_ROWS))
    numbers = torch.Generator().manual_seed(dice.getrandbits(40))
    logits = torch.randn(rows, experts, generator=numbers) * dice.choice((0.3, 1.5, 4.0))
    grain = dice.choice((None, None, 2, 8))  # quantised logits are full of ties
    if grain:
        logits = (logits * grain).round() / grain
    if dice.random() < 0.1:
        for _ in range(3):
            bad = (-math.inf, math.inf) if scoring == "sigmoid" else (-math.inf,)
            logits[dice.randrange(rows), dice.randrange(experts)] = dice.choice(bad)
    logits = logits.to(dice.choice((torch.float32, torch.float32, torch.bfloat16)))
    scores = scored(logits, scoring)
    rank_by = scores
    biased = scoring == "sigmoid" if names["use_grouped_topk"] else scoring != "softmax" and dice.random() < 0.7
    if biased:
        bias = (torch.rand(experts, generator=numbers) * 2 - 1) * dice.choice((0.0, 0.2, 8.0))
        if grain:
            bias = (bias * grain).round() / grain
        rank_by = scores + bias
        names["correction_bias"] = bias
    weights, ids = native(scores, rank_by, model, shared, dice)
    ids = ids.to(dice.choice((torch.int32, torch.int64)))
    return Case(weights, ids, logits, scores, rank_by, model, names)


def native(
    scores: torch.Tensor, rank_by: torch.Tensor, model: reference.Model, shared: int, dice: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the unchanged model chooses, its columns shuffled as unsorted kernels leave them, shared ones last."""
    experts = scores.shape[1]
    ids, weights = [], []
    for score, rank in zip(scores.tolist(), rank_by.tolist(), strict=True):
        row = reference.best_first(rank, model)[: model.k]
        dice.shuffle(row)
        ids.append(row + [experts + i for i in range(shared)])
        weighed = reference.weigh(score, row, model)
        weights.append([weighed[e] for e in row] + [0.4] * shared)
    return torch.tensor(weights), torch.tensor(ids)


def wanted_of(dice: random.Random, model: reference.Model, experts: int) -> reference.Wanted:
    """What is asked for: half the time simplified OEA, else any mixture of what there is."""
    k0 = dice.randint(1, max(1, model.k - 1))
    refill = dice.choice(("native", "native", "strict", "none"))
    if dice.random() < 0.5:
        return reference.Wanted(k0=k0, refill=refill)
    return reference.Wanted(
        k0=dice.choice((0, k0, k0)),
        p=dice.choice((1.0, 1.0, 0.1, 0.3, 0.7, 0.95)),
        k_max=dice.choice((None, None, dice.randint(1, model.k + 1))),
        max_rank=dice.choice((None, None, dice.randint(1, 2 * model.k), dice.randint(1, experts))),
        refill=refill,
        native_total=dice.random() < 0.3,
        budget=dice.choice((0, 0, dice.randint(1, experts))),
        by_all=dice.random() < 0.5,
    )


def asked_of(wanted: reference.Wanted, low: int, high: int) -> dict[str, Any]:
    """The settings that ask for it in passes of low..high rows."""
    return {
        "k0_schedule": ((low, high, wanted.k0),),
        "p": wanted.p,
        "k_max": wanted.k_max or 0,
        "max_rank": wanted.max_rank or 0,
        "refill": wanted.refill,
        "denominator": "native_topk" if wanted.native_total else "kept",
        "budget": wanted.budget,
        "utility": "all" if wanted.by_all else "own_topk",
    }


def silence(dice: random.Random, case: Case) -> tuple[frozenset[int], int, dict[str, Any]]:
    """Mark some rows as padding or spoil them; which, how many are said to hold tokens, and how that is passed on."""
    rows = case.ids.shape[0]
    if dice.random() < 0.6:
        return frozenset(), rows, {}
    real = dice.choice((rows, dice.randint(0, rows)))
    silent = set(range(real, rows))
    for row in dice.sample(range(rows), dice.randint(0, min(2, rows))):
        silent.add(row)
        if dice.random() < 0.5:
            case.ids[row, :] = -1
        else:
            case.logits[row, dice.randrange(case.logits.shape[1])] = math.nan
    count = dice.choice((torch.tensor(real, dtype=torch.int32), torch.tensor([real]), real))
    return frozenset(silent), real, {"num_token_non_padded": count}


def compare(case: Case, expected: list[reference.Row], found: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Ids exactly, weights to 1e-6, untouched rows and columns bit for bit; how many rows were changed."""
    weights, ids = found
    k = case.model.k
    assert (ids.dtype, weights.dtype) == (case.ids.dtype, case.weights.dtype)
    assert ids[:, :k].tolist() == [row.experts for row in expected]
    assert torch.equal(ids[:, k:], case.ids[:, k:])
    assert torch.equal(weights[:, k:], case.weights[:, k:])
    for i, row in enumerate(expected):
        if not row.changed:
            assert torch.equal(weights[i], case.weights[i])
            continue
        assert len(set(row.experts)) == k
        for expert, weight in zip(row.experts, weights[i, :k].tolist(), strict=True):
            assert math.isclose(weight, row.weights.get(expert, 0.0), rel_tol=2e-6, abs_tol=1e-6)
    return sum(row.changed for row in expected)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("experts", EXPERTS)
def test_routes_as_the_papers_algorithms_do(
    experts: int, load: Callable[..., ModuleType], obey: Callable[..., None]
) -> None:
    """Ids are exactly those of the plain loops, weights the model's own over them; no input is written to."""
    runtime = load()
    dice = random.Random(f"{SEED}/{experts}")  # noqa: S311 - test data
    count = CASES // len(EXPERTS)
    undecided = changed = 0
    decided = 0
    while decided < count:
        case = case_of(dice, experts)
        wanted = wanted_of(dice, case.model, experts)
        silent, real, said = silence(dice, case)
        low, high = sorted((dice.randint(1, 64), dice.randint(1, 64))) if dice.random() < 0.05 else (1, 64)
        touched = low <= real <= high and (wanted.k0 > 0 or wanted.budget > 0) and wanted.k0 < case.model.k
        touched = touched and case.ids.shape[0] <= 2 * high  # more are not looked at
        obey(runtime, **asked_of(wanted, low, high))
        before = [tensor.clone() for tensor in (case.weights, case.ids, case.logits)]
        try:
            expected = reference.route(
                case.scores.tolist(),
                case.rank_by.tolist(),
                case.ids[:, : case.model.k].tolist(),
                case.model,
                wanted,
                silent if touched else range(case.ids.shape[0]),
            )
        except reference.TooCloseToTell:
            undecided += 1
            assert undecided < 10 + count / 10
            continue
        found = runtime.route(case.weights, case.ids, case.logits, **case.names, **said)
        decided += 1
        where = f"case {decided} of {experts} experts, seed {SEED}: {wanted}, {case.model}, {silent=}"
        try:
            changed += compare(case, expected, found)
        except AssertionError as error:
            raise AssertionError(where) from error
        given = (case.weights, case.ids, case.logits)
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(given, before, strict=True)), where
    assert changed > count


@pytest.mark.parametrize("seed", range(40))
def test_the_plain_form_is_the_general_one(seed: int, operator: ModuleType) -> None:
    """What is left out when there is no limit and no budget changes no bit."""
    dice = random.Random(seed)  # noqa: S311 - test data
    case = case_of(dice, dice.choice(EXPERTS))
    scoring = "sigmoid" if case.model.paired else case.names["scoring_func"]
    k0 = dice.randint(1, max(1, case.model.k - 1))
    policy = torch.tensor(operator.pack(operator.Policy(((1, 64, k0),), refill=dice.choice(operator.REFILLS))))
    rule = operator.Rule(
        k=case.model.k,
        scoring=scoring,
        renormalize=case.model.renormalize,
        scale=case.model.scale,
        groups=case.model.groups,
        groups_kept=case.model.groups_kept,
    )
    given = (case.weights, case.ids, case.logits, case.names.get("correction_bias"), policy, None)
    for plain, general in zip(
        operator.reroute(*given, rule._replace(plain=True)), operator.reroute(*given, rule), strict=True
    ):
        assert torch.equal(plain, general)


def test_the_reference_agrees_with_itself() -> None:
    """Algorithm 1 is Algorithm 2 without its limits."""
    dice = random.Random(SEED)  # noqa: S311 - test data
    for _ in range(200):
        orders = [dice.sample(range(24), 24) for _ in range(dice.randint(1, 9))]
        own = [order[:3] for order in orders]
        base = {expert for experts in own for expert in experts}
        assert reference.piggyback(own, orders, base, 6, 24) == reference.algorithm_1(orders, 3, 6)


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_k0_of_k_or_more_changes_nothing(
    extra: int, load: Callable[..., ModuleType], obey: Callable[..., None]
) -> None:
    """With k0 = k the runtime hands back the very tensors that it was given."""
    dice = random.Random(extra)  # noqa: S311 - test data
    for _ in range(40):
        case = case_of(dice, 64)
        obey(load(), k0_schedule=((1, 64, case.model.k + extra),))
        weights, ids = load().route(case.weights, case.ids, case.logits, **case.names)
        assert weights is case.weights
        assert ids is case.ids


def test_one_row_is_the_unchanged_model(load: Callable[..., ModuleType], obey: Callable[..., None]) -> None:
    """A batch of one, with native refill, keeps ids and weights bit for bit."""
    dice = random.Random(1)  # noqa: S311 - test data
    for _ in range(150):
        case = case_of(dice, dice.choice(EXPERTS))
        obey(load(), k0_schedule=((1, 1, dice.randint(1, case.model.k)),))
        weights, ids = load().route(case.weights[:1], case.ids[:1], case.logits[:1], **case.names)
        assert torch.equal(ids, case.ids[:1])
        assert torch.equal(weights, case.weights[:1])


@pytest.mark.parametrize("spoiled", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_row_without_numbers_changes_no_other(scoring: str, spoiled: float, operator: ModuleType) -> None:
    """A row of NaN or infinities gives way to a silent one: all other rows come out the same, under every policy."""
    dice = random.Random(f"{scoring}{spoiled}")  # noqa: S311 - test data
    for _ in range(40):
        logits = torch.randn(9, 32, generator=torch.Generator().manual_seed(dice.getrandbits(30)))
        scores = scored(logits, scoring)
        weights, ids = scores.topk(4)
        policy = operator.Policy(
            ((1, 64, 2),),
            refill=dice.choice(operator.REFILLS),
            p=dice.choice((1.0, 0.4)),
            budget=dice.choice((0, 12)),
            utility=dice.choice(operator.UTILITIES),
        )
        table, rule = torch.tensor(operator.pack(policy)), operator.Rule(k=4, scoring=scoring)
        broken, marked = logits.clone(), ids.clone()
        broken[3, : dice.choice((1, 32))] = spoiled
        marked[3] = -1
        if spoiled == -math.inf and not scored(broken, scoring)[3].isnan().any():
            continue  # scores of 0, which are numbers
        if spoiled == math.inf and scoring == "sigmoid":
            continue  # scores of 1
        others = [0, 1, 2, 4, 5, 6, 7, 8]
        found = operator.reroute(weights, ids, broken, None, table, None, rule)
        expected = operator.reroute(weights, marked, logits, None, table, None, rule)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[others], other[others])
        assert torch.equal(found[0][3], weights[3])
        assert torch.equal(found[1][3], ids[3])
        assert not found[2][3]
