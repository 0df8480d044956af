"""What is served, for the live path: as the node tells it, as a person says it, or one filled in by the other."""

from __future__ import annotations

import base64
import json
import re
import shlex
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from surgeon.node.client import Node
    from surgeon.operations.survey import Survey
    from surgeon.surgery.live_path import Verdict as LivePath

_CONFIG = "config.json"
_CONFIG_LIMIT: Final = 1 << 20

# Compute capability by marketing name, in the order in which a name is tried: the longer one first.
# Source: NVIDIA, "CUDA GPU Compute Capability", https://developer.nvidia.com/cuda-gpus.
_GPUS: Final = (
    ("rtx pro 6000", (12, 0)),
    ("rtx pro 5000", (12, 0)),
    ("rtx 5090", (12, 0)),
    ("rtx 5080", (12, 0)),
    ("gb10", (12, 1)),
    ("dgx spark", (12, 1)),
    ("thor", (11, 0)),
    ("gb300", (10, 3)),
    ("b300", (10, 3)),
    ("gb200", (10, 0)),
    ("b200", (10, 0)),
    ("b100", (10, 0)),
    ("gh200", (9, 0)),
    ("h200", (9, 0)),
    ("h100", (9, 0)),
    ("h800", (9, 0)),
    ("h20", (9, 0)),
    ("l40s", (8, 9)),
    ("l40", (8, 9)),
    ("l4", (8, 9)),
    ("l20", (8, 9)),
    ("rtx 4090", (8, 9)),
    ("rtx 6000 ada", (8, 9)),
    ("rtx 3090", (8, 6)),
    ("rtx a6000", (8, 6)),
    ("a6000", (8, 6)),
    ("a40", (8, 6)),
    ("a10g", (8, 6)),
    ("a10", (8, 6)),
    ("a100", (8, 0)),
    ("a800", (8, 0)),
    ("t4", (7, 5)),
    ("v100", (7, 0)),
)

# Values of --moe-runner-backend in the releases from 0.5.1 to 0.5.23: MOE_RUNNER_BACKEND_CHOICES in srt/server_args.py,
# from 0.5.20 on in srt/arg_groups/choices.py.
BACKENDS: Final = frozenset(
    (
        *("auto", "triton", "triton_kernel", "deep_gemm", "cutlass", "aiter", "marlin", "humming", "hpc_ops"),
        *("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutlass", "flashinfer_mxfp4"),
        *("flashinfer_cutedsl", "flashinfer_megamoe", "megamoe", "intel_xpu"),
        *("experimental_sgl_trtllm", "experimental_sgl_marlin", "lora_triton", "lora_marlin", "lora_cutedsl"),
    )
)
_DEVICES: Final = frozenset({"cuda", "cpu", "xpu", "npu", "hpu", "musa", "hip", "rocm", "tpu", "mps"})

# The arguments that a verdict depends on, and the shorter names that sglang takes for them.
_ALIASES: Final = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "model": "model_path",
    "speculative_algo": "speculative_algorithm",
}
_DECISIVE: Final = (
    *("moe_runner_backend", "moe_a2a_backend", "quantization", "device", "tp_size", "ep_size", "enable_lora"),
    *("disable_shared_experts_fusion", "enforce_shared_experts_fusion", "speculative_algorithm"),
    *("enable_two_batch_overlap", "enable_single_batch_overlap"),
    *("enable_flashinfer_trtllm_moe", "enable_triton_kernel_moe"),
)
# The distributions that bring the package sgl_kernel: what sglang requires up to 0.5.9 and from 0.5.10 on, and the one
# for CPUs.
_KERNELS: Final = frozenset({"sgl-kernel", "sglang-kernel", "sgl-kernel-cpu"})
_ONE_VALUE: Final = frozenset({"moe_runner_backend", "moe_a2a_backend", "quantization", "device", "tp_size", "ep_size"})


