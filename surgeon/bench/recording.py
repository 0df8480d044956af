"""What sglang's expert-distribution recorder wrote: which experts each forward pass used, and what that says.

Modes (0.4.7 to 0.5.23): ``per_pass`` and ``per_token`` write one file per rank, with the tokens that each expert got in
each layer of each pass; ``stat`` and ``stat_approx`` write one file with the same counts summed over ranks. Only
``per_token`` says which passes decode; in the others a pass of few rows is taken for one. Rows that pad a captured CUDA
graph are counted like real ones.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from operator import add
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from surgeon.bench import active, torch_file
from surgeon.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DECODE: Final = "decode"
MAX_ROWS: Final = 64
# sglang's ForwardMode, the same from 0.4.6 to 0.5.23: 1 is extend, 2 decode.
_DECODE_MODE: Final = 2
_LAYER, _PASS = 2, 3


@dataclass(frozen=True)
class Pass:
    """One forward pass as one rank recorded it.

    Attributes:
        pass_id: the server's number of the pass.
        rank: number of the recording, of which each tensor-parallel rank writes one. On the CPU sglang 0.5.23 calls
            every rank 0, so recordings are numbered in the order in which they were written.
        rows: tokens in the batch.
        layers: indices of the layers that routed, in order; dense layers are left out.
        counts: for each of those layers, the tokens that each expert got.
        phase: ``decode`` or ``other``; empty where the recorder does not say.
    """

    pass_id: int
    rank: int
    rows: int
    layers: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...] = field(repr=False)
    phase: str = ""

    @functools.cached_property
    def active(self) -> tuple[int, ...]:
        """Experts with at least one token, per layer: the T of the OEA paper."""
        return tuple(len(layer) - layer.count(0) for layer in self.counts)


def read(name: str, data: bytes, *, top_k: int, rank: int = 0) -> tuple[Pass, ...]:
    """The passes of one file of the recorder, in order; those that routed nothing are left out.

    Args:
        name: of the file, for errors.
        data: its bytes.
        top_k: experts per token of the model (k), from which rows are counted.
        rank: number to give to its passes.

    Raises:
        UsageError: it is no such file.
    """
    try:
        found = list(_passes(torch_file.load(data), top_k, rank))
    except torch_file.BadFileError as error:
        raise UsageError(
            f"{name} cannot be read as a recording: {error}",
            advice="expected a file expert_distribution_recorder_*.pt, as sglang's recorder writes it",
            where=name,
            code="bad-recording",
        ) from error
    return tuple(one for one in found if one.layers)


def _passes(saved: Any, top_k: int, rank: int) -> Iterable[Pass]:
    if not isinstance(saved, dict):
        raise torch_file.BadFileError(f"it holds a {type(saved).__name__}; expected a dictionary")
    records, summed = saved.get("records"), saved.get("logical_count")
    if isinstance(records, list):
        return [_record(one, top_k, rank) for one in records]
    if isinstance(summed, torch_file.Tensor) and len(summed.shape) == _PASS:
        return _steps(summed, top_k, rank)
    raise torch_file.BadFileError(f"it holds {sorted(map(str, saved))}; expected records or logical_count")


def _record(record: Any, top_k: int, rank: int) -> Pass:
    counts = record.get("global_physical_count") if isinstance(record, dict) else None
    if not isinstance(counts, torch_file.Tensor) or len(counts.shape) != _LAYER:
        raise torch_file.BadFileError("a record has no global_physical_count of layers by experts")
    mode, ids = record.get("forward_mode"), record.get("input_ids")
    phase = "" if mode is None else DECODE if mode == _DECODE_MODE else "other"
    rows = len(ids) if isinstance(ids, list) else None
    return _pass(int(record.get("forward_pass_id", 0)), rank, counts.rows(), top_k, rows=rows, phase=phase)


def _steps(summed: torch_file.Tensor, top_k: int, rank: int) -> Iterable[Pass]:
    """Passes of a ``stat`` file: counts of all ranks together, which under tensor parallelism all count the same."""
    _, layers, _ = summed.shape
    rows = summed.rows()
    ranks = math.gcd(*(count for row in rows for count in row)) or 1
    for step in range(len(rows) // layers if layers else 0):
        part = [tuple(count // ranks for count in row) for row in rows[step * layers : (step + 1) * layers]]
        yield _pass(step, rank, part, top_k)


def _pass(
    pass_id: int, rank: int, counts: Sequence[tuple[int, ...]], top_k: int, *, rows: int | None = None, phase: str = ""
) -> Pass:
    routed = [(index, layer) for index, layer in enumerate(counts) if any(layer)]
    counted = sum(routed[0][1]) // top_k if routed else 0
    return Pass(
        pass_id=pass_id,
        rank=rank,
        rows=counted if rows is None else rows,
        layers=tuple(index for index, _ in routed),
        counts=tuple(layer for _, layer in routed),
        phase=phase,
    )


def decoding(passes: Iterable[Pass], *, max_rows: int = MAX_ROWS) -> tuple[Pass, ...]:
    """The passes that decode: those that say so, and of those that say nothing the ones of at most ``max_rows``."""
    return tuple(one for one in passes if one.phase == DECODE or (not one.phase and 0 < one.rows <= max_rows))


@dataclass(frozen=True)
class Size:
    """Decode passes of one batch size.

    Attributes:
        rows: tokens in the batch (B).
        passes: how many there were.
        active: mean T over passes and layers.
        uniform: T that uniform routing would have given.
        independent: T that rows would have given which choose independently, each expert with its recorded share.
    """

    rows: int
    passes: int
    active: float
    uniform: float
    independent: float


@dataclass(frozen=True)
class LayerUse:
    """How one layer used its experts in decode.

    Attributes:
        layer: its index in the model.
        active: mean T at the batch size that was recorded most.
        busiest: share of all choices that went to the most chosen expert.
        unused: experts that were never chosen.
        effective: e to the entropy of the choices: as many equally liked experts would be as mixed.
    """

    layer: int
    active: float
    busiest: float
    unused: int
    effective: float


@dataclass(frozen=True)
class Summary:
    """What decode looked like.

    Attributes:
        experts: routed experts per layer (E).
        top_k: experts per token (k).
        passes: decode passes.
        tokens: rows of all of them.
        sizes: by batch size, ascending.
        layers: layer by layer, for the batch size recorded most.
        usual: that batch size.
        shares: how often a row chose each expert, layer by layer.
    """

    experts: int
    top_k: int
    passes: int
    tokens: int
    sizes: tuple[Size, ...]
    layers: tuple[LayerUse, ...]
    usual: int
    shares: active.Shares = field(repr=False)

    @property
    def says(self) -> str:
        """Where it comes from, in words."""
        return f"a recording of {self.passes} decode passes ({self.tokens} rows)"

    def active(self, rows: int, kept: int) -> float:
        """T when each of B rows counts with its ``kept`` best experts, averaged over layers.

        Counts do not say which of a row's experts are its best: see :func:`surgeon.bench.active.shares_of_best`. How
        much rows of a batch resemble each other is taken from the recorded batch size next to B; one row resembles
        nobody.
        """
        near = min(self.sizes, key=lambda size: abs(math.log(size.rows / rows)))
        alike = near.active / near.independent if rows > 1 else 1.0
        return min(max(self.shares.active(rows, kept) * alike, float(kept)), float(self.experts))


def summarize(passes: Sequence[Pass], *, experts: int, top_k: int, max_rows: int = MAX_ROWS) -> Summary:
    """What the decode passes of a recording say.

    Args:
        passes: of one rank or several.
        experts: routed experts per layer (E); columns beyond, of fused shared or redundant experts, are an error.
        top_k: experts per token (k).
        max_rows: most rows of a pass that is taken for decode where the recorder does not say.

    Raises:
        DoesNotFitError: it holds no decode pass, or was made with another model.
    """
    chosen = decoding(passes, max_rows=max_rows)
    if not chosen:
        seen = ", ".join(map(str, sorted({one.rows for one in passes})[:12])) or "none at all"
        raise DoesNotFitError(
            f"the recording holds no decode pass: expected passes of 1 to {max_rows} rows, found rows: {seen}",
            advice="record while the server generates, for longer, or with a load: surgeon record routing --load 16",
            code="no-decode",
        )
    widths = {len(layer) for one in chosen for layer in one.counts}
    if widths != {experts}:
        raise DoesNotFitError(
            f"the recording has {', '.join(map(str, sorted(widths)))} experts per layer; the model has {experts}",
            advice="name the model that was recorded; recordings with redundant experts (EPLB) are not read",
            code="other-model",
        )
    totals: dict[int, list[int]] = {}
    tokens: Counter[int] = Counter()
    for one in chosen:
        for layer, counts in zip(one.layers, one.counts, strict=True):
            totals[layer] = [*map(add, totals[layer], counts)] if layer in totals else [*counts]
            tokens[layer] += one.rows
    # A rank that counts the rows of others, as under expert parallelism, may count an expert more often than its rows.
    chosen_by = (tuple(min(1.0, count / tokens[layer]) for count in totals[layer]) for layer in sorted(totals))
    shares = active.Shares(tuple(chosen_by), top_k)
    by_rows: dict[int, list[Pass]] = defaultdict(list)
    for one in chosen:
        by_rows[one.rows].append(one)
    usual = max(by_rows, key=lambda rows: (len(by_rows[rows]), rows))
    sizes = [
        Size(
            rows=rows,
            passes=len(found),
            active=fmean(count for one in found for count in one.active),
            uniform=active.uniform(experts, top_k, rows),
            independent=shares.active(rows, top_k),
        )
        for rows, found in sorted(by_rows.items())
    ]
    return Summary(
        experts=experts,
        top_k=top_k,
        passes=len(chosen),
        tokens=sum(one.rows for one in chosen),
        sizes=tuple(sizes),
        layers=tuple(_use(layer, totals[layer], by_rows[usual]) for layer in sorted(totals)),
        usual=usual,
        shares=shares,
    )


def _use(layer: int, totals: Sequence[int], passes: Sequence[Pass]) -> LayerUse:
    every = sum(totals)
    entropy = -math.fsum(count / every * math.log(count / every) for count in totals if count)
    active_here = [one.active[one.layers.index(layer)] for one in passes if layer in one.layers]
    return LayerUse(
        layer=layer,
        active=fmean(active_here) if active_here else 0.0,
        busiest=max(totals) / every,
        unused=totals.count(0),
        effective=math.exp(entropy),
    )
