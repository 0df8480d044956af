"""Random batches for the fused form of the operator, and what it must have in common with the torch form.

Needs torch and Triton, and the files of patches/oea; nothing of surgeon and no sglang. Runs on a GPU, or on the CPU
with TRITON_INTERPRET=1 set before Triton is imported.

torch and Triton compute exponentials differently, by a few units in the last place, and a choice between two experts
may hang on that. So the torch form is given the kernel's own scores, and must then choose the same experts, to the id;
and the scores must be torch's to two parts in a million.
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import ModuleType

PATCH = Path(__file__).resolve().parents[2] / "patches" / "oea"
EXPERTS = (8, 60, 64, 128, 160, 256, 384, 512)
GROUPS = {8: (2, 1), 60: (4, 2), 64: (8, 4), 128: (4, 2), 160: (8, 3), 256: (8, 4), 384: (8, 4), 512: (16, 6)}
MOST_ROWS = (1, 2, 3, 3, 4, 4, 6, 6, 8, 12)
SCORE_TOLERANCE = 2e-6  # relative; measured: 4e-7


def load(name: str) -> ModuleType:
    """A file of the patch as a module of its own."""
    known = f"surgeon_oea_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, PATCH / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


@dataclass(frozen=True)
class Case:
    """One call of ``reroute``.

    Attributes:
        given: its arguments.
        policy: the policy tensor in words.
        is_topk: whether the ids in each row are what a model could have chosen, or -1.
    """

    given: tuple[Any, ...]
    policy: Any
    is_topk: bool

    @property
    def rule(self) -> Any:
        """The call's constants."""
        return self.given[6]

    @property
    def held(self) -> int:
        """How many rows hold tokens."""
        rows, real = len(self.given[1]), self.given[5]
        return rows if real is None else min(rows, max(0, int(real)))

    @property
    def is_touched(self) -> bool:
        """Whether the policy touches a pass of so many rows."""
        operator = load("operator")
        k0 = int(self.given[4][operator.SCHEDULE + self.held])
        return 0 <= k0 < self.rule.k and (k0 > 0 or self.policy.budget > 0)

    def __str__(self) -> str:
        logits, ids = self.given[2], self.given[1]
        policy = self.policy._replace(schedule=self.policy.schedule[:1])
        return (
            f"{tuple(logits.shape)} {logits.dtype}, ids {ids.dtype}, real rows {self.given[5]}, {self.rule}, {policy}"
        )


def _logits(dice: random.Random, numbers: torch.Generator, rows: int, experts: int, grain: int | None) -> torch.Tensor:
    logits = torch.randn(rows, experts, generator=numbers) * dice.choice((0.3, 1.5, 4.0, 12.0))
    if grain:
        logits = (logits * grain).round() / grain
    if dice.random() < 0.2:
        for _ in range(dice.randint(1, 3)):
            logits[dice.randrange(rows), dice.randrange(experts)] = dice.choice((math.nan, math.inf, -math.inf))
    return logits


def _policy(dice: random.Random, k: int, experts: int, *, plain: bool) -> Any:
    operator = load("operator")
    rest: dict[str, Any] = {"refill": dice.choice(operator.REFILLS), "denominator": dice.choice(operator.DENOMINATORS)}
    if not plain:
        rest["p"] = dice.choice((1.0, 1.0, 0.95, 0.7, 0.3, 0.1))
        rest["max_rank"] = dice.choice((0, 0, dice.randint(1, 2 * k), dice.randint(1, experts + 3)))
        rest["k_max"] = dice.choice((0, 0, dice.randint(1, k + 1)))
        rest["budget"] = dice.choice((0, 0, dice.randint(1, 2 * k), dice.randint(1, experts + 3)))
        rest["utility"] = dice.choice(operator.UTILITIES)
    least = 0 if rest.get("budget") else 1
    k0 = dice.randint(least, max(least, k - 1)) if dice.random() < 0.95 else dice.choice((k, k + 1))
    # Sometimes the table says that some passes stay as they are.
    low, high = (0, 600) if dice.random() < 0.9 else sorted((dice.randint(0, 8), dice.randint(0, 8)))
    return operator.Policy(schedule=((low, high, k0),), **rest)


def _limited(rank: torch.Tensor, groups: int, kept: int, *, paired: bool) -> torch.Tensor:
    """The selection scores, and -inf outside a row's best groups; among equal groups the lower ones."""
    grouped = rank.unflatten(1, (groups, -1))
    best = grouped.sort(dim=2, descending=True).values
    strength = best[..., 0] + best[..., 1] if paired else best[..., 0]
    out = strength.sort(dim=1, descending=True, stable=True).indices[:, kept:]
    barred = torch.zeros_like(strength, dtype=torch.bool).scatter(1, out, value=True)
    return grouped.masked_fill(barred.unsqueeze(2), -math.inf).flatten(1)


