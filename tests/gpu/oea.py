"""The fused operator on a GPU: is it right, what does it cost, and what does it save?

    python tests/gpu/oea.py               on a machine with CUDA, torch and Triton; sglang is not needed
    python tests/gpu/oea.py --dry-run     every step on the CPU, in Triton's interpreter, in tiny shapes

**This has never run on a GPU.** The dry run is part of the tests; what it prints as times means nothing. On a GPU:

1. random batches through the fused and the torch form (tests/gpu/cases.py says what must be equal);
2. a graph captured for 8 rows, replayed with fewer real ones, and with another policy in the same tensor;
3. microseconds, inside a captured graph, of a plain torch top-k, and of the torch and the fused form after one;
4. the time of a layer of Qwen3-30B-A3B's shape over T, the number of experts read: slope, intercept, R^2;
5. what OEA saves there at each k0, at the paper's T, beside the paper's table (arXiv 2511.02237, H100).

It ends with 1 if something in 1 or 2 is wrong. Times are for a person to judge.
"""
# ruff: noqa: T201 - printing is what it is for

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton

from tests.gpu import cases
from tests.gpu.layer import Captured, Layer, microseconds, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

# Qwen3-30B-A3B, bf16, one H100, B <= 16: T and microseconds of the MoE layer at each k0 (the paper's table).
PAPER = {3: (25.1, 106.8), 4: (29.9, 120.9), 5: (35.1, 136.0), 6: (40.3, 151.3), 7: (44.4, 163.0), 8: (48.8, 175.7)}


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: str
    dtype: torch.dtype
    models: int
    rows: tuple[int, ...]
    experts: tuple[int, ...]
    hidden: int
    width: int
    layer_experts: int
    layer_rows: int
    k: int
    pools: tuple[int, ...]


GPU = Scale(
    "cuda", torch.bfloat16, 40, (1, 4, 8, 16, 32, 64), (128, 256, 384), 2048, 768, 128, 16, 8,
    (8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128),
)  # fmt: skip
DRY = Scale("cpu", torch.float32, 6, (2,), (16,), 32, 16, 16, 4, 4, (4, 8, 12))


