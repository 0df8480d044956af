"""The runtime against plain loops of the paper's Algorithm 1, on random batches of many shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import oea_reference as reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

EXPERTS = (8, 60, 64, 128, 160, 256)
LIMITED = ((64, 8, 4), (160, 8, 3), (256, 8, 4), (256, 4, 2), (8, 2, 1))  # experts, groups, groups kept
# Small batches are the common case here: the reference is loops, and what is special happens when experts run out.
ROWS = st.one_of(st.integers(1, 6), st.integers(1, 6), st.integers(7, 20), st.integers(21, 64))
many = settings(max_examples=350, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


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
    k0: int


@st.composite
def cases(draw: st.DrawFn, *, kind: str) -> Case:
    """A batch: `kind` is softmax, sigmoid (with a bias), grouped (sigmoid + bias) or grouped-softmax."""
    limited = kind.startswith("grouped")
    experts, groups, kept = draw(st.sampled_from(LIMITED)) if limited else (draw(st.sampled_from(EXPERTS)), 1, 1)
    k = draw(st.integers(2, min(10, experts - 1, kept * experts // groups if limited else experts)))
    k0 = draw(st.integers(1, k - 1))
    rows = draw(ROWS)
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(rows, experts, generator=numbers) * draw(st.sampled_from((0.3, 1.5, 4.0)))
    grain = draw(st.sampled_from((None, 2, 8)))  # quantised logits are full of ties
    if grain:
        logits = (logits * grain).round() / grain
    logits = logits.to(draw(st.sampled_from((torch.float32, torch.bfloat16))))
    sigmoid = kind in ("sigmoid", "grouped")
    bias = None
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    rank_by = scores
    if sigmoid:
        bias = (torch.rand(experts, generator=numbers) * 2 - 1) * draw(st.sampled_from((0.0, 0.2, 8.0)))
        if grain:
            bias = (bias * grain).round() / grain
        rank_by = scores + bias
    grouped = sigmoid and draw(st.booleans()) if not limited else True
    # Groups that are renormalised by some kernels and not by others are left alone, see the runtime.
    renormalize = True if grouped else draw(st.booleans())
    scale = draw(st.sampled_from((None, 1.0, 2.5))) if renormalize else None
    on_output = draw(st.booleans())
    shared = draw(st.integers(0, 2)) if renormalize else 0
    model = reference.Model(
        k=k,
        renormalize=renormalize,
        scale=scale if scale and on_output else 1.0,
        groups=groups,
        groups_kept=kept,
        paired=sigmoid,
    )
    weights, ids = native(scores, rank_by, model, shared, numbers)
    names = {
        "top_k": k + shared,
        "renormalize": renormalize,
        "use_grouped_topk": grouped,
        "correction_bias": bias,
        "scoring_func": "sigmoid" if sigmoid and not grouped else "softmax",
        "num_expert_group": groups if grouped else None,
        "topk_group": kept if grouped else None,
        draw(st.sampled_from(("num_fused_shared_experts", "num_shared_topk_slots"))): shared,
        "routed_scaling_factor": scale,
        "apply_routed_scaling_factor_on_output": on_output,
    }
    ids = ids.to(draw(st.sampled_from((torch.int32, torch.int64))))
    return Case(weights, ids, logits, scores, rank_by, model, names, k0)


def native(
    scores: torch.Tensor, rank_by: torch.Tensor, model: reference.Model, shared: int, numbers: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the unchanged model chooses, its columns shuffled as unsorted kernels leave them, shared ones last."""
    experts = scores.shape[1]
    ids, weights = [], []
    for score, rank in zip(scores.tolist(), rank_by.tolist(), strict=True):
        row = reference.best_first(rank, model)[: model.k]
        row = [row[i] for i in torch.randperm(model.k, generator=numbers).tolist()]
        ids.append(row + [experts + i for i in range(shared)])
        weighed = reference.weigh(score, row, model)
        weights.append([weighed[e] for e in row] + [0.4] * shared)
    return torch.tensor(weights), torch.tensor(ids)