def _native(
    dice: random.Random, numbers: torch.Generator, scores: torch.Tensor, rank: torch.Tensor, k: int, shared: int
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """A choice as kernels leave it, columns in any order and shared experts last, and whether none is wrong."""
    rows, experts = rank.shape
    ids = rank.sort(dim=1, descending=True, stable=True).indices[:, torch.randperm(k, generator=numbers)]
    weights = torch.cat((scores.gather(1, ids), torch.full((rows, shared), 0.4)), 1)
    ids = torch.cat((ids, torch.arange(experts, experts + shared).expand(rows, shared)), 1)
    spoiled = dice.random()
    if spoiled < 0.1:
        ids[dice.randrange(rows)] = -1
    elif spoiled < 0.2:
        ids[dice.randrange(rows), dice.randrange(k + shared)] = dice.choice((0, experts - 1, experts + shared))
    return weights, ids, not 0.1 <= spoiled < 0.2


def draw(seed: int, device: str = "cpu", models: int = 0) -> Case:
    """A random case: scoring, bias, groups, shared columns, ties, infinities, padding, dtypes, and any policy.

    Args:
        seed: says which.
        device: where its tensors are.
        models: as many models as there are to be, over all seeds, since each is compiled for itself; 0 is no limit.
    """
    operator = load("operator")
    dice = random.Random(seed)  # noqa: S311 - cases, not secrets
    static = random.Random(seed % models) if models else dice  # noqa: S311 - same
    experts = static.choice(EXPERTS)
    groups, kept = GROUPS[experts] if static.random() < 0.25 else (1, 1)
    k = static.randint(1, min(10, experts, kept * experts // groups))
    shared = static.choice((0, 0, 1, 2))
    scoring = static.choice((operator.SOFTMAX, operator.SIGMOID, operator.SIGMOID, operator.SQRTSOFTPLUS))
    biased = scoring != operator.SOFTMAX and static.random() < 0.8
    rule = operator.Rule(
        k=k,
        scoring=scoring,
        renormalize=static.random() < 0.7,
        scale=static.choice((1.0, 2.5)),
        groups=groups,
        groups_kept=kept,
        plain=static.random() < 0.5,
    )
    logits_dtype = static.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    ids_dtype = static.choice((torch.int32, torch.int64))
    counted = static.choice((None, torch.int64, torch.int32))

    numbers = torch.Generator().manual_seed(dice.getrandbits(40))
    rows = dice.randint(1, 64 if dice.random() < 0.01 else dice.choice(MOST_ROWS))
    grain = dice.choice((None, None, 2, 8))  # quantised logits are full of ties
    logits = _logits(dice, numbers, rows, experts, grain).to(logits_dtype)
    scores = operator._scores(logits.float(), scoring)
    bias = None
    if biased:
        bias = (torch.rand(experts, generator=numbers) * 2 - 1) * dice.choice((0.0, 0.2, 8.0))
        if grain:
            bias = (bias * grain).round() / grain
    policy = _policy(dice, k, experts, plain=rule.plain)
    rank = (scores if bias is None else scores + bias).nan_to_num(0.0)
    if groups > 1:
        rank = _limited(rank, groups, kept, paired=scoring == operator.SIGMOID)
    weights, ids, is_topk = _native(dice, numbers, scores, rank, k, shared)
    real = dice.randint(0, rows) if dice.random() < 0.3 else rows + dice.randint(0, 2)
    count = None if counted is None else torch.tensor([real], dtype=counted)
    tensors = (weights, ids.to(ids_dtype), logits, bias, torch.tensor(operator.pack(policy)), count)
    return Case((*(None if one is None else one.to(device) for one in tensors), rule), policy, is_topk)


def scores_used(case: Case, scores: torch.Tensor) -> torch.Tensor:
    """The scores to hold other forms to: the kernel's, and torch's in rows that it had no need to score.

    Args:
        case: the case.
        scores: what the kernel's ``_launch`` gave fourth.

    Raises:
        AssertionError: the kernel's scores are not torch's.
    """
    used: torch.Tensor = load("operator")._scores(case.given[2].float(), case.rule.scoring)
    if case.is_touched:
        mine, torchs = scores[: case.held], used[: case.held]
        assert torch.equal(mine.isnan(), torchs.isnan()), "a score is a number in one form and none in the other"
        close = torch.isclose(mine, torchs, rtol=SCORE_TOLERANCE, atol=1e-30, equal_nan=True)
        assert bool(close.all()), f"scores: {mine[~close].tolist()}, torch {torchs[~close].tolist()}"
        used = torch.cat((mine, used[case.held :]))
    return used


def check(case: Case) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run one case through both forms.

    Returns:
        The scores that both started from, and the kernel's weights, ids and which rows it changed.

    Raises:
        AssertionError: they differ: in an id, in which rows are changed, in a bit of a row that is not, in a weight by
            more than 1e-6 of it, in a dtype; or an argument was written to.
    """
    operator: Any = load("operator")
    kernel: Any = load("kernel")
    assert kernel.unfit(*case.given[2].shape, case.given[1].shape[1], case.rule) is None
    before = [None if one is None else one.clone() for one in case.given[:6]]
    weights, ids, changed, scores = kernel._launch(*case.given)
    for one, kept in zip(case.given[:6], before, strict=True):
        assert one is None or _same(one, kept), "an argument was written to"
    used = scores_used(case, scores)
    plain_scores = operator._scores
    operator._scores = lambda *_: used
    try:
        torch_weights, torch_ids, torch_changed = operator.reroute(*case.given)
    finally:
        operator._scores = plain_scores
    assert (weights.dtype, ids.dtype, changed.dtype) == (torch_weights.dtype, torch_ids.dtype, torch_changed.dtype)
    assert torch.equal(changed, torch_changed), f"changed: {changed.tolist()}, torch form {torch_changed.tolist()}"
    assert torch.equal(ids, torch_ids), f"ids: {ids.tolist()}, torch form {torch_ids.tolist()}"
    assert _same(weights[~changed], case.given[0][~changed]), "weights of a row that is not changed"
    close = torch.isclose(weights, torch_weights, rtol=1e-6, atol=1e-30, equal_nan=True)
    assert bool(close.all()), f"weights: {weights[~close].tolist()}, torch form {torch_weights[~close].tolist()}"
    return used, (weights, ids, changed)


def _same(one: torch.Tensor, other: Any) -> bool:
    """Equal to the bit, NaN too."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return bool(torch.equal(one.view(kind), other.view(kind)))
