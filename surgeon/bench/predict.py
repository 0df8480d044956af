"""What OEA would save: T, the time of a layer and of a step, and throughput, per batch size and k0.

Nothing here is measured on the node that is asked about. T comes from uniform routing, which is a ceiling, or from a
recording; a layer's time from measured rows (:mod:`surgeon.bench.latency`); the rest of a step from a published curve
of the same setup, or from whoever asks, or is not known, and then only the MoE layers are told about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from surgeon.bench import active, latency

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surgeon.bench.latency import Layer
    from surgeon.bench.serving import Rest
    from surgeon.bench.shape import Shape

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
LARGEST: Final = 64
_COLUMNS: Final = 4


class Traffic(Protocol):
    """How rows choose experts: T per layer, averaged over layers."""

    @property
    def says(self) -> str:
        """Where T comes from, in words."""

    def active(self, rows: int, kept: int) -> float:
        """T when each of B rows counts with its ``kept`` best experts; ``kept`` = k is the unchanged model."""


@dataclass(frozen=True)
class Uniform:
    """Every expert is equally likely, and rows are independent: the ceiling."""

    experts: int
    top_k: int
    says: str = "uniform routing (the ceiling: real traffic reads fewer experts, and so has less to save)"

    def active(self, rows: int, kept: int) -> float:
        """T of B rows that count with their ``kept`` best experts."""
        return active.uniform(self.experts, kept, rows)


@dataclass(frozen=True)
class Routing:
    """What the changed routing step costs.

    Attributes:
        name: ``unfused``, ``fused``, ``free`` or ``given``.
        us: microseconds per layer.
        low: at best.
        high: at worst.
        why: where the number comes from.
    """

    name: str
    us: float
    low: float
    high: float
    why: str


@dataclass(frozen=True)
class Setup:
    """What the prediction is about.

    Attributes:
        shape: of the model.
        dtype: how its experts are stored.
        gpu: which one, for people.
        tp: GPUs that the model is spread over.
        ep: of them, how many expert-parallel ranks.
        layer: what a MoE layer takes.
        rest: what a step takes beside them; None when nobody knows.
        routing: what the changed routing step costs.
        strict: whether the refill is the paper's, which stops when the batch's experts run out.
    """

    shape: Shape
    dtype: str
    gpu: str
    tp: int
    ep: int
    layer: Layer
    rest: Rest | None
    routing: Routing
    strict: bool = False


@dataclass(frozen=True)
class Cell:
    """One batch size and one k0.

    Attributes:
        rows: of the batch (B).
        k0: experts that each row keeps; k is the unchanged model.
        active: T over all experts.
        busiest: T of the rank that the others wait for; the same without expert parallelism.
        moe_ms: all MoE layers of a step, routing step included, milliseconds.
        step_ms: the whole step; None when the rest of it is not known.
        change: of the step's time, or of the MoE layers' if the rest is not known; -0.16 is 16 % less.
        best: the same with the cheapest routing step and the largest b that the uncertainties allow.
        worst: the same with the dearest and the smallest.
        tok_s: tokens per second of the whole batch; None when the step is not known.
    """

    rows: int
    k0: int
    active: float
    busiest: float
    moe_ms: float
    step_ms: float | None
    change: float
    best: float
    worst: float
    tok_s: float | None

    @property
    def gain(self) -> float:
        """Change of throughput; 0.19 is 19 % more tokens per second."""
        return 1 / (1 + self.change) - 1


@dataclass(frozen=True)
class Span:
    """Batch sizes for which a k0 saves time, of those from 1 to LARGEST; None when there are none."""

    first: int | None
    last: int | None


@dataclass(frozen=True)
class Prediction:
    """All that was predicted.

    Attributes:
        setup: what it is about.
        traffic: where T comes from.
        native: the unchanged model, per batch size.
        cells: per k0, per batch size.
        pays: per k0, from which batch size it saves time.
        curves: per k0, the change at every batch size from 1 to LARGEST.
    """

    setup: Setup
    traffic: str
    native: tuple[Cell, ...]
    cells: Mapping[int, tuple[Cell, ...]]
    pays: Mapping[int, Span]
    curves: Mapping[int, tuple[float, ...]]


def routing_step(name: str) -> Routing:
    """A shipped assumption about the cost of the routing step; ``default`` is what this release ships."""
    known: Mapping[str, Any] = latency.data("routing")
    name = str(known["default"]) if name == "default" else name
    return Routing(name=name, **known[name])


def columns(top_k: int) -> tuple[int, ...]:
    """The values of k0 worth a look: 3, 4, 5, 6 for top-8, 2 and 3 for top-4."""
    return tuple(range(max(2, top_k // 2 - 1), top_k))[:_COLUMNS] or (1,)


def predict(setup: Setup, traffic: Traffic, *, batches: Sequence[int], k0s: Sequence[int]) -> Prediction:
    """Predict a table of batch sizes and k0.

    Args:
        setup: what it is about.
        traffic: how rows choose.
        batches: batch sizes (B), each 1 or more.
        k0s: values of k0, each from 1 to k - 1.
    """
    curves = {k0: tuple(_cell(setup, traffic, rows, k0).change for rows in range(1, LARGEST + 1)) for k0 in k0s}
    return Prediction(
        setup=setup,
        traffic=traffic.says,
        native=tuple(_cell(setup, traffic, rows, setup.shape.top_k) for rows in batches),
        cells={k0: tuple(_cell(setup, traffic, rows, k0) for rows in batches) for k0 in k0s},
        pays={k0: _span(curves[k0]) for k0 in k0s},
        curves=curves,
    )


def kept(setup: Setup, traffic: Traffic, rows: int, k0: int) -> float:
    """T under OEA: the rows' own k0 best, and what the refill adds in small batches."""
    shape = setup.shape
    found = traffic.active(rows, k0)
    if not setup.strict:
        found += active.filled_up(shape.experts, k0, shape.top_k, rows)
    return min(found, traffic.active(rows, shape.top_k))