def batch(rows: int, experts: int, k: int, device: str, shared: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Weights, ids and logits of a softmax model; ``shared`` is the part that all rows' logits have in common."""
    common = torch.randn(1, experts, device=device)
    logits = shared * common + (1 - shared**2) ** 0.5 * torch.randn(rows, experts, device=device)
    weights, ids = (logits * 2).softmax(-1).topk(k)
    return weights / weights.sum(1, keepdim=True), ids.int(), logits * 2


def policy_of(k0: int, device: str) -> torch.Tensor:
    """The policy tensor of simplified OEA with this k0 for any number of rows."""
    operator = cases.load("operator")
    return torch.tensor(operator.pack(operator.Policy(schedule=((1, operator.MAX_ROWS, k0),))), device=device)


def check_cases(scale: Scale, count: int, seed: int) -> list[str]:
    """Step 1: what went wrong, at most ten cases."""
    wrong, changed, rows = [], 0, 0
    for number in range(seed, seed + count):
        case = cases.draw(number, scale.device, scale.models)
        try:
            _, (_, _, which) = cases.check(case)
        except AssertionError as error:
            wrong.append(f"seed {number}: {error}\n  {case}")
            if len(wrong) == 10:
                break
            continue
        changed, rows = changed + int(which.sum()), rows + len(which)
    print(f"1. {count} random batches: {rows} rows agreed, {changed} of them re-routed; {len(wrong)} batches wrong")
    return wrong


def check_padding(scale: Scale) -> list[str]:
    """Step 2: padded rows of a captured graph neither vote nor change, and the graph obeys the policy tensor."""
    operator: Any = cases.load("operator")
    kernel: Any = cases.load("kernel")
    experts, bucket = scale.experts[0], 8
    rule = operator.Rule(k=scale.k, plain=True)
    static = batch(bucket, experts, scale.k, scale.device)
    policy, real = policy_of(2, scale.device), torch.tensor([bucket], device=scale.device)
    graph = Captured(lambda: kernel._launch(*static, None, policy, real, rule), scale.device)
    wrong, torchs_scores = [], operator._scores
    for held, k0 in ((7, 2), (bucket, 2), (3, 3), (1, 3), (0, 2), (7, scale.k), (5, 1)):
        for tensor, fresh in zip(static, batch(bucket, experts, scale.k, scale.device), strict=True):
            tensor.copy_(fresh)
        policy.copy_(policy_of(k0, scale.device))
        real.fill_(held)
        weights, ids, changed, scores = graph.replay()
        expected_ids, expected_weights = static[1].clone(), static[0].clone()
        if held and k0 < scale.k:
            alone = [tensor[:held].clone() for tensor in static]  # as if there were no padding at all
            used = scores[:held].clone()
            operator._scores = lambda *_, used=used: used
            expected_weights[:held], expected_ids[:held], _ = operator.reroute(*alone, None, policy, None, rule)
            operator._scores = torchs_scores
        name = f"{held} real rows of {bucket}, k0 = {k0}"
        if not torch.equal(ids, expected_ids):
            wrong.append(f"{name}: ids {ids.tolist()}, expected {expected_ids.tolist()}")
        if not torch.allclose(weights, expected_weights, rtol=1e-6, atol=0) or changed[held:].any():
            wrong.append(f"{name}: weights, or a padded row that changed")
    print(f"2. a graph for {bucket} rows with fewer real ones and other policies: {len(wrong)} of 7 wrong")
    return wrong


def time_routing(scale: Scale) -> None:
    """Step 3."""
    operator: Any = cases.load("operator")
    kernel: Any = cases.load("kernel")
    print("3. microseconds in a graph: softmax and top-k in torch; then, besides, each form with k0 = k/2")
    print(f"{'E':>5} {'B':>4} {'top-k':>8} {'torch form':>11} {'fused':>8}  fused with 1, 2, 4 warps a row")
    for experts in scale.experts:
        for rows in scale.rows:
            weights, ids, logits = batch(rows, experts, scale.k, scale.device)
            given = (weights, ids, logits, None, policy_of(scale.k // 2, scale.device))
            real = torch.tensor([rows], device=scale.device)
            rule = operator.Rule(k=scale.k, plain=True)

            def native(logits: torch.Tensor = logits) -> Any:
                values, found = logits.softmax(-1).topk(scale.k)
                return values / values.sum(1, keepdim=True), found.int()

            def form(module: Any, given: Any = given, real: Any = real, rule: Any = rule) -> float:
                return microseconds(lambda: module.reroute(*given, real, rule), scale.device)

            fused = {}
            for kernel.WARPS in (1, 2, 4):
                fused[kernel.WARPS] = form(kernel)
            kernel.WARPS = 1
            first = (
                f"{experts:5} {rows:4} {microseconds(native, scale.device):8.2f} {form(operator):11.2f} {fused[1]:8.2f}"
            )
            print(f"{first}  {' '.join(f'{one:.2f}' for one in fused.values())}")


def time_layer(scale: Scale, layer: Layer) -> tuple[float, float]:
    """Step 4: the intercept and the slope of a layer's microseconds over T."""
    x = torch.randn(scale.layer_rows, scale.hidden, device=scale.device, dtype=scale.dtype)
    reads, times = [], []
    for pool in scale.pools:
        of_pool = torch.randperm(scale.layer_experts, device=scale.device)[:pool]
        draws = torch.rand(scale.layer_rows, pool, device=scale.device).topk(scale.k).indices
        made = plan(of_pool[draws])
        weights = torch.full(draws.shape, 1 / scale.k, device=scale.device)
        reads.append(float(made.experts))
        work = functools.partial(layer.forward, x, weights, made)
        times.append(microseconds(work, scale.device, calls=5))
    slope, intercept = statistics.linear_regression(reads, times)
    fit = statistics.correlation(reads, times) ** 2
    print(f"4. layer of {scale.layer_experts} experts of {layer.expert_bytes / 1e6:.2f} MB, {scale.layer_rows} rows:")
    print("   " + ", ".join(f"T {t:.0f}: {us:.1f}" for t, us in zip(reads, times, strict=True)))
    speed = layer.expert_bytes / slope / 1e6
    print(f"   {intercept:.1f} us + T * {slope:.2f} us, R^2 {fit:.4f}; an expert is read at {speed:.2f} TB/s")
    print("   the paper's cells, H100: 33.3 + T * 2.92; sglang's Triton kernel: H100 23 + T * 3.09, H200 20 + T * 2.17")
    return intercept, slope


def likeness(scale: Scale, wanted: float) -> float:
    """How much rows must have in common for a batch to choose so many experts in the mean, as real traffic does."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        drawn = (batch(scale.layer_rows, scale.layer_experts, scale.k, scale.device, middle)[1] for _ in range(40))
        mean = statistics.fmean(ids.unique().numel() for ids in drawn)
        low, high = (middle, high) if mean > wanted else (low, middle)
    return low


def time_savings(scale: Scale, layer: Layer, batches: int) -> None:
    """Step 5: layer time at each k0 on the same batches, of which the native T is the paper's."""
    operator: Any = cases.load("operator")
    kernel: Any = cases.load("kernel")
    wanted = PAPER[8][0] * scale.layer_experts / 128
    shared = likeness(scale, wanted)
    x = torch.randn(scale.layer_rows, scale.hidden, device=scale.device, dtype=scale.dtype)
    drawn = [batch(scale.layer_rows, scale.layer_experts, scale.k, scale.device, shared) for _ in range(batches)]
    rule = operator.Rule(k=scale.k, plain=True)
    told: dict[int, tuple[float, float]] = {}
    for k0 in sorted({min(k0, scale.k) for k0 in PAPER}, reverse=True):
        reads, times = [], []
        for given in drawn:
            weights, ids, _ = kernel.reroute(*given, None, policy_of(k0, scale.device), None, rule)
            made = plan(ids)
            reads.append(float(made.experts))
            work = functools.partial(layer.forward, x, weights, made)
            times.append(microseconds(work, scale.device, calls=5, replays=10))
        told[k0] = (statistics.fmean(reads), statistics.fmean(times))
    print(f"5. {batches} batches of {scale.layer_rows} rows, alike enough for the paper's T; microseconds of the layer")
    print(f"{'k0':>5} {'T':>7} {'us':>8} {'saved':>7}    {'paper T':>8} {'us':>7} {'saved':>7}")
    whole = told[max(told)][1]
    for k0, (reads_mean, us) in told.items():
        row = f"{k0:5} {reads_mean:7.1f} {us:8.1f} {1 - us / whole:7.1%}"
        paper = PAPER.get(k0)
        print(row + (f"    {paper[0]:8.1f} {paper[1]:7.1f} {1 - paper[1] / PAPER[8][1]:7.1%}" if paper else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny, in Triton's interpreter")
    parser.add_argument("--cases", type=int, default=2000, help="random batches of step 1")
    parser.add_argument("--batches", type=int, default=8, help="batches of step 5")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    scale = DRY if asked.dry_run else GPU
    if asked.dry_run:
        print("DRY RUN on the CPU, in Triton's interpreter: what stands where times stand means nothing.")
    elif not torch.cuda.is_available():
        print("Expected a CUDA device, found none. --dry-run goes through every step on the CPU.", file=sys.stderr)
        return 2
    else:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        print(f"{name}, compute capability {capability[0]}.{capability[1]}")
    print(f"torch {torch.__version__}, Triton {triton.__version__}")
    torch.manual_seed(asked.seed)
    wrong = check_cases(scale, asked.cases, asked.seed) + check_padding(scale)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    time_routing(scale)
    layer = Layer(scale.layer_experts, scale.hidden, scale.width, scale.device, scale.dtype)
    time_layer(scale, layer)
    time_savings(scale, layer, asked.batches)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
