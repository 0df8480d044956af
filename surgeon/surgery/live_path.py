"""Does the server's routing go through `select_experts` at all, and which function there picks the experts?

What decides on CUDA are the tables of decision.py. Before them come the models and devices that never get that far;
each rule names the release, file and function it was read from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from surgeon.surgery.decision import decide
from surgeon.surgery.leaf import cpu_leaf
from surgeon.surgery.outcomes import FUNCTION
from surgeon.surgery.own_routers import OWN_ROUTERS, OWN_ROUTING_FUNCTIONS
from surgeon.surgery.situation import NOTHING, PACKED, STANDARD, TRITON_KERNEL, Path, Situation, situation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Reached:
    """The site is on the path of the model's expert selection.

    Attributes:
        function: the function that holds the site.
        leaf: the function that computes the top-k there; None where that is not certain.
        source: what says so: release, file and function.
        notes: what limits it.
        path: the derived values.
    """

    function: str
    leaf: str | None
    source: str
    notes: tuple[str, ...] = ()
    path: Path = NOTHING


@dataclass(frozen=True)
class NotReached:
    """A patch at the site would have no effect on this server, and nothing would fail either.

    Attributes:
        why: what selects the experts instead.
        remedy: what to change, or that nothing can be done.
        source: what says so: release, file and function.
        path: the derived values.
    """

    why: str
    remedy: str
    source: str
    path: Path = NOTHING


@dataclass(frozen=True)
class CannotTell:
    """Too little is known, or the release does something that no rule covers.

    Attributes:
        missing: what would have to be known.
        why: why it matters.
        source: what makes it matter.
        path: the derived values, as far as they go.
    """

    missing: tuple[str, ...]
    why: str
    source: str
    path: Path = NOTHING


Verdict = Reached | NotReached | CannotTell


def live_path(
    version: str,
    architecture: str | None,
    config: Mapping[str, Any],
    server_args: Mapping[str, Any],
    compute_capability: tuple[int, int] | None,
    *,
    kernels: bool | None = None,
) -> Verdict:
    """Decide whether a patch in `select_experts` can have an effect.

    Args:
        version: sglang's version. One that no release has (`0.0.0.dev1+g...`) is taken for newer than all of them.
        architecture: the model class; None to take the first of the config's `architectures`.
        config: the model's config.json; may be empty.
        server_args: sglang's server arguments by field name (`moe_runner_backend`), from /server_info, which has
            resolved "auto" as far as it goes and is believed, or from the command line.
        compute_capability: the GPU's, for example `(12, 0)`; None if there is no GPU or it is not known.
        kernels: whether the sgl_kernel package is installed, if known.
    """
    at = situation(version, architecture, config, server_args, compute_capability, kernels=kernels)
    for rule in BEFORE:
        verdict = rule(at)
        if verdict is not None:
            return verdict
    return _on_cuda(at)


def _on_cuda(at: Situation) -> Verdict:
    decision = decide(at)
    path, row = decision.path, decision.unknown
    if row is not None:
        return CannotTell((row.missing,), _why_it_matters(at, path), row.source, path)
    source = decision.format.source if decision.format else ""
    if path.format == STANDARD:
        return Reached(FUNCTION, path.leaf, source, _notes(at), path)
    return NotReached(_what_selects(at, path), _instead(at, path), source, path)


def _why_it_matters(at: Situation, path: Path) -> str:
    if path.backend is None:
        model = at.architecture or "a model that is not named"
        return (
            f"--moe-runner-backend decides whether select_experts is called, and what {at.backend} becomes for {model} "
            "depends on it."
        )
    return f"With the runner backend {path.backend}, it decides whether the kernel selects the experts itself."


def _what_selects(at: Situation, path: Path) -> str:
    if path.format == PACKED:
        return (
            f"With --moe-runner-backend {path.backend}, the fused gate of this model packs its choice, and the runner "
            "reads the packed ids instead of those that a patch changes."
        )
    kernel = "the triton_kernels package selects" if path.format == TRITON_KERNEL else "the flashinfer kernel selects"
    for flag in ("enable_flashinfer_trtllm_moe", "enable_triton_kernel_moe"):
        if path.backend is None and at.args.get(flag):
            return f"With --{flag.replace('_', '-')}, {kernel} the experts itself."
    if path.backend == "auto":
        return (
            "Left with --moe-runner-backend auto, the NVFP4 quantization method takes flashinfer_trtllm, and "
            f"{kernel} the experts itself."
        )
    how = f"--moe-runner-backend {path.backend}"
    if at.backend == "auto":
        quantization = at.filled_quantization or "none"
        how = f"{how}, which auto becomes for {at.architecture} with quantization {quantization} on this GPU"
    return f"With {how}, {kernel} the experts itself ({path.format})."


def _instead(at: Situation, path: Path) -> str:
    if path.backend is None:
        flag = "enable-triton-kernel-moe" if path.format == TRITON_KERNEL else "enable-flashinfer-trtllm-moe"
        return f"Start the server without --{flag}."
    if path.backend == "auto":
        return "Start the server with --quantization modelopt_fp4 --moe-runner-backend flashinfer_cutlass."
    if path.backend == "triton_kernel":
        return "Start the server with --moe-runner-backend triton."
    if path.format == PACKED:
        return "Start the server with another --moe-runner-backend, if the checkpoint can be served so."
    if path.backend == "flashinfer_mxfp4":
        return "Start the server with --moe-runner-backend triton, if the checkpoint can be served so."
    # flashinfer_trtllm_routed keeps the fast kernel; what came before it costs speed.
    if at.release >= ((0, 5, 11) if at.nvfp4 else (0, 5, 10)):
        return "Start the server with --moe-runner-backend flashinfer_trtllm_routed."
    return f"Start the server with --moe-runner-backend {'flashinfer_cutlass' if at.nvfp4 else 'triton'}."


def _dense(at: Situation) -> Verdict | None:
    parts = [at.config, *(part for part in at.config.values() if isinstance(part, dict))]
    if not at.config or any("expert" in key or "moe" in key for part in parts for key in part):
        return None
    return NotReached(
        f"The model ({at.architecture or 'architecture not named'}) has no experts to choose from.",
        "Nothing can be done: a patch of the expert selection is for mixture-of-experts models.",
        "the model's config.json: no field names experts",
    )


def _own_router(at: Situation) -> Verdict | None:
    if at.architecture not in OWN_ROUTERS:
        return None
    since, file = OWN_ROUTERS[at.architecture]
    return NotReached(
        f"{at.architecture} chooses its experts in its own model file (srt/models/{file}).",
        "Nothing can be done: the patch is for models that choose theirs in select_experts.",
        f"sglang {since} to 0.5.23 srt/models/{file}: a MoE layer, and neither TopK nor select_experts",
    )


def _own_routing_function(at: Situation) -> Verdict | None:
    if at.architecture not in OWN_ROUTING_FUNCTIONS:
        return None
    file = OWN_ROUTING_FUNCTIONS[at.architecture]
    grouped, scored = at.number("n_group") > 1, at.config.get("score_func", at.config.get("expert_selection_fn"))
    if file == "afmoe.py" and (grouped or scored != "sigmoid"):
        return None
    if file == "cohere2_moe.py" and (scored != "sigmoid" or at.config.get("norm_topk_prob", True)):
        return None
    return NotReached(
        f"{at.architecture} passes a routing function of its own to select_experts, and a patch cannot take effect: it "
        "leaves such calls alone, because it does not know their scores.",
        "Nothing can be done: the model decides it.",
        f"sglang 0.5.23 srt/models/{file}: TopK(custom_routing_function=...)",
    )


def _hashed(at: Situation) -> Verdict | None:
    hashed, layers = at.number("num_hash_layers"), at.number("num_hidden_layers")
    if not hashed or hashed < layers or not layers:
        return None
    return NotReached(
        f"All {layers} layers choose their experts by token id (HashTopK), not by scores.",
        "Nothing can be done: there is no choice to change.",
        "sglang 0.5.12 and 0.5.23 srt/models/deepseek_v2.py DeepseekV2MoE: layer_id < num_hash_layers",
    )


def _on_cpu(at: Situation) -> Verdict | None:
    if at.device != "cpu":
        return None
    if at.release < (0, 4, 10):
        source = "sglang 0.4.9 srt/layers/moe/fused_moe_triton/layer.py UnquantizedFusedMoEMethod.forward_cpu"
        return CannotTell(
            ("whether the weights are packed for AMX",), "Only the AMX branch calls select_experts.", source
        )
    base = "MultiPlatformOp.dispatch_forward" if at.release < (0, 5, 18) else "BaseFusedOp"
    chosen = cpu_leaf(at.architecture, kernels=at.kernels) if at.architecture else None
    return Reached(
        FUNCTION,
        chosen,
        f"sglang 0.5.9 and 0.5.23 srt/layers/moe/topk.py TopK.forward_cpu (AMX) and TopK.forward_native, by {base}: "
        "both call select_experts, whatever the runner backend",
        _notes(at),
        Path(backend=at.backend, format=STANDARD, leaf=chosen),
    )


def _elsewhere(at: Situation) -> Verdict | None:
    if at.device in {"cuda", "cpu"}:
        return None
    if at.device is None:
        return CannotTell(
            ("the device",), "Each device has its own forward method.", "sglang 0.5.9 MultiPlatformOp.dispatch_forward"
        )
    if at.device == "npu":
        return NotReached(
            "On Ascend, fused_topk_npu selects the experts.",
            "Nothing can be done: its kernel has no place for the patch.",
            "sglang 0.5.9 and 0.5.23 srt/layers/moe/topk.py TopK.forward_npu",
        )
    return CannotTell(
        (f"what TopK.forward_{at.device} does in this release",),
        f"The path on {at.device} differs from release to release.",
        "sglang 0.5.23 srt/layers/moe/topk.py TopK.forward_xpu; 0.5.9 MultiPlatformOp.forward_xpu",
    )


# The models and devices that never come to the tables of decision.py; the first that has an answer decides.
BEFORE: Final[tuple[Callable[[Situation], Verdict | None], ...]] = (
    _dense,
    _own_router,
    _own_routing_function,
    _hashed,
    _on_cpu,
    _elsewhere,
)


def _notes(at: Situation) -> tuple[str, ...]:
    notes = []
    hashed = at.config.get("num_hash_layers")
    if hashed:
        notes.append(f"The first {hashed} layers choose experts by token id (HashTopK) and pass by the site.")
    if at.args.get("enable_lora") and at.release >= (0, 5, 13):
        notes.append(
            "With SGLANG_EXPERIMENTAL_LORA_OPTI and SGLANG_OPT_LORA_FUSED_TOPK_PACK set, the LoRA runners read ids "
            "that were packed before the site."
        )
    if at.args.get("speculative_algorithm"):
        notes.append("The draft model's MoE layers pass the site too.")
    return tuple(notes)