def _cell(setup: Setup, traffic: Traffic, rows: int, k0: int) -> Cell:
    shape, routing, native = setup.shape, setup.routing, k0 == setup.shape.top_k
    all_before = traffic.active(rows, shape.top_k)
    all_after = all_before if native else kept(setup, traffic, rows, k0)
    before = active.slowest_rank(all_before, shape.experts, setup.ep)
    after = active.slowest_rank(all_after, shape.experts, setup.ep)
    rest = setup.rest.ms(rows) if setup.rest else 0.0

    def ms(count: float, overhead_us: float, b_factor: float = 1.0) -> float:
        return shape.layers * (setup.layer.c + b_factor * setup.layer.b * count + overhead_us) / 1e3

    def change(overhead_us: float, b_factor: float = 1.0) -> float:
        if native:
            return 0.0
        return (rest + ms(after, overhead_us, b_factor)) / (rest + ms(before, 0.0, b_factor)) - 1

    moe_ms = ms(after, 0.0 if native else routing.us)
    step_ms = rest + moe_ms if setup.rest else None
    off = setup.layer.uncertainty
    return Cell(
        rows=rows,
        k0=k0,
        active=all_after,
        busiest=after,
        moe_ms=moe_ms,
        step_ms=step_ms,
        change=change(routing.us),
        best=change(routing.low, 1 + off),
        worst=change(routing.high, 1 - off),
        tok_s=rows / step_ms * 1e3 if step_ms else None,
    )


def _span(changes: Sequence[float]) -> Span:
    """The last run of batch sizes that save time."""
    paying = [rows for rows, change in enumerate(changes, start=1) if change < 0]
    if not paying:
        return Span(None, None)
    first = last = paying[-1]
    while first - 1 in paying:
        first -= 1
    return Span(first, last)
