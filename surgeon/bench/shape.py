"""The shape of a mixture-of-experts model, read from its config.json: E, k, layers, and the size of an expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Bytes per weight, block scales included: NVFP4 has an 8-bit scale per 16 weights, MXFP4 one per 32, group-quantised
# int4 a 16-bit scale per 128. FP8's scales are too few to count.
BYTES_PER_WEIGHT: Final = {
    "bf16": 2.0,
    "fp8": 1.0,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2 / 128,
}

_EXPERTS: Final = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_WIDTH: Final = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_MATRICES: Final = 3  # gate, up, down


@dataclass(frozen=True)
class Shape:
    """What of a model decides how much an expert weighs and how often experts are chosen.

    Attributes:
        name: what to call the model.
        experts: routed experts per layer (E).
        top_k: routed experts per token (k).
        layers: layers that route, those of the draft model left out.
        hidden: width of the model.
        width: inner width of an expert.
        groups: groups of experts; above 1 a token chooses inside some of them.
        dtype: how its experts are stored; empty if the config does not say.
    """

    name: str
    experts: int
    top_k: int
    layers: int
    hidden: int
    width: int
    groups: int = 1
    dtype: str = ""

    def expert_mb(self, dtype: str, *, tp: int = 1, ep: int = 1) -> float:
        """What one GPU holds of one expert, in 10^6 bytes; 21.23 for GLM-5 in NVFP4 on one GPU.

        Args:
            dtype: a key of BYTES_PER_WEIGHT.
            tp: GPUs that the model is spread over.
            ep: of them, how many expert-parallel ranks; each expert is cut into tp / ep slices.
        """
        slices = tp // ep
        return _MATRICES * self.hidden * self.width * BYTES_PER_WEIGHT[dtype] / slices / 1e6


def parse(config: Mapping[str, Any], name: str = "") -> Shape:
    """The shape that a config.json describes; its text part counts if it has one.

    Raises:
        DoesNotFitError: it is no mixture-of-experts model, or a field that is needed is missing.
    """
    inner = config.get("text_config")
    plain = {**config, **inner} if isinstance(inner, dict) else dict(config)
    architecture = next(iter(plain.get("architectures") or ()), "") or plain.get("model_type") or "the model"
    title = name or str(architecture)
    experts = _first(plain, _EXPERTS)
    if experts is None or experts < 2:  # noqa: PLR2004 - one expert is a dense layer
        raise DoesNotFitError(
            f"{title} has no routed experts: expected one of {', '.join(_EXPERTS)} in its config.json, found none",
            advice="OEA changes how experts are chosen; a dense model has none to choose from",
            where=title,
            code="not-moe",
        )
    top_k, width = _first(plain, _TOP_K), _first(plain, _WIDTH)
    hidden, depth = _first(plain, ("hidden_size",)), _first(plain, ("num_hidden_layers",))
    fields = {_TOP_K[0]: top_k, _WIDTH[0]: width, "hidden_size": hidden, "num_hidden_layers": depth}
    if top_k is None or width is None or hidden is None or depth is None:
        missing = ", ".join(key for key, value in fields.items() if value is None)
        raise DoesNotFitError(f"the config.json of {title} has no {missing}", where=title, code="config-incomplete")
    return Shape(
        name=title,
        experts=experts,
        top_k=top_k,
        layers=_layers(plain, depth),
        hidden=hidden,
        width=width,
        groups=_first(plain, ("n_group", "num_expert_group")) or 1,
        dtype=stored_as(plain),
    )


def stored_as(config: Mapping[str, Any]) -> str:
    """How a config.json says that its experts are stored; empty if it does not say, or in words unknown here."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        plain = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        return "bf16" if plain in {"bfloat16", "float16"} else ""
    # modelopt says FP8 or NVFP4 in quant_algo, compressed-tensors the word in format, the others in quant_method.
    words = (quantization.get(key) for key in ("quant_algo", "format", "quant_method"))
    return next((known for word in words if (known := as_dtype(str(word or "")))), "")


def as_dtype(word: str) -> str:
    """The dtype that a word of sglang's or of a checkpoint's means; empty if it is not known here."""
    plain = word.lower().replace("-", "").replace("_", "")
    if plain in {"bf16", "bfloat16", "fp16", "float16", "half"}:
        return "bf16"
    signs = {
        "w4a": "int4",
        "mxfp4": "mxfp4",
        "fp4": "nvfp4",
        "fp8": "fp8",
        "float8": "fp8",
        "float-quantized": "fp8",
        "int4": "int4",
        "awq": "int4",
        "gptq": "int4",
        "packquantized": "int4",
    }
    return next((dtype for sign, dtype in signs.items() if sign.replace("-", "") in plain), "")


def checked_dtype(word: str) -> str:
    """The dtype that a person named.

    Raises:
        UsageError: nobody knows it.
    """
    found = as_dtype(word)
    if not found:
        raise UsageError(f"dtype {word!r} is unknown; expected one of {', '.join(BYTES_PER_WEIGHT)}", where="--dtype")
    return found


def _layers(config: Mapping[str, Any], depth: int) -> int:
    """How many layers route. Each family says it in its own way."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sparse" for kind in kinds[:depth])
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return sum(bool(one) for one in frequency[:depth])
    every = _first(config, ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step")) or 1
    dense = config.get("first_k_dense_replace") or 0
    if "decoder_sparse_step" in config or "interleave_moe_layer_step" in config:
        # Qwen and Llama count from one: with a step of 2 the second layer is the first that routes.
        candidates = [layer for layer in range(depth) if (layer + 1) % every == 0]
    else:
        candidates = [layer for layer in range(depth) if layer >= dense and layer % every == 0]
    only_dense = set(config.get("mlp_only_layers") or ())
    return sum(layer not in only_dense for layer in candidates)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = (config[name] for name in names if type(config.get(name)) is int)
    return next(found, None)
