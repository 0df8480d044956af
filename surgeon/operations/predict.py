"""The story of ``surgeon predict oea``: what the model is, what it runs on, how it is used, and what OEA would save."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from surgeon.bench import latency, predict, recording, serving, shape
from surgeon.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surgeon.bench.predict import Prediction, Traffic
    from surgeon.bench.shape import Shape
    from surgeon.operations.survey import Survey
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


@dataclass(frozen=True)
class Subject:
    """What is served, and on what, as far as it could be found out.

    Attributes:
        config: the model's config.json.
        name: what to call the model.
        where: where that was read.
        gpu: which one; None if nobody says.
        tp: GPUs that the model is spread over.
        ep: of them, how many expert-parallel ranks.
        quantization: sglang's word for it; empty if nobody says.
        kernel: sglang's word for what computes the experts; empty if nobody says.
        notes: what a person should know about these findings.
    """

    config: Mapping[str, Any]
    name: str
    where: str
    gpu: str | None = None
    tp: int | None = None
    ep: int | None = None
    quantization: str = ""
    kernel: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The prediction and all that it rests on.

    Attributes:
        prediction: the numbers.
        where: where the model was read.
        caveats: what they do not tell, one sentence each.
        recorded: what the recording says, if there is one.
        range: the batch sizes that the patch re-routes by default.
    """

    prediction: Prediction
    where: str
    caveats: tuple[str, ...]
    recorded: recording.Summary | None
    range: tuple[int, int]


def named(model: str) -> Subject:
    """A model by the path of its config.json or its folder, or by the name of one that surgeon knows.

    Raises:
        UsageError: there is no such file, and no such name.
    """
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read as JSON: {error}", where="--model") from error
        if not isinstance(config, dict):
            raise UsageError(f"{file} is not a model's config.json: it holds no object", where="--model")
        return Subject(config, file.resolve().parent.name, str(file))
    plain = model.rpartition("/")[2].lower()
    known = {name: table for name, table in latency.data("models").items() if isinstance(table, dict)}
    for name, table in known.items():
        # A name may end with how the checkpoint is stored, as in GLM-5-NVFP4; anything else is another model.
        tail = plain.removeprefix(name.lower()).lstrip("-_")
        if plain.startswith(name.lower()) and (not tail or shape.as_dtype(tail)):
            return Subject(table, name, f"the fields that surgeon ships of {name}", quantization=tail)
    raise UsageError(
        f"{model!r} is neither a config.json or its folder, nor one of the models that surgeon knows: "
        f"{', '.join(known)}",
        advice="give the path of the model's config.json",
        where="--model",
        code="unknown-model",
    )


def from_recipe(name: str) -> Subject:
    """What a recipe serves: by its file, or by the name of one that surgeon ships.

    Raises:
        UsageError: there is no such recipe, or it names no model.
    """
    from surgeon import patches

    path = Path(name).expanduser()
    shipped = patches.data_dir("recipes")
    file = path if path.is_file() else shipped / f"{name.removesuffix('.toml')}.toml"
    if not file.is_file():
        known = ", ".join(sorted(one.stem for one in shipped.glob("*.toml")))
        raise UsageError(f"there is no recipe {name!r}; expected a file, or one of {known}", where="--recipe")
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read as TOML: {error}", where="--recipe") from error
    model, launch = table.get("model"), table.get("launch")
    if not isinstance(model, str):
        raise UsageError(f"{file} names no model: expected model = a path or a name", where="--recipe")
    words = launch.get("argv", []) if isinstance(launch, dict) else []
    argv = [str(word) for word in words]
    found = named(model)
    gpu = table.get("gpu")
    return replace(
        found,
        where=f"{file.name}, {found.where}",
        gpu=str(gpu) if gpu else None,
        tp=_number(_option(argv, "--tp", "--tp-size", "--tensor-parallel-size")),
        ep=_number(_option(argv, "--ep", "--ep-size", "--expert-parallel-size")),
        quantization=_option(argv, "--quantization") or found.quantization,
        kernel=_option(argv, "--moe-runner-backend") or "",
    )


def served(seen: Survey) -> Subject:
    """What the running server serves, and on which GPUs.

    Raises:
        DoesNotFitError: no server runs, or its model's config.json is not on the node.
    """
    if seen.server is None:
        raise DoesNotFitError(
            "no server is running on the node; expected one, to read its model and GPUs from",
            advice="name them: --model PATH --gpu NAME --tp N",
            code="no-server",
        )
    if not seen.model_config:
        raise DoesNotFitError(
            f"the config.json of {seen.server.model_path or 'the served model'} could not be read on the node",
            advice="give it with --model PATH",
            code="no-config",
        )
    info, argv = seen.server_info or {}, list(seen.server.argv)
    gpus = sorted({str(one["name"]) for one in seen.gpus})
    notes = [f"the node has different GPUs ({', '.join(gpus)}); the first is taken"] if len(gpus) > 1 else []
    if info.get("enable_dp_attention") or "--enable-dp-attention" in argv:
        notes.append(
            "under DP attention each rank sees its own rows only, and a batch here means the rows of all ranks; the "
            "refill in small batches is then slightly worse than predicted"
        )
    if info.get("speculative_algorithm") or _option(argv, "--speculative-algorithm"):
        notes.append("with speculative decoding a batch here means the rows that are verified, not the requests")
    return Subject(
        config=seen.model_config,
        name=(seen.server.model_path or str((seen.model or {}).get("path") or "")).rstrip("/").rpartition("/")[2],
        where=f"the server on port {seen.server.port}",
        gpu=gpus[0] if gpus else None,
        tp=_number(info.get("tp_size") or _option(argv, "--tp", "--tp-size", "--tensor-parallel-size")) or 1,
        ep=_number(info.get("ep_size") or _option(argv, "--ep", "--ep-size", "--expert-parallel-size")) or 1,
        quantization=str(info.get("quantization") or _option(argv, "--quantization") or ""),
        kernel=str(info.get("moe_runner_backend") or _option(argv, "--moe-runner-backend") or ""),
        notes=tuple(notes),
    )


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
    traffic: Traffic = recorded or predict.Uniform(model.experts, model.top_k)
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
    return Outcome(found, subject.where, _caveats(subject, found, recorded, reach), recorded, reach)


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


def _recorded(files: Sequence[Path], model: Shape) -> recording.Summary:
    return recording.summarize(read_recordings(files, model.top_k), experts=model.experts, top_k=model.top_k)


def _caveats(
    subject: Subject, found: Prediction, recorded: recording.Summary | None, reach: tuple[int, int]
) -> tuple[str, ...]:
    setup, caveats = found.setup, [*subject.notes]
    if recorded is None:
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


def _option(argv: Sequence[str], *names: str) -> str | None:
    """The value of the last of these options, in ``--name value`` or ``--name=value``."""
    found = None
    for place, word in enumerate(argv):
        name, separator, value = word.partition("=")
        if name in names:
            found = value if separator else next(iter(argv[place + 1 : place + 2]), None)
    return found


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
