"""What is served, and on what: from a config.json, a recipe, or the server that runs on the node."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.bench import latency, shape
from surgeon.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surgeon.operations.survey import Survey


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
        tp=_number(option(argv, "--tp", "--tp-size", "--tensor-parallel-size")),
        ep=_number(option(argv, "--ep", "--ep-size", "--expert-parallel-size")),
        quantization=option(argv, "--quantization") or found.quantization,
        kernel=option(argv, "--moe-runner-backend") or "",
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
    if info.get("speculative_algorithm") or option(argv, "--speculative-algorithm"):
        notes.append("with speculative decoding a batch here means the rows that are verified, not the requests")
    return Subject(
        config=seen.model_config,
        name=(seen.server.model_path or str((seen.model or {}).get("path") or "")).rstrip("/").rpartition("/")[2],
        where=f"the server on port {seen.server.port}",
        gpu=gpus[0] if gpus else None,
        tp=_number(info.get("tp_size") or option(argv, "--tp", "--tp-size", "--tensor-parallel-size")) or 1,
        ep=_number(info.get("ep_size") or option(argv, "--ep", "--ep-size", "--expert-parallel-size")) or 1,
        quantization=str(info.get("quantization") or option(argv, "--quantization") or ""),
        kernel=str(info.get("moe_runner_backend") or option(argv, "--moe-runner-backend") or ""),
        notes=tuple(notes),
    )


def option(argv: Sequence[str], *names: str) -> str | None:
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
