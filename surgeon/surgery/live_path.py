"""Does the server's routing go through `select_experts` at all, and which function there picks the experts?

The rules were read from sglang's wheels; each names the release, file and function it was read from. They are asked in
order and the first that has an answer decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surgeon.surgery.leaf import cpu_leaf, leaf_function
from surgeon.surgery.outcomes import FUNCTION
from surgeon.surgery.situation import Situation, situation

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
    """

    function: str
    leaf: str | None
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotReached:
    """A patch at the site would have no effect on this server, and nothing would fail either.

    Attributes:
        why: what selects the experts instead.
        remedy: what to change, or that nothing can be done.
        source: what says so: release, file and function.
    """

    why: str
    remedy: str
    source: str


@dataclass(frozen=True)
class CannotTell:
    """Too little is known, or the release does something that no rule covers.

    Attributes:
        missing: what would have to be known.
        why: why it matters.
        source: what makes it matter.
    """

    missing: tuple[str, ...]
    why: str
    source: str


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
    for rule in RULES:
        verdict = rule.ask(at)
        if verdict is not None:
            return verdict
    return _standard(at)


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        name: short, for people.
        ask: answers for the situations it covers, else None.
    """

    name: str
    ask: Callable[[Situation], Verdict | None]


_DEEPSEEK = {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "KimiK25ForConditionalGeneration"} | {
    "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
}
_QWEN3 = {"Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"}
_GLM4 = {"Glm4MoeForCausalLM"}
_GPT_OSS = {"GptOssForCausalLM"}
_KNOWN = _DEEPSEEK | _QWEN3 | _GLM4 | _GPT_OSS
_OWN_ROUTING = {
    "Llama4ForConditionalGeneration",
    "Llama4ForCausalLM",
    "Cohere2MoeForCausalLM",
    "PhiMoEForCausalLM",
    "Grok1ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "AfmoeForCausalLM",
}


def _dense(at: Situation) -> Verdict | None:
    parts = [at.config, *(part for part in at.config.values() if isinstance(part, dict))]
    if not at.config or any("expert" in key or "moe" in key for part in parts for key in part):
        return None
    return NotReached(
        f"The model ({at.architecture or 'architecture not named'}) has no experts to choose from.",
        "Nothing to do: a patch of the expert selection is for mixture-of-experts models.",
        "the model's config.json: no field names experts",
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
    return Reached(
        FUNCTION,
        cpu_leaf(at.architecture, kernels=at.kernels) if at.architecture else None,
        f"sglang 0.5.9 and 0.5.23 srt/layers/moe/topk.py TopK.forward_cpu (AMX) and TopK.forward_native, by {base}: "
        "both call select_experts, whatever the runner backend",
        _notes(at),
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
            "Nothing to do: its kernel has no place for the patch.",
            "sglang 0.5.9 and 0.5.23 srt/layers/moe/topk.py TopK.forward_npu",
        )
    return CannotTell(
        (f"what TopK.forward_{at.device} does in this release",),
        f"The path on {at.device} differs from release to release.",
        "sglang 0.5.23 srt/layers/moe/topk.py TopK.forward_xpu; 0.5.9 MultiPlatformOp.forward_xpu",
    )


def _flags_of_0_4(at: Situation) -> Verdict | None:
    if at.release >= (0, 5, 0):
        return None
    for flag, instead in (
        ("enable_flashinfer_trtllm_moe", "the flashinfer TRT-LLM kernel"),
        ("enable_triton_kernel_moe", "the triton_kernels package"),
    ):
        if at.args.get(flag):
            return NotReached(
                f"--{flag.replace('_', '-')} lets {instead} select the experts.",
                f"Start the server without --{flag.replace('_', '-')}.",
                "sglang 0.4.9 srt/layers/moe/fused_moe_triton/layer.py; 0.4.10 TopK.forward_cuda",
            )
    return _standard(at)


def _unknown_model(at: Situation) -> Verdict | None:
    if at.architecture is not None or at.backend != "auto":
        return None
    return CannotTell(
        ("the model's architecture",),
        "--moe-runner-backend auto is resolved by architecture.",
        "sglang 0.5.9 srt/server_args.py _handle_model_specific_adjustments",
    )


def _triton_kernels(at: Situation) -> Verdict | None:
    if at.backend != "triton_kernel":
        return None
    return NotReached(
        "With --moe-runner-backend triton_kernel, the triton_kernels package selects the experts.",
        "Start the server with --moe-runner-backend triton.",
        "sglang 0.5.9 and 0.5.23 srt/layers/moe/topk.py TopK.forward_cuda: TopKOutputFormat.TRITON_KERNEL",
    )


def _trtllm(at: Situation) -> Verdict | None:
    if at.backend not in {"flashinfer_trtllm", "experimental_sgl_trtllm"}:
        return None
    if at.backend == "experimental_sgl_trtllm" and at.args.get("enable_lora"):
        return None
    unquantised = at.quantization is None and at.checkpoint_quantization is None
    if at.release < (0, 5, 7) and at.architecture in _DEEPSEEK and unquantised:
        return None
    source = "sglang 0.5.9 srt/layers/moe/topk.py TopK.forward_cuda: TopKOutputFormat.BYPASSED"
    if at.release >= (0, 5, 23):
        source = "sglang 0.5.23 srt/layers/moe/topk.py TopK.bind_runner_backend, _can_bypass_trtllm_routing"
        if at.architecture not in _DEEPSEEK | _QWEN3 | _GLM4:
            return CannotTell(
                ("the routing method that the model gives its MoE layers",),
                f"With {at.backend}, each layer decides by it whether routing is bypassed.",
                source,
            )
    return NotReached(
        f"With --moe-runner-backend {at.backend}, the flashinfer TRT-LLM kernel selects the experts itself.",
        _instead_of_trtllm(at),
        source,
    )


def _mxfp4(at: Situation) -> Verdict | None:
    if at.backend != "flashinfer_mxfp4":
        return None
    source = "sglang 0.5.13 to 0.5.23 srt/layers/moe/topk.py TopK: flashinfer_mxfp4 and is_fp4_experts"
    if at.release >= (0, 5, 12) and at.architecture not in _KNOWN:
        return CannotTell(
            ("whether the checkpoint stores its experts in the fp4 layout",),
            "With flashinfer_mxfp4, only such checkpoints have their experts selected by select_experts.",
            source,
        )
    return NotReached(
        "With --moe-runner-backend flashinfer_mxfp4, the flashinfer kernel selects the experts itself.",
        "Start the server with --moe-runner-backend triton, if the checkpoint can be served so.",
        source,
    )


def _auto_on_sm100(at: Situation) -> Verdict | None:
    if not (at.plain_auto and at.sm100):
        return None
    quantization = at.quantization or at.checkpoint_quantization
    if _auto_becomes_trtllm(at, quantization):
        return NotReached(
            f"On SM100, --moe-runner-backend auto becomes flashinfer_trtllm for {at.architecture} with quantization "
            f"{quantization or 'none'}, whose kernel selects the experts itself.",
            _instead_of_trtllm(at),
            "sglang 0.5.9 srt/server_args.py _handle_model_specific_adjustments; 0.5.23 srt/arg_groups/overrides.py "
            "and model_overrides/{qwen3_moe,glm4_moe}.py",
        )
    if at.architecture in _DEEPSEEK | _QWEN3 | _GLM4 and quantization in {None, "fp8", "modelopt_fp4"}:
        return None
    return CannotTell(
        ("moe_runner_backend as the server resolved it (/server_info)",),
        f"On SM100, auto becomes flashinfer_trtllm for many models; no rule covers {at.architecture} with "
        f"quantization {quantization or 'none'}.",
        "sglang 0.5.23 srt/arg_groups/model_overrides/",
    )


def _auto_becomes_trtllm(at: Situation, quantization: str | None) -> bool:
    release, modelopt = at.release, quantization == "modelopt_fp4"
    if at.architecture in _DEEPSEEK:
        return (
            (release >= (0, 5, 5) and quantization in {"fp8", "modelopt_fp8", "modelopt_fp4"})
            or (release >= (0, 5, 4) and modelopt and at.architecture == "DeepseekV3ForCausalLM")
            or (release >= (0, 5, 10) and quantization == "modelopt_mixed")
            or (release >= (0, 5, 13) and quantization is None)
        )
    if at.architecture in _QWEN3:
        return (release >= (0, 5, 6) and quantization in {"fp8", "modelopt_fp4"}) or (
            release >= (0, 5, 9) and quantization is None
        )
    if at.architecture in _GLM4:
        return (release >= (0, 5, 9) and modelopt) or (release >= (0, 5, 15) and quantization is None)
    return False


def _auto_gpt_oss(at: Situation) -> Verdict | None:
    if at.backend != "auto" or at.architecture not in _GPT_OSS:
        return None
    source = "sglang 0.5.9 srt/server_args.py _handle_model_specific_adjustments; 0.5.23 model_overrides/gpt_oss.py"
    if at.resolved:
        return CannotTell(("which runner the quantization method chose",), "auto was left to it.", source)
    return NotReached(
        "For gpt-oss, auto becomes flashinfer_mxfp4 on Blackwell (SM120 too) and triton_kernel elsewhere; either "
        "selects the experts itself.",
        "Start the server with --moe-runner-backend triton.",
        source,
    )


def _auto_modelopt(at: Situation) -> Verdict | None:
    if at.backend != "auto" or at.release < (0, 5, 23) or at.capability is None or at.capability < (10, 0):
        return None
    if at.quantization == "modelopt_fp4" and not at.resolved:
        return None
    if "modelopt_fp4" not in {at.quantization, at.checkpoint_quantization} and at.checkpoint_quantization != "modelopt":
        return None
    return NotReached(
        "Left with auto, the NVFP4 quantization method takes flashinfer_trtllm, which selects the experts itself.",
        "Start the server with --quantization modelopt_fp4 --moe-runner-backend flashinfer_cutlass.",
        "sglang 0.5.23 srt/layers/quantization/modelopt_quant.py ModelOptNvFp4FusedMoEMethod.create_moe_runner",
    )


def _auto_without_gpu(at: Situation) -> Verdict | None:
    if not at.plain_auto or at.capability is not None:
        return None
    return CannotTell(
        ("the GPU's compute capability",),
        "On SM100, auto becomes flashinfer_trtllm for many models; elsewhere it does not.",
        "sglang 0.5.9 srt/server_args.py _handle_model_specific_adjustments: is_sm100_supported",
    )


def _precomputed(at: Situation) -> Verdict | None:
    if at.architecture != "KimiK3ForConditionalGeneration":
        return None
    return CannotTell(
        ("whether the fused gate ran",),
        "Kimi K3's fused gate computes the experts ahead and skips select_experts.",
        "sglang 0.5.23 srt/layers/moe/topk.py build_precomputed_topk_output",
    )


RULES: tuple[Rule, ...] = (
    Rule("a model without experts", _dense),
    Rule("the CPU", _on_cpu),
    Rule("a device that is neither CPU nor CUDA", _elsewhere),
    Rule("flags of 0.4", _flags_of_0_4),
    Rule("Kimi K3's fused gate", _precomputed),
    Rule("triton_kernels", _triton_kernels),
    Rule("flashinfer_trtllm", _trtllm),
    Rule("flashinfer_mxfp4", _mxfp4),
    Rule("auto without an architecture", _unknown_model),
    Rule("auto for gpt-oss", _auto_gpt_oss),
    Rule("auto without a known GPU", _auto_without_gpu),
    Rule("auto on SM100", _auto_on_sm100),
    Rule("auto for NVFP4", _auto_modelopt),
)


def _instead_of_trtllm(at: Situation) -> str:
    fp4 = (at.quantization or at.checkpoint_quantization or "").startswith("modelopt")
    if at.release >= ((0, 5, 11) if fp4 else (0, 5, 10)):
        return "Start the server with --moe-runner-backend flashinfer_trtllm_routed."
    return f"Start the server with --moe-runner-backend {'flashinfer_cutlass' if fp4 else 'triton'}."


def _standard(at: Situation) -> Reached:
    if at.release < (0, 4, 10):
        source = "sglang 0.4.9 srt/layers/moe/fused_moe_triton/layer.py UnquantizedFusedMoEMethod.forward_cuda"
    elif at.release < (0, 5, 23):
        source = "sglang 0.5.9 srt/layers/moe/topk.py TopK.forward_cuda: TopKOutputFormat.STANDARD"
    else:
        source = "sglang 0.5.23 srt/layers/moe/topk.py TopK.bind_runner_backend: TopKOutputFormat.STANDARD"
    reached = Reached(FUNCTION, None, source, _notes(at))
    if at.architecture is None:
        return reached
    return replace(reached, leaf=leaf_function(at.release, at.architecture, at.config, at.args))


def _notes(at: Situation) -> tuple[str, ...]:
    notes = []
    hashed = at.config.get("num_hash_layers")
    if hashed:
        notes.append(f"The first {hashed} layers choose experts by token id (HashTopK) and pass by the site.")
    if at.architecture in _OWN_ROUTING:
        notes.append("The model brings its own routing function; its scores may not be what the patch takes them for.")
    if at.args.get("speculative_algorithm"):
        notes.append("The draft model's MoE layers pass the site too.")
    return tuple(notes)
