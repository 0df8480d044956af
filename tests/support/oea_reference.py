"""Simplified OEA in plain loops, written from the paper's Algorithm 1 (arXiv 2511.02237), to hold the runtime against.

No tensors: scores come in as lists of numbers, one list per row, so that only the algorithm is compared and not two
sigmoids. What the paper leaves open and surgeon decided is marked.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True)
class Model:
    """How a model chooses and weighs.

    Attributes:
        k: routed experts per token.
        renormalize: weights are divided by their sum.
        scale: weights are multiplied by it.
        groups: groups of experts; a token chooses inside its best `groups_kept` of them.
        groups_kept: see groups.
        paired: a group is as good as the sum of its two best experts, else as its best one.
    """

    k: int
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    paired: bool = False


def _fp32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def allowed_experts(row: Sequence[float], model: Model) -> set[int]:
    """The experts that a token may choose from: those in its best groups, equal groups by the lower number."""
    if model.groups == 1:
        return set(range(len(row)))
    size = len(row) // model.groups

    def strength(group: int) -> float:
        best = sorted(row[group * size : (group + 1) * size], reverse=True)
        return _fp32(best[0] + best[1]) if model.paired else best[0]

    groups = sorted(range(model.groups), key=lambda group: (-strength(group), group))
    return {expert for group in groups[: model.groups_kept] for expert in range(group * size, (group + 1) * size)}


def best_first(row: Sequence[float], model: Model) -> list[int]:
    """The experts that a token may choose, from best to worst; equal scores by the lower id."""
    # Python's sort is stable also when reversed, so among equals the lower id stays ahead.
    return sorted(sorted(allowed_experts(row, model)), key=row.__getitem__, reverse=True)


def weigh(scores: Sequence[float], experts: Sequence[int], model: Model) -> dict[int, float]:
    """Each expert's weight: the router's score, renormalised over the chosen ones, scaled."""
    chosen = [scores[expert] for expert in experts]
    total = math.fsum(chosen) + 1e-20 if model.renormalize else 1.0
    return {expert: score / total * model.scale for expert, score in zip(experts, chosen, strict=True)}


def algorithm_1(orders: Sequence[Sequence[int]], k0: int, k: int) -> list[list[int]]:
    """The paper's Algorithm 1: for each token its experts, in the order in which they are added.

    Args:
        orders: each token's experts from best to worst.
        k0: how many each token keeps for itself.
        k: how many it has in the end, at most.
    """
    own = [list(order[:k0]) for order in orders]
    base = {expert for experts in own for expert in experts}
    for experts, order in zip(own, orders, strict=True):
        for expert in order[k0:]:
            if len(experts) == k:
                break
            if expert in base:
                experts.append(expert)
    return own


@dataclass(frozen=True)
class Row:
    """What one token is routed to.

    Attributes:
        experts: ids in order.
        weights: the weight of each expert that has one; with strict refill that may be fewer than there are ids.
        changed: whether it differs from the native choice.
    """

    experts: list[int]
    weights: dict[int, float]
    changed: bool


def route(
    scores: Sequence[Sequence[float]],
    rank_by: Sequence[Sequence[float]],
    native: Sequence[Sequence[int]],
    model: Model,
    *,
    k0: int,
    strict: bool = False,
    silent: Collection[int] = (),
) -> list[Row]:
    """Route a batch.

    Args:
        scores: per row, what weights are made of.
        rank_by: per row, what experts are chosen by.
        native: per row, what the unchanged model chose.
        model: how the model chooses and weighs.
        k0: experts each row keeps.
        strict: stop at the batch's experts, as the paper does.
        silent: rows that hold no token (padding) or no numbers: they neither vote nor change [ours].
    """
    orders = {i: best_first(row, model) for i, row in enumerate(rank_by) if i not in silent}
    chosen = dict(zip(orders, algorithm_1(list(orders.values()), k0, model.k), strict=True))
    base = {expert for order in orders.values() for expert in order[:k0]}
    rows = []
    for i, before in enumerate(native):
        if i in silent:
            rows.append(Row(list(before), {}, changed=False))
            continue
        experts = chosen[i]
        weighed = list(experts)
        # Ours: where the batch's experts run out, the row's own next best follow; with strict they get no weight.
        experts = experts + [e for e in orders[i] if e not in experts][: model.k - len(experts)]
        if not strict:
            weighed = experts
        # Ours: a row that has as many of the batch's experts as can be keeps the kernel's own order and weights.
        most = model.k if strict else len(base & set(experts))
        if len(base & set(before)) == most:
            rows.append(Row(list(before), weigh(scores[i], before, model), changed=False))
        else:
            rows.append(Row(experts, weigh(scores[i], weighed, model), changed=True))
    return rows
