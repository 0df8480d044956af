"""How many distinct experts a batch chooses: T, what the time of a MoE layer in decode is linear in.

Rows are taken to choose independently. Real rows of one batch resemble each other, and real experts are not equally
liked, both of which lower T: the uniform formula is a ceiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Shares:
    """How often each expert is chosen by a row, layer by layer; the rows of a batch are independent.

    Attributes:
        layers: for each layer, p_e of each expert; they sum up to k.
        top_k: experts per row (k).
        says: where they come from, in words.
    """

    layers: tuple[tuple[float, ...], ...] = field(repr=False)
    top_k: int
    says: str = ""
    _best: dict[int, tuple[tuple[float, ...], ...]] = field(default_factory=dict, repr=False, compare=False)
    _told: dict[tuple[int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def active(self, rows: int, kept: int) -> float:
        """T when each of B rows counts with its ``kept`` best experts, averaged over layers."""
        if kept not in self._best:
            best = (shares_of_best(layer, kept) for layer in self.layers)
            self._best[kept] = self.layers if kept == self.top_k else tuple(best)
        if (rows, kept) not in self._told:
            every = [from_shares(layer, rows) for layer in self._best[kept]]
            self._told[rows, kept] = math.fsum(every) / len(every)
        return self._told[rows, kept]


def uniform(experts: int, top_k: int, rows: int) -> float:
    """Expected T when every expert is equally likely: ``E * (1 - (1 - k/E) ** B)`` (arXiv 2511.02237, section 2).

    For 64 experts, top-8 and 16 rows it is 56.4. It holds for group-limited routing too, since a row still chooses each
    expert with probability k/E.

    Args:
        experts: routed experts per layer (E).
        top_k: experts per row (k).
        rows: rows in the batch (B).
    """
    return experts * (1 - (1 - top_k / experts) ** rows)


def from_shares(shares: Sequence[float], rows: int) -> float:
    """Expected T when expert e is chosen by a row with probability p_e: the sum of ``1 - (1 - p_e) ** B``.

    Args:
        shares: p_e of each expert; their sum is k.
        rows: rows in the batch (B).
    """
    return math.fsum(1 - (1 - share) ** rows for share in shares)


def shares_of_best(shares: Sequence[float], kept: int) -> tuple[float, ...]:
    """How often an expert is among a row's ``kept`` best, told from how often it is among its k best.

    Experts are taken to ring like clocks of different rates, and a row to choose those that ring first. Up to a time t,
    expert e has rung with probability ``1 - exp(-w_e * t)``; after t = 1 it shall be p_e, which gives w_e, and the
    expected number of rings, ``kept``, gives t. Well-liked experts are among the best more often than kept / k.

    Args:
        shares: p_e of each expert; their sum is k.
        kept: from 1 to k.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        time = (low + high) / 2
        rung = math.fsum(1 - (1 - share) ** time for share in shares)
        low, high = (time, high) if rung < kept else (low, time)
    return tuple(1 - (1 - share) ** high for share in shares)


def filled_up(experts: int, k0: int, top_k: int, rows: int) -> float:
    """Experts that OEA's native refill adds to the rows' own, expected, uniform routing.

    The union of the rows' k0 best is smaller than k only in small batches; each row then takes all of it and goes on
    with its own next best. Given a union of c experts, the B rows draw k - c each of the other E - c.

    Args:
        experts: routed experts per layer (E).
        k0: experts that each row keeps (k0).
        top_k: experts per row (k).
        rows: rows in the batch (B).
    """
    if rows == 0:
        return 0.0
    sizes = {k0: 1.0}
    for _ in range(rows - 1):
        grown: dict[int, float] = {}
        for size, chance in sizes.items():
            # A union of k and more needs no refill, and never shrinks again.
            for new in range(min(k0, top_k - 1 - size) + 1):
                ways = math.comb(experts - size, new) * math.comb(size, k0 - new)
                if ways:
                    grown[size + new] = grown.get(size + new, 0.0) + chance * ways / math.comb(experts, k0)
        sizes = grown
    return math.fsum(
        chance * uniform(experts - size, top_k - size, rows) for size, chance in sizes.items() if size < top_k
    )


def slowest_rank(mean: float, experts: int, ranks: int) -> float:
    """Expected T of the expert-parallel rank that has most of it, which the others wait for.

    Each rank holds E / R experts, each of them chosen with probability T / E, independently of the others. For 256
    experts on 8 ranks and T = 102 it is 16.7, where the mean over ranks is 12.8.

    Args:
        mean: expected T over all ranks.
        experts: routed experts per layer (E).
        ranks: expert-parallel size (R); 1 gives the mean back.
    """
    if ranks == 1:
        return mean
    held, chosen = experts // ranks, mean / experts
    below, expected = 0.0, 0.0
    for count in range(held):
        below += math.comb(held, count) * chosen**count * (1 - chosen) ** (held - count)
        expected += 1 - min(1.0, below) ** ranks
    return expected
