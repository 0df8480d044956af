"""What fewer experts are worth to a memory-bound MoE layer, on this machine's CPU: ``make bench-layer``.

A decode step of a mixture-of-experts layer reads the weights of every expert that a token of the batch chose. A CPU
shows that as a GPU does: the experts here take 0.8 GB, far more than a last-level cache holds, and a batch of 16 rows
is too small for the arithmetic to matter. The operator that surgeon ships chooses; the time that is shown includes it.
Each round draws one batch, routes it natively and with every k0, and times all of them in a random order, so that
whatever else runs on the machine meets all alike; medians count, and the intervals are bootstrapped over rounds. Time
is that of one thread on its core: waiting for memory counts, waiting for a turn on a busy machine does not.

    layer time against T, the number of experts read      R^2 of the medians at least 0.93
    layer time with k0 = 4 against native routing         at most 0.88
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    import torch

OPERATOR = Path(__file__).resolve().parents[2] / "patches" / "oea" / "operator.py"
LEAST_R2 = 0.93
MOST_OF_NATIVE = 0.88
RESAMPLES = 2000


@dataclass(frozen=True)
class Shape:
    """The layer and the batch: experts of three matrices (gate and up in one, and down), ``k`` of them per row."""

    experts: int
    hidden: int
    width: int
    k: int
    rows: int

    @property
    def expert_bytes(self) -> int:
        """What one expert's weights take, in fp32."""
        return 4 * 3 * self.hidden * self.width


class Layer:
    """A router and its experts, with random weights.

    Attributes:
        router: [experts, hidden].
        gate_up: [experts, 2 * width, hidden].
        down: [experts, hidden, width].
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        import torch

        numbers = torch.Generator().manual_seed(seed)

        def matrix(*size: int) -> torch.Tensor:
            return torch.empty(size).uniform_(-1, 1, generator=numbers).mul_((3 / size[-1]) ** 0.5)

        self.router = matrix(shape.experts, shape.hidden)
        self.gate_up = matrix(shape.experts, 2 * shape.width, shape.hidden)
        self.down = matrix(shape.experts, shape.hidden, shape.width)

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The layer's output: each expert that was chosen is read once, for all rows that chose it.

        Args:
            hidden: [rows, hidden].
            weights: [rows, k].
            ids: [rows, k].

        Returns:
            [rows, hidden].
        """
        import torch
        from torch.nn.functional import silu

        out = torch.zeros_like(hidden)
        places = ids.flatten().argsort(stable=True)
        rows = places // ids.shape[1]
        gains = weights.flatten()[places].unsqueeze(1)
        begin = 0
        for expert, count in enumerate(torch.bincount(ids.flatten(), minlength=len(self.down)).tolist()):
            if count:
                mine = rows[begin : begin + count]
                gate, up = (hidden[mine] @ self.gate_up[expert].T).chunk(2, dim=1)
                out.index_add_(0, mine, (silu(gate) * up) @ self.down[expert].T * gains[begin : begin + count])
                begin += count
        return out


@dataclass(frozen=True)
class Measured:
    """One way to route, over all rounds.

    Attributes:
        name: ``native`` or ``k0 = n``.
        seconds: of the layer, per round.
        experts: how many were read, per round.
    """

    name: str
    seconds: list[float]
    experts: list[int]


