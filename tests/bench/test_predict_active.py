"""Expected T: the printed tables, and simulations of the algorithm itself."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from surgeon.bench import active
from tests.support.oea_reference import algorithm_1

BATCHES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("experts", "top_k", "printed"),
    [
        (128, 8, (8, 16, 29, 52, 82, 112, 126)),
        (160, 8, (8, 16, 30, 54, 90, 129, 154)),
        (256, 8, (8, 16, 31, 57, 102, 163, 222)),
        (384, 8, (8, 16, 31, 60, 110, 188, 284)),
        (128, 4, (4, 8, 15, 29, 51, 82, 111)),
    ],
    ids=["Qwen3", "GLM-4.5", "GLM-5", "Kimi-K2", "gpt-oss-120b"],
)
def test_the_uniform_table_is_the_known_one(experts: int, top_k: int, printed: tuple[int, ...]) -> None:
    """E * (1 - (1 - k/E)^B), rounded as people print it."""
    assert tuple(round(active.uniform(experts, top_k, rows)) for rows in BATCHES) == printed


def routed(orders: list[list[int]], k0: int, k: int, *, strict: bool) -> set[int]:
    """The experts that a batch reads under OEA, by the paper's loop and, unless strict, our refill from a row's own."""
    chosen = algorithm_1(orders, k0, k)
    if not strict:
        for own, order in zip(chosen, orders, strict=True):
            own.extend([expert for expert in order if expert not in own][: k - len(own)])
        assert all(len(set(experts)) == k for experts in chosen)
    return {expert for experts in chosen for expert in experts}


@pytest.mark.parametrize(
    ("experts", "k0", "k", "rows"),
    [
        (64, 8, 8, 16),
        (64, 4, 8, 16),
        (64, 4, 8, 1),
        (64, 4, 8, 2),
        (64, 3, 8, 2),
        (64, 3, 8, 3),
        (24, 2, 6, 4),
        (8, 1, 4, 3),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_the_formulas_are_what_the_algorithm_does(experts: int, k0: int, k: int, rows: int, *, strict: bool) -> None:
    """Rows rank experts at random; the mean T of many batches is the formula's, small batches included."""
    numbers = random.Random(7)  # noqa: S311 - experts, not secrets
    counts = [
        len(routed([numbers.sample(range(experts), experts) for _ in range(rows)], k0, k, strict=strict))
        for _ in range(600 if rows > 4 else 3000)
    ]
    added = 0.0 if strict else active.filled_up(experts, k0, k, rows)
    assert active.uniform(experts, k0, rows) + added == pytest.approx(fmean(counts), abs=0.2 if rows > 4 else 0.08)


def test_one_row_is_the_unchanged_model() -> None:
    """With native refill a single row reads its k experts, whatever k0 is."""
    for k0 in range(1, 9):
        assert active.uniform(256, k0, 1) + active.filled_up(256, k0, 8, 1) == pytest.approx(8)


def test_nothing_is_filled_up_where_the_batch_has_enough() -> None:
    """From a handful of rows on, native refill is the paper's form."""
    assert active.filled_up(256, 4, 8, 16) == pytest.approx(0, abs=1e-9)
    assert active.filled_up(256, 4, 8, 0) == 0


def test_shares_give_t_where_experts_are_not_equally_liked() -> None:
    """Rows that draw 4 of 20 experts by unequal weights: T of batches is told from the shares of other rows."""
    numbers = random.Random(11)  # noqa: S311 - experts, not secrets
    weights = [1 / (1 + place) for place in range(20)]

    def row() -> list[int]:
        # Gumbel's trick: the k largest of log(weight) + noise are a draw without replacement.
        keys = [numbers.expovariate(1.0) / weight for weight in weights]
        return sorted(range(20), key=keys.__getitem__)[:4]

    seen = [0] * 20
    for _ in range(6000):
        for expert in row():
            seen[expert] += 1
    shares = [count / 6000 for count in seen]
    assert sum(shares) == pytest.approx(4)
    for rows in (1, 3, 8):
        drawn = fmean(len({expert for _ in range(rows) for expert in row()}) for _ in range(1500))
        assert active.from_shares(shares, rows) == pytest.approx(drawn, abs=0.12)
        assert active.from_shares(shares, rows) <= active.uniform(20, 4, rows) + 1e-9


@pytest.mark.parametrize(("rows", "ranks"), [(4, 8), (16, 8), (16, 2), (16, 1)])
def test_the_slowest_rank_is_that_of_a_simulation(rows: int, ranks: int) -> None:
    """Ranks hold equal blocks of experts; the largest of their T, over 1500 batches."""
    numbers = random.Random(3)  # noqa: S311 - experts, not secrets
    held = 256 // ranks
    largest = []
    for _ in range(1500):
        union = {expert for _ in range(rows) for expert in numbers.sample(range(256), 8)}
        largest.append(max(sum(expert // held == rank for expert in union) for rank in range(ranks)))
    expected = active.slowest_rank(active.uniform(256, 8, rows), 256, ranks)
    assert expected == pytest.approx(fmean(largest), rel=0.02)
