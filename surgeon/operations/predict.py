"""The story of ``surgeon predict oea``: what the model is, what it runs on, how it is used, and what OEA would save."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from surgeon.bench import active, latency, predict, recording, serving, shape
from surgeon.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from surgeon.bench.predict import Prediction, Traffic
    from surgeon.bench.shape import Shape
    from surgeon.operations.subject import Subject
    from surgeon.patches import Patch

_RECORDING_LIMIT: Final = 1 << 30
# sglang's words for --moe-runner-backend that leave the choice to it.
_OPEN_KERNELS: Final = {"", "auto"}


@dataclass(frozen=True)
class Asked:
    """What a person said; None where they did not.

    Attributes:
        gpu: which one, by our name or nvidia-smi's.
        tp: GPUs that the model is spread over.
        ep: of them, how many expert-parallel ranks.
        dtype: how the experts are stored.
        kernel: what computes the experts, in sglang's word.
        batches: batch sizes.
        k0s: values of k0.
        routing: ``unfused``, ``fused`` or ``free``.
        overhead_us: a cost of the routing step per layer that was measured.
        rest_ms: what a step takes beside its MoE layers.
        b_us: microseconds per expert that were measured.
        c_us: microseconds of a layer besides.
        strict: whether the refill is the paper's.
        recordings: files of sglang's recorder.
        shares: a JSON file with how often each expert is chosen.
    """

    gpu: str | None = None
    tp: int | None = None
    ep: int | None = None
    dtype: str | None = None
    kernel: str | None = None
    batches: tuple[int, ...] = ()
    k0s: tuple[int, ...] = ()
    routing: str | None = None
    overhead_us: float | None = None
    rest_ms: float | None = None
    b_us: float | None = None
    c_us: float | None = None
    strict: bool = False
    recordings: tuple[Path, ...] = ()
    shares: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The prediction and all that it rests on.

    Attributes:
        prediction: the numbers.
        where: where the model was read.
        caveats: what they do not tell, one sentence each.
        range: the batch sizes that the patch re-routes by default.
    """

    prediction: Prediction
    where: str
    caveats: tuple[str, ...]
    range: tuple[int, int]


def run(subject: Subject, asked: Asked, patch: Patch) -> Outcome:
    """Predict what OEA would save.

    Args:
        subject: what is served, and on what.
        asked: what a person said; it goes before what was found out.
        patch: OEA, for the batch sizes that it re-routes by default.

    Raises:
        UsageError: what was asked makes no sense, or a recording cannot be read.
        DoesNotFitError: it is no mixture-of-experts model, or nothing is known of such a layer on such a GPU.
    """
    model = shape.parse(subject.config, subject.name)
    dtype = _dtype(subject, asked, model)
    tp, ep = asked.tp or subject.tp or 1, asked.ep or subject.ep or 1
    _check_split(model, tp, ep)
    gpu, layer = _layer(subject, asked, model, dtype, (tp, ep))
    curve = serving.curve(model, gpu=gpu, dtype=dtype, tp=tp, ep=ep)
    rest = curve.rest if curve and layer.kernel == curve.kernel else None
    if asked.rest_ms is not None:
        rest = serving.Rest(asked.rest_ms, 0.0, f"{asked.rest_ms:g} ms, given with --rest-ms")
    recorded = _recorded(asked.recordings, model) if asked.recordings else None
    shares = read_shares(asked.shares, model) if asked.shares else None
    traffic: Traffic = recorded or shares or predict.Uniform(model.experts, model.top_k)
    setup = predict.Setup(
        shape=model,
        dtype=dtype,
        gpu=gpu,
        tp=tp,
        ep=ep,
        layer=layer,
        rest=rest,
        routing=_routing(asked),
        strict=asked.strict,
    )
    k0s = asked.k0s or predict.columns(model.top_k)
    if wrong := [k0 for k0 in k0s if not 1 <= k0 < model.top_k]:
        raise UsageError(
            f"k0 is {wrong[0]}; expected 1..{model.top_k - 1}: {model.name} uses k = {model.top_k} experts per token",
            where="--k0",
        )
    found = predict.predict(setup, traffic, batches=asked.batches or predict.BATCHES, k0s=k0s)
    reach = (int(patch.settings["min_rows"]), int(patch.settings["max_rows"]))
    return Outcome(found, subject.where, _caveats(subject, found, traffic, reach), reach)


def _dtype(subject: Subject, asked: Asked, model: Shape) -> str:
    if asked.dtype:
        return shape.checked_dtype(asked.dtype)
    # The command line goes before the checkpoint; sglang's plain "modelopt" says nothing.
    found = shape.as_dtype(subject.quantization) or model.dtype
    if not found:
        raise UsageError(
            f"how the experts of {model.name} are stored could not be told from its config",
            advice=f"say --dtype, one of {', '.join(shape.BYTES_PER_WEIGHT)}",
            where="--dtype",
        )
    return found


def _check_split(model: Shape, tp: int, ep: int) -> None:
    if tp < 1 or ep < 1 or tp % ep or model.experts % ep:
        raise UsageError(
            f"tp = {tp} and ep = {ep}: expected ep to divide tp and the {model.experts} experts of {model.name}",
            where="--ep",
        )


