"""OEA in plain loops, written from the paper's Algorithms 1 and 2 (arXiv 2511.02237), to hold the operator against.

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

CLOSE = 2e-4  # shares and sums of weights nearer than this may be decided by rounding


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


def weigh(
    scores: Sequence[float], experts: Sequence[int], model: Model, total: Sequence[float] | None = None
) -> dict[int, float]:
    """Each expert's weight: the router's score, renormalised over the chosen ones (or `total`), scaled."""
    chosen = [scores[expert] for expert in experts]
    divisor = math.fsum(chosen if total is None else total) + 1e-20 if model.renormalize else 1.0
    return {expert: score / divisor * model.scale for expert, score in zip(experts, chosen, strict=True)}


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
class Wanted:
    """What is asked for, in the paper's terms where it has them.

    Attributes:
        k0: how many each token keeps for itself, at most.
        p: it keeps no more than reach this share of its scores (Algorithm 2).
        k_max: refill stops at so many (Algorithm 2).
        max_rank: refill looks no further than this rank (Algorithm 2's maxP).
        refill: ``strict`` is the paper's. ``native`` [ours]: where the batch's experts run out, the token's own next
            best follow. ``none``: pruning, the baseline that the paper compares with.
        native_total: weights are divided by the sum over the unmodified choice, not over the kept one [ours].
        budget: the base set is filled up to so many experts [ours; XShare and DES-Vote choose theirs so].
        by_all: the budget goes by scores over all experts, not by each token's own top-k weights [ours].
    """

    k0: int
    p: float = 1.0
    k_max: int | None = None
    max_rank: int | None = None
    refill: str = "native"
    native_total: bool = False
    budget: int = 0
    by_all: bool = False


class TooCloseToTell(Exception):  # noqa: N818 - no error: the case asks what no two roundings need agree on
    """A decision hangs on less than what rounding may change."""


def baseline(orders: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], k0: int, p: float) -> list[list[int]]:
    """Phase 1 of Algorithm 2: each token's min(k0, the least count whose share of its scores reaches p) best."""
    kept = []
    for order, row in zip(orders, scores, strict=True):
        count, total = k0, math.fsum(row)
        if p < 1:
            for j in range(k0):
                share = math.fsum(row[expert] for expert in order[: j + 1]) / total
                if abs(share - p) < CLOSE:
                    raise TooCloseToTell
                if share >= p:
                    count = j + 1
                    break
        kept.append(list(order[:count]))
    return kept


def piggyback(
    own: Sequence[Sequence[int]], orders: Sequence[Sequence[int]], base: set[int], k_max: int, max_rank: int
) -> list[list[int]]:
    """Phase 2 of Algorithm 2: each token adds what is in the base set, from best to worst, up to k_max and max_rank."""
    chosen = []
    for mine, order in zip(own, orders, strict=True):
        experts = list(mine)
        for expert in order[len(mine) : max_rank]:
            if len(experts) >= k_max:
                break
            if expert in base:
                experts.append(expert)
        chosen.append(experts)
    return chosen


def fill(
    base: set[int], scores: Sequence[Sequence[float]], orders: Sequence[Sequence[int]], model: Model, wanted: Wanted
) -> set[int]:
    """The base set and the experts that the batch has most use for, `budget` in all; equal ones by the lower id."""
    experts = len(scores[0]) if scores else 0
    uses: list[list[float]] = [[] for _ in range(experts)]
    for row, order in zip(scores, orders, strict=True):
        if wanted.by_all:
            for expert, score in enumerate(row):
                uses[expert].append(score)
        else:
            best = order[: model.k]
            total = math.fsum(row[expert] for expert in best) if model.renormalize else 1.0
            for expert in best:
                uses[expert].append(row[expert] / total if total else 0.0)
    use = [math.fsum(parts) for parts in uses]
    others = sorted((e for e in range(experts) if e not in base), key=lambda e: (-use[e], e))
    room = max(0, wanted.budget - len(base))
    if 0 < room < len(others):
        # Equal sums of equal parts are a tie and go by id; nearly equal ones of other parts are a matter of rounding.
        close = [e for e in others if abs(use[e] - use[others[room]]) < CLOSE]
        inside = {tuple(sorted(uses[e])) for e in close if e in others[:room]}
        outside = {tuple(sorted(uses[e])) for e in close if e in others[room:]}
        if inside and len(inside | outside) > 1:
            raise TooCloseToTell
    return base | set(others[:room])


@dataclass(frozen=True)
class Row:
    """What one token is routed to.

    Attributes:
        experts: ids in order; those with weight first.
        weights: the weight of each expert that has one; there may be fewer than there are ids.
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
    wanted: Wanted,
    silent: Collection[int] = (),
) -> list[Row]:
    """Route a batch.

    Args:
        scores: per row, what weights are made of.
        rank_by: per row, what experts are chosen by.
        native: per row, what the unchanged model chose.
        model: how the model chooses and weighs.
        wanted: what is asked for.
        silent: rows that hold no token (padding) or no numbers: they neither vote nor change [ours].

    Raises:
        TooCloseToTell: see there.
    """
    k = model.k
    heard = [i for i in range(len(native)) if i not in silent]
    orders = [best_first(rank_by[i], model) for i in heard]
    heard_scores = [scores[i] for i in heard]
    own = baseline(orders, heard_scores, wanted.k0, wanted.p)
    base = fill({expert for experts in own for expert in experts}, heard_scores, orders, model, wanted)
    k_max = min(wanted.k_max or k, k)
    found = piggyback(own, orders, base, k_max, wanted.max_rank or len(rank_by[0]))
    rows = [Row(list(before), {}, changed=False) for before in native]
    for i, order, mine, experts in zip(heard, orders, own, found, strict=True):
        # All that it might have taken, had k_max not stopped it: what it has no weight for comes from there first.
        last = max(wanted.max_rank or len(order), len(mine))
        within = [expert for expert in order[:last] if expert in base]
        limit = max(k_max, len(mine))
        weighed = {"strict": len(experts), "native": limit, "none": len(mine)}[wanted.refill]
        ids = within + ([] if wanted.refill == "native" else [e for e in order if e in base and e not in within])
        ids = (ids + [e for e in order if e not in ids])[:k]
        assert wanted.refill == "none" or ids[: len(experts)] == experts
        # Ours: a row that has as many of the batch's experts as can be keeps the kernel's own order and weights.
        gains = weighed != k or len(set(within) & set(native[i])) != min(k, len(within))
        if weighed and gains:
            total = [scores[i][e] for e in native[i]] if wanted.native_total else None
            rows[i] = Row(ids, weigh(scores[i], ids[:weighed], model, total), changed=True)
    return rows
