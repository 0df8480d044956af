"""What a decode step takes beside its MoE layers, told from published serving curves.

A step of B rows takes ``fixed + row * B + layers * (c + b * T(B))``. The last term is known from the layer's measured
times; the first two are fitted to the curve, with the relative error as the measure, since tokens per second are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surgeon.bench import active, latency
from surgeon.bench.shape import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.bench.latency import Layer
    from surgeon.bench.shape import Shape


@dataclass(frozen=True)
class Rest:
    """What a step takes beside its MoE layers: ``fixed_ms + row_ms * B``.

    Attributes:
        fixed_ms: milliseconds of every step.
        row_ms: milliseconds more per row.
        why: where the two numbers come from.
    """

    fixed_ms: float
    row_ms: float
    why: str

    def ms(self, rows: int) -> float:
        """Milliseconds of a step of B rows, beside its MoE layers."""
        return self.fixed_ms + self.row_ms * rows


@dataclass(frozen=True)
class Curve:
    """One published curve, and what was fitted to it.

    Attributes:
        model: which one.
        gpu: our short name.
        gpus: how many.
        dtype: how the experts are stored.
        kernel: what computes them.
        tp: tensor-parallel size.
        ep: expert-parallel size.
        source: who published it.
        clients: requests in flight.
        tok_s: tokens per second of all of them together.
        fixed_ms: fitted, milliseconds of every step.
        row_ms: fitted, milliseconds more per row.
    """

    model: str
    gpu: str
    gpus: int
    dtype: str
    kernel: str
    tp: int
    ep: int
    source: str
    clients: tuple[int, ...]
    tok_s: tuple[float, ...]
    fixed_ms: float
    row_ms: float

    @property
    def rest(self) -> Rest:
        """What was fitted."""
        return Rest(self.fixed_ms, self.row_ms, f"fitted to a published curve: {self.source}")


def curves() -> tuple[Curve, ...]:
    """Every published curve that is shipped."""
    return tuple(
        Curve(**{**one, "clients": tuple(one["clients"]), "tok_s": tuple(one["tok_s"])})
        for one in latency.data("serving")["curve"]
    )


def curve(shape: Shape, *, gpu: str, dtype: str, tp: int, ep: int) -> Curve | None:
    """The published curve of a setup, if there is one: the same model, GPU, dtype and split."""
    for one in curves():
        known = parse(latency.data("models")[one.model])
        alike = replace(known, name=shape.name, dtype=shape.dtype, groups=shape.groups) == shape
        if alike and (one.gpu, one.dtype, one.tp, one.ep) == (gpu, dtype, tp, ep):
            return one
    return None


def fit(clients: Sequence[int], tok_s: Sequence[float], shape: Shape, layer: Layer) -> tuple[float, float]:
    """Fit fixed and row milliseconds to a curve by least squares of the relative error of a step.

    Args:
        clients: requests in flight at each point; a step serves all of them.
        tok_s: tokens per second at each point.
        shape: of the model.
        layer: what one of its MoE layers takes. Routing is taken to be uniform.

    Returns:
        Milliseconds of every step, and milliseconds more per row.
    """
    steps = [rows / rate * 1e3 for rows, rate in zip(clients, tok_s, strict=True)]
    # Every equation is divided by the step it is about: 1 = fixed / step + row * B / step + moe / step.
    ones = [1 / step for step in steps]
    rows_ = [rows / step for rows, step in zip(clients, steps, strict=True)]
    left = [1 - moe_ms(shape, layer, rows) / step for rows, step in zip(clients, steps, strict=True)]
    aa, ab, bb = _dot(ones, ones), _dot(ones, rows_), _dot(rows_, rows_)
    ay, by = _dot(ones, left), _dot(rows_, left)
    determinant = aa * bb - ab * ab
    return (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant


def moe_ms(shape: Shape, layer: Layer, rows: int) -> float:
    """Milliseconds of all MoE layers in a step of B rows, routed as the model does, uniformly."""
    return shape.layers * layer.us(active.uniform(shape.experts, shape.top_k, rows)) / 1e3


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))