@dataclass(frozen=True)
class Served:
    """What a server serves, and on what.

    Attributes:
        config: the model's config.json, its text part laid over it if it has one; empty if not known.
        model: where the model is; None if not known.
        args: sglang's server arguments by field name; `internal_states` among them says that a running server
            resolved them.
        capability: the GPU's compute capability, if known.
        launched: the arguments as typed at the launch, for another release to resolve in its own way.
        kernels: whether the sgl_kernel package is installed, if known.
        warnings: what was typed and is probably not meant so.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    capability: tuple[int, int] | None = None
    launched: Mapping[str, Any] = field(default_factory=dict)
    kernels: bool | None = None
    warnings: tuple[str, ...] = ()

    @property
    def architecture(self) -> str | None:
        """The model's first architecture."""
        names = self.config.get("architectures") or [None]
        return str(names[0]) if names[0] else None

    def live(self, version: str) -> LivePath:
        """Whether a patch would be reached in one release."""
        from surgeon import surgery

        return surgery.live_path(
            version, self.architecture, self.config, self.args, self.capability, kernels=self.kernels
        )

    def anew(self) -> Served:
        """The same, as a server would find it that is launched anew with the same words: nothing is resolved."""
        return replace(self, args=self.launched)


def of(survey: Survey) -> Served | None:
    """What the running server serves; None if none runs, and nothing is known of a model."""
    if survey.server is None and survey.model is None:
        return None
    gpu = survey.gpus[0] if survey.gpus else {}
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(gpu.get("compute_cap", "")))
    launched = words_to_args(_after_launcher(survey.server.argv)) if survey.server else {}
    info = survey.server_info
    installed = {str(one.get("name")).lower().replace("_", "-") for one in survey.distributions}
    return Served(
        config=survey.model_config,
        model=(survey.model or {}).get("path"),
        # What a running server says of itself is resolved already: `auto` in it stays `auto`.
        args={**info, "internal_states": []} if info else launched,
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        launched=launched,
        kernels=bool(_KERNELS & installed) if installed else None,
    )


@dataclass(frozen=True)
class ByHand:
    """What a person says of it.

    Attributes:
        model: a config.json, or a folder that holds it.
        gpu: `12.0`, `sm120`, a name, or `cpu`.
        server_args: words as sglang's launcher takes them.
    """

    model: str | None = None
    gpu: str | None = None
    server_args: str | None = None

    def __bool__(self) -> bool:
        return any(said is not None for said in (self.model, self.gpu, self.server_args))

    def over(self, found: Served | None, node: Node | None = None) -> Served:
        """Lay what is said over what was found.

        Args:
            found: on the node; None if there is none, or nothing is served there.
            node: where a model is looked for that is not on this machine: one more round trip.

        Raises:
            UsageError: something that is said makes no sense.
        """
        served = found or Served()
        args, launched = dict(served.args), dict(served.launched)
        warnings: tuple[str, ...] = ()
        if self.server_args is not None:
            typed, warnings = read_server_args(self.server_args)
            launched |= typed
            # These are the words of another launch than the one that was resolved.
            args = {**args, **typed}
            args.pop("internal_states", None)
        if self.gpu is not None:
            capability = read_gpu(self.gpu)
            args["device"] = launched["device"] = "cuda" if capability else "cpu"
            served = replace(served, capability=capability)
        if self.model is not None:
            path, config = _read_model(self.model, node)
            served = replace(served, config=config, model=path)
        return replace(served, args=args, launched=launched, warnings=warnings)


def read_gpu(said: str) -> tuple[int, int] | None:
    """A GPU's compute capability.

    Args:
        said: `12.0`, `sm120`, `sm_100a`, a name such as `H200` or `NVIDIA GeForce RTX 5090`, or `cpu`.

    Returns:
        Major and minor; None for `cpu`.

    Raises:
        UsageError: nobody knows that one.
    """
    plain = " ".join(said.lower().replace("_", "").replace("-", " ").split())
    if plain == "cpu":
        return None
    if (dotted := re.fullmatch(r"(\d{1,2})\.(\d)", plain)) is not None:
        return int(dotted[1]), int(dotted[2])
    if (short := re.fullmatch(r"sm ?(\d{1,2})(\d)[af]?", plain)) is not None:
        return int(short[1]), int(short[2])
    for name, capability in _GPUS:
        if re.search(rf"\b{name.replace(' ', ' ?')}\b", plain):
            return capability
    known = ", ".join(name.upper() for name in ("h200", "b200", "gb300", "rtx pro 6000", "l40s"))
    raise UsageError(
        f"{said!r} is no GPU that surgeon knows; expected a compute capability (12.0 or sm120), a name such as "
        f"{known}, or cpu",
        advice="nvidia-smi --query-gpu=compute_cap --format=csv,noheader says the capability",
        where="--gpu",
    )