def operator() -> ModuleType:
    """The operator that surgeon ships."""
    spec = importlib.util.spec_from_file_location("surgeon_oea_operator", OPERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def router(layer: Layer, shape: Shape, k0: int, ship: ModuleType) -> Callable[[torch.Tensor], Any]:
    """What chooses experts: the softmax of the router's scores, and with k0 below k the operator after it."""
    import torch

    rule = ship.Rule(k=shape.k, scoring=ship.SOFTMAX, renormalize=True, plain=True)
    policy = torch.tensor(ship.pack(ship.Policy(schedule=((1, shape.rows, k0),))))

    def choose(hidden: torch.Tensor) -> Any:
        logits = hidden @ layer.router.T
        weights, ids = logits.softmax(-1).topk(shape.k)
        weights = weights / weights.sum(1, keepdim=True)
        return (weights, ids) if k0 == shape.k else ship.reroute(weights, ids, logits, None, policy, None, rule)[:2]

    return choose


def measure(shape: Shape, k0s: Sequence[int], rounds: int, seed: int) -> list[Measured]:
    """Time native routing and each k0 on the same batches, in random order in each round; the first is not kept."""
    import torch

    layer = Layer(shape, seed)
    ship = operator()
    ways = {k0: router(layer, shape, k0, ship) for k0 in (shape.k, *k0s)}
    told = {k0: Measured("native" if k0 == shape.k else f"k0 = {k0}", [], []) for k0 in ways}
    numbers = torch.Generator().manual_seed(seed)
    dice = random.Random(seed)  # noqa: S311 - no secret
    for done in range(rounds + 1):
        hidden = torch.randn(shape.rows, shape.hidden, generator=numbers)
        order = list(ways)
        dice.shuffle(order)
        for k0 in order:
            began = time.thread_time()
            weights, ids = ways[k0](hidden)
            layer.forward(hidden, weights, ids)
            took = time.thread_time() - began
            if done:
                told[k0].seconds.append(took)
                told[k0].experts.append(ids.unique().numel())
    return list(told.values())


def ratio(ours: Measured, native: Measured) -> float:
    """The median over rounds of our time as a share of the native one of the same round."""
    return statistics.median(a / b for a, b in zip(ours.seconds, native.seconds, strict=True))


def interval(ours: Measured, native: Measured, seed: int) -> tuple[float, float]:
    """Where 95 % of the ratios lie that rounds drawn anew, with replacement, would have given."""
    dice = random.Random(seed)  # noqa: S311 - no secret
    pairs = [a / b for a, b in zip(ours.seconds, native.seconds, strict=True)]
    drawn = sorted(statistics.median(dice.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return drawn[RESAMPLES * 25 // 1000], drawn[RESAMPLES * 975 // 1000 - 1]


def line(experts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Least squares of time over experts: intercept, slope, and R^2."""
    slope, intercept = statistics.linear_regression(experts, seconds)
    return intercept, slope, statistics.correlation(experts, seconds) ** 2


def report(shape: Shape, told: Sequence[Measured], seed: int) -> tuple[float, float | None]:
    """Print what was found.

    Returns:
        R^2 of the medians over T, and the ratio of k0 = 4 if that was measured.
    """
    native = told[0]
    size = shape.experts * shape.expert_bytes / 1e9
    print(
        f"{shape.experts} experts of {shape.expert_bytes / 1e6:.1f} MB ({size:.2f} GB in fp32), top-{shape.k}, "
        f"{shape.rows} rows, {len(native.seconds)} rounds, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':<8} {'T':>6} {'of native':>9} {'ms':>8} {'of native':>9}  95 %")
    reads = [statistics.fmean(way.experts) for way in told]
    medians = [statistics.median(way.seconds) for way in told]
    four = None
    for way, experts, median in zip(told, reads, medians, strict=True):
        low, high = interval(way, native, seed)
        share = ratio(way, native)
        four = share if way.name == "k0 = 4" else four
        shares = f"{experts:6.1f} {experts / reads[0]:9.2f} {median * 1e3:8.2f} {share:9.2f}"
        print(f"{way.name:<8} {shares}  {low:.2f}-{high:.2f}")
    intercept, slope, fit = line(reads, medians)
    print(
        f"medians: {intercept * 1e3:.2f} ms + T * {slope * 1e3:.3f} ms, R^2 {fit:.3f}; "
        f"an expert is read at {shape.expert_bytes / slope / 1e9:.1f} GB/s"
    )
    return fit, four


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and fail where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("experts", 128), ("hidden", 1024), ("width", 512), ("k", 8), ("rows", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limits", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args(arguments)
    from surgeon import lab

    sys.path.append(str(lab.torch_layer()))
    import torch

    torch.set_num_threads(1)
    shape = Shape(asked.experts, asked.hidden, asked.width, asked.k, asked.rows)
    fit, four = report(shape, measure(shape, (6, 5, 4, 3, 2), asked.rounds, asked.seed), asked.seed)
    if not asked.limits:
        return 0
    print(f"limits: R^2 at least {LEAST_R2}, k0 = 4 at most {MOST_OF_NATIVE} of native")
    return 0 if fit >= LEAST_R2 and four is not None and four <= MOST_OF_NATIVE else 1


if __name__ == "__main__":
    sys.exit(main())
