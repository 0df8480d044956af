"""A mixture-of-experts layer for measuring: a plain grouped GEMM in Triton, and captured graphs to time it in.

Not a fast kernel, and not sglang's: it reads every expert that was chosen once, as any grouped GEMM for small batches
does, so that time grows with the number of experts as it does there. It also runs in Triton's interpreter on the CPU.
"""

# Inside kernels Triton takes an annotation for a name of its own, and constants are named in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable

_ROWS_AT_ONCE = 16  # the least that tl.dot takes


@triton.jit
def _grouped(
    x, weights, out, source, block_expert, block_begin, block_end, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[p] = x[source[p]] @ weights[e].T for the pairs p of one block, all of expert e, and BLOCK_N columns."""
    block = tl.program_id(0)
    pairs = tl.load(block_begin + block) + tl.arange(0, BLOCK_M)
    inside = pairs < tl.load(block_end + block)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(source + pairs, mask=inside, other=0)
    base = weights + tl.load(block_expert + block).to(tl.int64) * (WIDTH * DEPTH)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, DEPTH, BLOCK_K):
        depth = begin + tl.arange(0, BLOCK_K)
        given = tl.load(x + rows[:, None] * DEPTH + depth[None, :], mask=inside[:, None], other=0.0)
        matrix = tl.load(base + columns[None, :] * DEPTH + depth[:, None])
        total += tl.dot(given, matrix)
    where = pairs[:, None] * WIDTH + columns[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside[:, None])


@dataclass(frozen=True)
class Plan:
    """Which pair of row and expert is where, once a choice is known: made before a graph is captured.

    Attributes:
        source: [pairs], the row of each pair; pairs lie by expert.
        back: [rows * k], where the pairs of the rows are.
        block_expert: [blocks], the expert of a block of pairs.
        block_begin: [blocks], its first pair.
        block_end: [blocks], the end of its expert's pairs.
        experts: how many experts were chosen.
    """

    source: torch.Tensor
    back: torch.Tensor
    block_expert: torch.Tensor
    block_begin: torch.Tensor
    block_end: torch.Tensor
    experts: int


def plan(ids: torch.Tensor) -> Plan:
    """Sort a choice by expert.

    Args:
        ids: [rows, k].
    """
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    blocks, begin = [], 0
    chosen, counts = flat.unique(return_counts=True)
    for expert, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        blocks += [(expert, start, begin + count) for start in range(begin, begin + count, _ROWS_AT_ONCE)]
        begin += count
    numbers = torch.tensor(blocks, dtype=torch.int32, device=ids.device)
    return Plan(
        source=(order // ids.shape[1]).int(),
        back=order.argsort(),
        block_expert=numbers[:, 0].contiguous(),
        block_begin=numbers[:, 1].contiguous(),
        block_end=numbers[:, 2].contiguous(),
        experts=len(chosen),
    )


class Layer:
    """Experts with random weights: gate and up in one matrix, and down.

    Attributes:
        gate_up: [experts, 2 * width, hidden].
        down: [experts, hidden, width].
    """

    def __init__(self, experts: int, hidden: int, width: int, device: str, dtype: torch.dtype) -> None:
        def matrix(*size: int) -> torch.Tensor:
            return torch.empty(size, device=device, dtype=dtype).uniform_(-1, 1).mul_((3 / size[-1]) ** 0.5)

        self.gate_up = matrix(experts, 2 * width, hidden)
        self.down = matrix(experts, hidden, width)

    @property
    def expert_bytes(self) -> int:
        """What one expert's weights take."""
        return int((self.gate_up[0].numel() + self.down[0].numel()) * self.down.element_size())

    def forward(self, x: torch.Tensor, weights: torch.Tensor, made: Plan) -> torch.Tensor:
        """The layer's output, [rows, hidden].

        Args:
            x: [rows, hidden].
            weights: [rows, k].
            made: of the ids that the weights belong to.
        """
        gate, up = self._times(x, self.gate_up, made, made.source).chunk(2, dim=1)
        # From here on each pair has a row of its own.
        own = torch.arange(len(made.source), dtype=torch.int32, device=x.device)
        each = self._times(torch.nn.functional.silu(gate) * up, self.down, made, own)
        rows, k = weights.shape
        return (each[made.back].view(rows, k, -1) * weights.to(x.dtype).unsqueeze(2)).sum(1)

    @staticmethod
    def _times(x: torch.Tensor, matrices: torch.Tensor, made: Plan, source: torch.Tensor) -> torch.Tensor:
        _, width, depth = matrices.shape
        columns, depths = min(64, width), min(128, depth)
        assert width % columns == depth % depths == 0, "sizes that the blocks do not divide"
        out = torch.empty((len(source), width), dtype=x.dtype, device=x.device)
        _grouped[(len(made.block_expert), width // columns)](
            x.contiguous(), matrices, out, source, made.block_expert, made.block_begin, made.block_end,
            WIDTH=width, DEPTH=depth, BLOCK_M=_ROWS_AT_ONCE, BLOCK_N=columns, BLOCK_K=depths, num_warps=4,
        )  # fmt: skip
        return out


class Captured:
    """Work as a CUDA graph; on the CPU, work that is done again.

    Attributes:
        result: what the work returned when it was captured: the tensors that a replay writes.
    """

    def __init__(self, work: Callable[[], Any], device: str) -> None:
        self._work = work
        self._graph: Any = None
        if device == "cpu":
            self.result = work()
            return
        # As torch asks for: first on another stream, so that nothing is compiled or set up within the capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = work()

    def replay(self) -> Any:
        """Do it again; returns the result."""
        if self._graph is None:
            self.result = self._work()
        else:
            self._graph.replay()
        return self.result


def microseconds(work: Callable[[], Any], device: str, calls: int = 20, replays: int = 30) -> float:
    """The median time of one call of the work inside a captured graph that holds ``calls`` of them, in microseconds."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e6

    def many() -> None:
        for _ in range(calls):
            work()

    graph = Captured(many, device)
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)