def read_server_args(said: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Server arguments by field name, and what is odd about them.

    Args:
        said: as typed behind `python -m sglang.launch_server`; those words themselves may stand before them.

    Raises:
        UsageError: a quote is not closed, a word belongs to no argument, or a value is not one that sglang knows.
    """
    try:
        words = shlex.split(said)
    except ValueError as error:
        raise UsageError(
            f"the server arguments cannot be split into words: {error}",
            advice="close the quotes",
            where="--server-args",
        ) from error
    after = _after_launcher(words)
    if words and not after:
        raise UsageError(
            "no server argument begins with dashes; expected words such as --moe-runner-backend triton",
            advice="a value that begins with dashes needs an equals sign: --server-args='--tp 8'",
            where="--server-args",
        )
    args = words_to_args(after)
    _check(args)
    odd = []
    for name in args:
        close = get_close_matches(name, _DECISIVE, n=1, cutoff=0.85)
        if name not in _DECISIVE and close:
            odd.append(f"{_flag(name)} decides nothing here; did you mean {_flag(close[0])}?")
    return args, tuple(odd)


def _check(args: Mapping[str, Any]) -> None:
    for name in _ONE_VALUE & set(args):
        if isinstance(args[name], bool | list):
            found = "none" if args[name] is True else " ".join(map(str, args[name]))
            raise UsageError(f"{_flag(name)} takes one value; found {found}", where="--server-args")
    for name, known in (("moe_runner_backend", BACKENDS), ("device", _DEVICES)):
        value = args.get(name)
        if value is None or str(value).partition(":")[0] in known:
            continue
        close = sorted(one for one in known if str(value) in one) or get_close_matches(str(value), known, n=1)
        hint = f"did you mean {' or '.join(close)}?" if close else f"sglang's are {', '.join(sorted(known))}"
        raise UsageError(
            f"{_flag(name)} is {value!r}, which no release of sglang has", advice=hint, where="--server-args"
        )


def words_to_args(words: Sequence[str]) -> dict[str, Any]:
    """Server arguments by field name, as a launch line gives them.

    Args:
        words: from the first argument on.

    Returns:
        True for an argument without a value; numbers as numbers; a list where several values follow.
    """
    args: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            typed, separator, value = word[2:].partition("=")
            name = typed.replace("-", "_")
            name = _ALIASES.get(name, name)
            args[name] = _typed(value) if separator else True
        elif name:
            before = args[name]
            args[name] = _typed(word) if before is True else [*_listed(before), _typed(word)]
    return args


def _after_launcher(words: Iterable[str]) -> list[str]:
    """A launch line from its first argument on."""
    listed = list(words)
    first = next((at for at, word in enumerate(listed) if word.startswith("--")), len(listed))
    return listed[first:]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _typed(word: str) -> int | str:
    return int(word) if re.fullmatch(r"-?\d+", word) else word


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _here(said: str) -> Path | None:
    """The config.json that is meant, if it is on this machine."""
    path = Path(said).expanduser()
    path = path / _CONFIG if path.is_dir() else path
    return path if path.is_file() else None


def _read_model(said: str, node: Node | None) -> tuple[str, Mapping[str, Any]]:
    path = _here(said)
    if path is not None:
        return str(path.parent), _parse_config(path.read_bytes(), str(path))
    if node is not None and said.startswith("/"):
        there = said if said.endswith(".json") else f"{said.rstrip('/')}/{_CONFIG}"
        answer = node.call("read", {"path": there, "max_bytes": _CONFIG_LIMIT})
        if answer.get("exists"):
            return there.rpartition("/")[0], _parse_config(base64.b64decode(answer["b64"]), there)
    where = f"on this machine or on {node.transport.name}" if node is not None else "on this machine"
    raise UsageError(
        f"no config.json at {said} {where}; expected a model's folder, or its config.json",
        advice="a model of the hub has its config.json at https://huggingface.co/NAME/raw/main/config.json",
        where="--model",
    )


def _parse_config(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        config = json.loads(content)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}", where="--model") from error
    if not isinstance(config, dict) or "architectures" not in config:
        raise UsageError(f"{where} is no model's config.json: it names no architectures", where="--model")
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config
