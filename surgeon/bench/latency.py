"""What one MoE layer takes in decode, ``c + b * T``: measured rows, shipped as data, and what may be told from them.

Between measured sizes of an expert, on one GPU, kernel and dtype, b is interpolated: leaving each inner row out and
telling it from its neighbours is off by 3 % at most. Outside of them b is scaled by the expert's size, which is off by
up to 25 % over a factor of eight (small experts are read less efficiently). GPUs are never told from each other.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from surgeon.errors import DoesNotFitError, UsageError

_DATA: Final = Path(__file__).resolve().parent / "data"
_SAME: Final = 0.02
_FARTHEST: Final = 8.0
# Of b. The OEA paper's own cells (arXiv 2511.02237, tables 3 and 4) fit 2.92 us where the row of the same GPU and model
# has 3.09: two measurements of one thing are 6 % apart.
UNCERTAINTY: Final = {"measured": 0.06, "interpolated": 0.08, "scaled": 0.25, "given": 0.0}


@dataclass(frozen=True)
class Row:
    """One measured layer.

    Attributes:
        gpu: which one, by our short name.
        kernel: what computes the experts, in sglang's word for ``--moe-runner-backend``.
        dtype: how the experts are stored.
        model: whose layer it was.
        tp: GPUs that it was spread over.
        mb: bytes per expert and GPU, 10^6.
        b: microseconds per expert read.
        c: microseconds besides.
    """

    gpu: str
    kernel: str
    dtype: str
    model: str
    tp: int
    mb: float
    b: float
    c: float


@dataclass(frozen=True)
class Layer:
    """What a layer is taken to cost.

    Attributes:
        b: microseconds per expert read.
        c: microseconds besides.
        kind: ``measured``, ``interpolated``, ``scaled`` or ``given``.
        why: where the two numbers come from.
        uncertainty: relative, of b.
        kernel: what computes the experts; empty if it was given.
    """

    b: float
    c: float
    kind: str
    why: str
    uncertainty: float
    kernel: str = ""

    def us(self, active: float) -> float:
        """Microseconds for T active experts."""
        return self.c + self.b * active


@dataclass(frozen=True)
class Gpu:
    """A GPU that was measured: our short name, and the one that people use."""

    id: str
    name: str


@functools.cache
def data(name: str) -> dict[str, Any]:
    """One of the data files beside this module, parsed."""
    return tomllib.loads((_DATA / f"{name}.toml").read_text(encoding="utf-8"))


def rows() -> tuple[Row, ...]:
    """Every measured row."""
    return tuple(Row(**row) for row in data("latency")["row"])


def source() -> str:
    """Where the rows come from."""
    return str(data("latency")["source"])


def max_rows() -> int:
    """The largest batch that was measured."""
    return int(data("latency")["max_rows"])


def gpu(name: str) -> Gpu:
    """The measured GPU of a name: ours, or the one that nvidia-smi gives it.

    Raises:
        DoesNotFitError: nobody measured that one.
    """
    plain = name.upper()
    for known in data("latency")["gpu"]:
        said = name.lower() == known["id"] or all(word in plain for word in known["words"])
        if said and not any(word in plain for word in known["not"]):
            return Gpu(known["id"], known["name"])
    listed = ", ".join(known["id"] for known in data("latency")["gpu"])
    raise DoesNotFitError(
        f"no measured layer times for the GPU {name!r}; measured ones: {listed}",
        advice="give your own measurement with --b-us and --c-us; times are never carried over from another GPU",
        where="--gpu",
        code="unknown-gpu",
    )


def layer(gpu_id: str, dtype: str, mb: float, *, kernel: str | None = None) -> Layer:
    """What a layer costs on a GPU, with experts of a size.

    Args:
        gpu_id: from :func:`gpu`.
        dtype: how the experts are stored.
        mb: bytes per expert and GPU, 10^6.
        kernel: the one that is meant; None for whichever was measured.

    Raises:
        DoesNotFitError: that GPU was not measured with such experts.
    """
    measured = [row for row in rows() if row.gpu == gpu_id]
    chosen = [row for row in measured if row.dtype == dtype and kernel in {None, row.kernel}]
    near = min(chosen, key=lambda row: max(row.mb / mb, mb / row.mb), default=None)
    if near is None or max(near.mb / mb, mb / near.mb) > _FARTHEST:
        known = "; ".join(f"{r.dtype} {r.kernel} {r.mb:g} MB" for r in measured)
        asked = f"{dtype} experts of {mb:.3g} MB{f' under {kernel}' if kernel else ''}"
        raise DoesNotFitError(
            f"no measured layer times on {gpu_id} for {asked}; measured there: {known}",
            advice="name a measured kernel or dtype to go by with --kernel or --dtype, or give your own measurement "
            f"with --b-us and --c-us; experts more than {_FARTHEST:.0f} times smaller or larger are not told about",
            where="--dtype",
            code="unknown-layer",
        )
    return _between(sorted((r for r in chosen if r.kernel == near.kernel), key=lambda r: r.mb), near, mb)


def given(b: float, c: float) -> Layer:
    """A layer that was measured elsewhere.

    Raises:
        UsageError: a number makes no sense.
    """
    if b <= 0 or c < 0:
        raise UsageError(f"b = {b:g} us and c = {c:g} us; expected b above 0 and c of 0 or more", where="--b-us")
    return Layer(b, c, "given", "given with --b-us and --c-us", UNCERTAINTY["given"])


def _between(group: list[Row], near: Row, mb: float) -> Layer:
    what = f"{near.gpu}, {near.kernel} {near.dtype}"
    if abs(near.mb / mb - 1) <= _SAME:
        why = f"measured: {what}, {near.model} TP{near.tp}, {near.mb:g} MB per expert"
        return Layer(near.b, near.c, "measured", why, UNCERTAINTY["measured"], near.kernel)
    below = [row for row in group if row.mb < mb]
    above = [row for row in group if row.mb > mb]
    if below and above:
        low, high = below[-1], above[0]
        part = (mb - low.mb) / (high.mb - low.mb)
        why = f"interpolated to {mb:.3g} MB per expert between {low.mb:g} and {high.mb:g} MB: {what}"
        b, c = low.b + part * (high.b - low.b), low.c + part * (high.c - low.c)
        return Layer(b, c, "interpolated", why, UNCERTAINTY["interpolated"], near.kernel)
    why = f"scaled to {mb:.3g} MB per expert from {near.mb:g} MB, so b may be off by a quarter: {what}, {near.model}"
    return Layer(near.b * mb / near.mb, near.c, "scaled", why, UNCERTAINTY["scaled"], near.kernel)