def check(runtime: ModuleType, case: Case, *, strict: bool, silent: frozenset[int] = frozenset(), **names: Any) -> None:
    """Compare one batch with the reference: ids exactly, weights to 1e-6, what must not change bit for bit."""
    before_weights, before_ids = case.weights.clone(), case.ids.clone()
    weights, ids = runtime.route(case.weights, case.ids, case.logits, **case.names, **names)
    assert torch.equal(case.ids, before_ids)
    assert torch.equal(case.weights, before_weights)
    assert (ids.dtype, weights.dtype) == (before_ids.dtype, before_weights.dtype)
    k = case.model.k
    expected = reference.route(
        case.scores.tolist(),
        case.rank_by.tolist(),
        before_ids[:, :k].tolist(),
        case.model,
        k0=case.k0,
        strict=strict,
        silent=silent,
    )
    assert ids[:, :k].tolist() == [row.experts for row in expected]
    assert torch.equal(ids[:, k:], before_ids[:, k:])
    assert torch.equal(weights[:, k:], before_weights[:, k:])
    for i, row in enumerate(expected):
        if row.changed:
            found = dict(zip(row.experts, weights[i, :k].tolist(), strict=True))
            assert len(found) == k
            for expert, weight in found.items():
                assert math.isclose(weight, row.weights.get(expert, 0.0), rel_tol=1e-6, abs_tol=1e-6)
        else:
            assert torch.equal(weights[i], before_weights[i])


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "grouped", "grouped-softmax"])
@pytest.mark.parametrize("refill", ["native", "strict"])
def test_routes_as_the_papers_algorithm_does(kind: str, refill: str, load: Callable[..., ModuleType]) -> None:
    """Ids are exactly those of Algorithm 1 (with the refill asked for), weights the model's own over them."""

    @many
    @given(case=cases(kind=kind))
    def each(case: Case) -> None:
        check(load(k0=case.k0, refill=refill, min_rows=1), case, strict=refill == "strict")

    each()


@settings(many, max_examples=150)
@given(case=cases(kind="sigmoid"), data=st.data())
def test_rows_without_tokens_do_not_vote(case: Case, data: st.DataObject, load: Callable[..., ModuleType]) -> None:
    """Padding (marked -1, or beyond the count of real rows) and rows of NaN wake no expert and stay as they are."""
    rows = case.ids.shape[0]
    real = data.draw(st.integers(0, rows))
    marked = data.draw(st.sets(st.integers(0, rows - 1), max_size=3))
    broken = data.draw(st.sets(st.integers(0, rows - 1), max_size=3))
    for row in marked:
        case.ids[row, :] = -1
    for row in broken:
        case.logits[row, data.draw(st.integers(0, case.logits.shape[1] - 1))] = math.nan
    silent = frozenset(marked | broken | set(range(real, rows)))
    count = data.draw(st.sampled_from((torch.tensor(real, dtype=torch.int32), torch.tensor([real]), real)))
    check(load(k0=case.k0, min_rows=1), case, strict=False, silent=silent, num_token_non_padded=count)


@settings(many, max_examples=150)
@given(case=cases(kind="sigmoid"), extra=st.integers(0, 3))
def test_k0_of_k_or_more_changes_nothing(case: Case, extra: int, load: Callable[..., ModuleType]) -> None:
    """With k0 = k the runtime hands back the very tensors that it was given."""
    weights, ids = load(k0=case.model.k + extra, min_rows=1).route(case.weights, case.ids, case.logits, **case.names)
    assert weights is case.weights
    assert ids is case.ids


@settings(many, max_examples=150)
@given(case=cases(kind="softmax"))
def test_one_row_is_the_unchanged_model(case: Case, load: Callable[..., ModuleType]) -> None:
    """A batch of one, with native refill, keeps ids and weights bit for bit."""
    weights, ids = load(k0=case.k0, min_rows=1).route(case.weights[:1], case.ids[:1], case.logits[:1], **case.names)
    assert torch.equal(ids, case.ids[:1])
    assert torch.equal(weights, case.weights[:1])