def _layer(
    subject: Subject, asked: Asked, model: Shape, dtype: str, split: tuple[int, int]
) -> tuple[str, latency.Layer]:
    name = asked.gpu or subject.gpu
    if asked.b_us is not None or asked.c_us is not None:
        if asked.b_us is None or asked.c_us is None:
            raise UsageError("--b-us and --c-us go together; expected both, found one", where="--b-us")
        return name or "a GPU that was not named", latency.given(asked.b_us, asked.c_us)
    if name is None:
        raise UsageError(
            "no GPU is named, and none was found; expected one that was measured: "
            f"{', '.join(sorted({row.gpu for row in latency.rows()}))}",
            advice="say --gpu NAME, or give your own measurement with --b-us and --c-us",
            where="--gpu",
        )
    gpu = latency.gpu(name)
    kernel = asked.kernel or (None if subject.kernel in _OPEN_KERNELS else subject.kernel)
    mb = model.expert_mb(dtype, tp=split[0], ep=split[1])
    return gpu.id, latency.layer(gpu.id, dtype, mb, kernel=kernel)


def _routing(asked: Asked) -> predict.Routing:
    if asked.overhead_us is not None:
        us = asked.overhead_us
        if us < 0:
            raise UsageError(f"the overhead is {us:g} us; expected 0 or more", where="--overhead-us")
        return predict.Routing("given", us, us, us, "given with --overhead-us")
    return predict.routing_step(asked.routing or "default")


def read_recordings(files: Sequence[Path], top_k: int) -> tuple[recording.Pass, ...]:
    """The passes of files of sglang's recorder on this machine.

    Raises:
        UsageError: a file is not there, or is no recording.
    """
    passes: list[recording.Pass] = []
    for rank, file in enumerate(files):
        try:
            if file.stat().st_size > _RECORDING_LIMIT:
                raise UsageError(f"{file} is larger than 1 GiB; record for a shorter time", where=str(file))
            data = file.read_bytes()
        except OSError as error:
            raise UsageError(
                f"{file} cannot be read: {error.strerror or error}; expected a file of sglang's recorder",
                advice="record one with `surgeon record routing --out FILE`",
                where=str(file),
                code="no-recording",
            ) from error
        passes += recording.read(str(file), data, top_k=top_k, rank=rank)
    return tuple(passes)


def read_shares(file: Path, model: Shape) -> active.Shares:
    """How often each expert is chosen, from a JSON file: a list per layer, or one list; shares or counts alike.

    Raises:
        UsageError: it cannot be read, or is of another model.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as JSON: {error}", where=str(file)) from error
    layers = raw if isinstance(raw, list) and raw and all(isinstance(one, list) for one in raw) else [raw]
    found = []
    for layer in layers:
        numbers = layer if isinstance(layer, list) else []
        plain = all(type(one) in {int, float} and one >= 0 for one in numbers)
        if len(numbers) != model.experts or not plain or not sum(numbers):
            raise UsageError(
                f"{file}: expected {model.experts} numbers for each layer, shares or counts, none below 0, not all 0",
                where=str(file),
            )
        found.append(tuple(one * model.top_k / sum(numbers) for one in numbers))
    if any(share > 1 + 1e-6 for layer in found for share in layer):
        raise UsageError(
            f"{file}: an expert is chosen more often than once per token; expected at most 1 of {model.top_k}",
            where=str(file),
        )
    clipped = tuple(tuple(min(1.0, share) for share in layer) for layer in found)
    return active.Shares(clipped, model.top_k, f"given shares of each expert ({file}), rows independent")


def _recorded(files: Sequence[Path], model: Shape) -> recording.Summary:
    return recording.summarize(read_recordings(files, model.top_k), experts=model.experts, top_k=model.top_k)


def _caveats(subject: Subject, found: Prediction, traffic: Traffic, reach: tuple[int, int]) -> tuple[str, ...]:
    setup, caveats = found.setup, [*subject.notes]
    if isinstance(traffic, active.Shares):
        caveats.append(
            "rows are taken to be independent; those of one batch resemble each other, and read fewer experts"
        )
    elif isinstance(traffic, predict.Uniform):
        caveats.append(
            "T is that of uniform routing, so the saving is a ceiling; `surgeon record routing` tells what traffic has"
        )
    else:
        caveats.append(
            "T under k0 is told from the recorded shares, since a recording does not say which of a token's experts "
            "are its best; in simulations of skewed experts and alike rows that was within 8 %"
        )
    if setup.layer.kind in {"interpolated", "scaled"}:
        caveats.append(f"the layer's time is not measured at this size of expert: {setup.layer.why}")
    if setup.rest is None:
        caveats.append(
            "what a step takes beside its MoE layers is not known for this setup, so changes are those of the MoE "
            "layers alone and an upper bound for the step; say --rest-ms to get steps"
        )
    if setup.ep > 1:
        caveats.append(
            f"each of {setup.ep} expert-parallel ranks holds {setup.shape.experts // setup.ep} experts, chosen "
            "independently of each other; the slowest rank counts, and communication does not"
        )
    if setup.shape.groups > 1:
        caveats.append("the refill stays inside a token's groups of experts, which is not modelled")
    most = latency.max_rows()
    if setup.layer.kind != "given" and any(cell.rows > most for cell in found.native):
        caveats.append(f"layers were measured with up to {most} rows; beyond, c + b*T leaves arithmetic out")
    caveats += [
        f"the patch re-routes batches of {reach[0]} to {reach[1]} rows by default; others (in parentheses) stay native",
        "rows that pad a captured CUDA graph read experts too; use batch sizes that are captured densely",
        "quality is not predicted: a small k0 costs some, and larger models want a larger one",
    ]
    return tuple(caveats)
