"""The decision procedure of the live path, as the tables it is: backend, output format, fused shared experts, leaf.

Each row was read from sglang's wheels and names the release, file and function. The rows of a table are asked in
order, and the first that holds answers. tests/surgery/test_live_path_table.py compares the tables with what the wheels'
own code does on GPUs of three generations. It is one file, so that it can be read from top to bottom as one procedure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from surgeon.surgery.situation import (
    BYPASSED,
    DEEPSEEK,
    GLM4,
    GPT_OSS,
    OWN_AUTO,
    PACKED,
    QWEN3,
    READ,
    STANDARD,
    TRITON_KERNEL,
    Path,
    Situation,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")

_PLAIN: Final = frozenset({None, "fp8", "modelopt", "modelopt_fp4", "modelopt_fp8"})
_EARLY: Final = "srt/server_args.py _handle_model_specific_adjustments"
_OVERRIDES: Final = "srt/arg_groups/overrides.py"
_SERVER: Final = "moe_runner_backend as the server resolved it (/server_info)"


@dataclass(frozen=True)
class Row(Generic[Answer]):
    """One row of a table.

    Attributes:
        when: whether it holds.
        gives: the answer; None if it cannot be told.
        source: release, file and function it was read from.
        missing: with no answer, what would have to be known.
    """

    when: Callable[[Situation], bool]
    gives: Answer | None
    source: str
    missing: str = ""


def first(table: tuple[Row[Answer], ...], at: Situation) -> Row[Answer]:
    """The first row of a table that holds; each table ends with one that always does."""
    return next(row for row in table if row.when(at))


def _auto100(at: Situation, *, family: frozenset[str], since: tuple[int, ...]) -> bool:
    return at.plain_auto and at.sm100 and at.architecture in family and at.release >= since


def _undeclared_deepseek(at: Situation) -> bool:
    return at.architecture == "DeepseekV3ForCausalLM" and at.filled_quantization is None


# Which runner backend `auto` becomes. What a running server says has been through these rules already.
BACKEND: Final[tuple[Row[str], ...]] = (
    Row(lambda at: at.release < (0, 5, 0), "", "sglang 0.4.10 srt/server_args.py: no --moe-runner-backend"),
    Row(
        lambda at: (
            at.release >= (0, 5, 13)
            and at.backend in {"auto", "megamoe"}
            and not at.resolved
            and at.architecture not in GPT_OSS | OWN_AUTO
            and at.quantization == "modelopt_fp4"
            and at.sm110_or_120
        ),
        "flashinfer_cutlass",
        "sglang 0.5.13 srt/server_args.py _handle_moe_kernel_config; 0.5.23 _moe_runner_backend_quant_constraints",
    ),
    Row(
        lambda at: at.backend == "megamoe" and not at.resolved,
        "auto",
        "sglang 0.5.20 srt/arg_groups/mega_moe_hook.py handle_moe_runner_backend_alias",
    ),
    Row(
        lambda at: at.quantization in {"mxfp8", "nvfp4_online"} and not at.resolved,
        None,
        "sglang 0.5.9 srt/server_args.py _handle_moe_kernel_config; 0.5.23 _moe_runner_backend_quant_constraints",
        _SERVER,
    ),
    Row(lambda at: at.backend != "auto", "as given", "the server's arguments"),
    Row(
        lambda at: at.architecture in GPT_OSS and at.resolved,
        None,
        f"sglang 0.5.9 {_EARLY}",
        "which runner the quantization method chose",
    ),
    Row(lambda at: at.resolved, "auto", "the running server, which has resolved its arguments"),
    Row(lambda at: at.architecture is None, None, f"sglang 0.5.9 {_EARLY}", "the model's architecture"),
    Row(
        lambda at: at.architecture in GPT_OSS and at.quantized_by("mxfp4") and at.blackwell,
        "flashinfer_mxfp4",
        f"sglang 0.5.9 {_EARLY}; 0.5.23 srt/arg_groups/model_overrides/gpt_oss.py",
    ),
    Row(
        lambda at: at.architecture in GPT_OSS,
        "triton_kernel",
        f"sglang 0.5.9 {_EARLY}; 0.5.23 srt/arg_groups/model_overrides/gpt_oss.py",
    ),
    Row(lambda at: not at.plain_auto, "auto", "sglang 0.5.9 srt/server_args.py: an all-to-all backend was given"),
    Row(
        lambda at: at.capability is None,
        None,
        f"sglang 0.5.9 {_EARLY}: is_sm100_supported",
        "the GPU's compute capability",
    ),
    Row(
        lambda at: at.architecture in OWN_AUTO and at.release >= (0, 5, 9),
        None,
        "sglang 0.5.23 srt/arg_groups/model_overrides/",
        _SERVER,
    ),
    Row(
        lambda at: (
            _auto100(at, family=DEEPSEEK, since=(0, 5, 12))
            and at.filled_quantization in {None, "fp8", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"}
        ),
        "flashinfer_trtllm",
        f"sglang 0.5.12 {_EARLY}; 0.5.23 {_OVERRIDES}",
    ),
    Row(
        lambda at: _auto100(at, family=DEEPSEEK, since=(0, 5, 11)) and _undeclared_deepseek(at),
        None,
        f"sglang 0.5.11 {_EARLY}: has_fp8_weights_in_checkpoint",
        "whether the checkpoint's experts are stored in fp8",
    ),
    Row(
        lambda at: _auto100(at, family=DEEPSEEK, since=(0, 5, 10)) and at.filled_quantization == "modelopt_mixed",
        "flashinfer_trtllm",
        f"sglang 0.5.10 {_EARLY}",
    ),
    Row(
        lambda at: (
            _auto100(at, family=DEEPSEEK, since=(0, 5, 4, 1))
            and (at.filled_quantization in {"fp8", "modelopt_fp8", "modelopt_fp4"} or _undeclared_deepseek(at))
        ),
        "flashinfer_trtllm",
        f"sglang 0.5.4.post1 {_EARLY}; without a declared quantization it takes fp8",
    ),
    Row(
        lambda at: (
            _auto100(at, family=frozenset({"DeepseekV3ForCausalLM"}), since=(0, 5, 3, 2))
            and at.quantization == "modelopt_fp4"
        ),
        "flashinfer_trtllm",
        f"sglang 0.5.3.post2 and 0.5.4 {_EARLY}",
    ),
    Row(
        lambda at: _auto100(at, family=QWEN3, since=(0, 5, 6)) and at.filled_quantization in {"fp8", "modelopt_fp4"},
        "flashinfer_trtllm",
        f"sglang 0.5.6 {_EARLY}; 0.5.23 srt/arg_groups/model_overrides/qwen3_moe.py",
    ),
    Row(
        lambda at: _auto100(at, family=QWEN3, since=(0, 5, 8)) and at.filled_quantization is None,
        "flashinfer_trtllm",
        f"sglang 0.5.8 {_EARLY}; 0.5.23 srt/arg_groups/model_overrides/qwen3_moe.py",
    ),
    Row(
        lambda at: _auto100(at, family=GLM4, since=(0, 5, 8)) and at.filled_quantization == "modelopt_fp4",
        "flashinfer_trtllm",
        f"sglang 0.5.8 {_EARLY}, with flashinfer 0.6.3 or later; 0.5.23 model_overrides/glm4_moe.py",
    ),
    Row(
        lambda at: _auto100(at, family=GLM4, since=(0, 5, 15)) and at.filled_quantization is None,
        "flashinfer_trtllm",
        "sglang 0.5.15 and 0.5.23 srt/arg_groups/, for Glm4MoeForCausalLM",
    ),
    Row(
        lambda at: at.sm100 and (at.architecture not in READ or at.filled_quantization not in _PLAIN),
        None,
        "sglang 0.5.23 srt/arg_groups/model_overrides/",
        _SERVER,
    ),
    Row(lambda _: True, "auto", f"sglang 0.5.9 {_EARLY}: no rule for it"),
)


def _trtllm(at: Situation) -> bool:
    return at.path_backend in {"flashinfer_trtllm", "experimental_sgl_trtllm"}


def _forced(at: Situation) -> bool:
    # The model asks for STANDARD because its MTP layers have no quantization.
    return at.architecture in DEEPSEEK and at.unquantized


# What TopK hands over on CUDA.
FORMAT: Final[tuple[Row[str], ...]] = (
    Row(
        lambda at: at.release < (0, 5, 0) and bool(at.args.get("enable_flashinfer_trtllm_moe")),
        BYPASSED,
        "sglang 0.4.10 srt/models/deepseek_v2.py DeepseekV2MoE: no TopK",
    ),
    Row(
        lambda at: at.release < (0, 5, 0) and bool(at.args.get("enable_triton_kernel_moe")),
        TRITON_KERNEL,
        "sglang 0.4.10 srt/layers/moe/topk.py TopK.forward_cuda; 0.4.9 fused_moe_triton/layer.py",
    ),
    Row(
        lambda at: at.release < (0, 4, 10),
        STANDARD,
        "sglang 0.4.9 srt/layers/moe/fused_moe_triton/layer.py UnquantizedFusedMoEMethod.forward_cuda",
    ),
    Row(
        lambda at: (
            at.config.get("model_type") == "deepseek_v41"
            and at.release >= (0, 5, 21)
            and at.path_backend == "flashinfer_mxfp4"
        ),
        PACKED,
        "sglang 0.5.21 and 0.5.23 srt/models/deepseek_v2.py fused_gate_packed_ids; topk.py StandardTopKOutputPacked",
    ),
    Row(
        lambda at: at.architecture == "KimiK3ForConditionalGeneration",
        None,
        "sglang 0.5.23 srt/layers/moe/topk.py build_precomputed_topk_output",
        "whether the fused gate ran",
    ),
    Row(
        lambda at: at.path_backend == "triton_kernel" and at.release >= (0, 5, 3) and _forced(at),
        STANDARD,
        "sglang 0.5.3 and 0.5.23 srt/models/deepseek_v2.py DeepseekV2MoE: output_format without a quantization",
    ),
    Row(
        lambda at: at.path_backend == "triton_kernel",
        TRITON_KERNEL,
        "sglang 0.5.9 and 0.5.23 srt/layers/moe/topk.py TopK.forward_cuda: TopKOutputFormat.TRITON_KERNEL",
    ),
    Row(
        lambda at: at.path_backend == "experimental_sgl_trtllm" and bool(at.args.get("enable_lora")),
        STANDARD,
        "sglang 0.5.13 and 0.5.23 srt/layers/moe/topk.py TopK: experimental_sgl_trtllm with LoRA",
    ),
    Row(
        lambda at: _trtllm(at) and at.release < (0, 5, 7) and _forced(at),
        STANDARD,
        "sglang 0.5.6 srt/models/deepseek_v2.py DeepseekV2MoE: output_format without a quantization",
    ),
    Row(
        lambda at: _trtllm(at) and at.release >= (0, 5, 23) and at.architecture not in READ,
        None,
        "sglang 0.5.23 srt/layers/moe/topk.py TopK.bind_runner_backend, _can_bypass_trtllm_routing",
        "the routing method that the model gives its MoE layers",
    ),
    Row(
        _trtllm,
        BYPASSED,
        "sglang 0.5.9 srt/layers/moe/topk.py TopK.forward_cuda; 0.5.23 TopK.bind_runner_backend",
    ),
    Row(
        lambda at: at.path_backend == "flashinfer_mxfp4" and at.release >= (0, 5, 23) and at.unquantized,
        STANDARD,
        "sglang 0.5.23 srt/layers/quantization/unquant.py create_moe_runner: triton, which the layer binds to its TopK",
    ),
    Row(
        lambda at: at.path_backend == "flashinfer_mxfp4" and _forced(at),
        STANDARD,
        "sglang 0.5.9 and 0.5.23 srt/models/deepseek_v2.py DeepseekV2MoE: output_format without a quantization",
    ),
    Row(
        lambda at: (
            at.path_backend == "flashinfer_mxfp4" and at.release >= (0, 5, 12) and at.architecture not in READ | GPT_OSS
        ),
        None,
        "sglang 0.5.13 to 0.5.23 srt/layers/moe/topk.py TopK: flashinfer_mxfp4 and is_fp4_experts",
        "whether the checkpoint stores its experts in the fp4 layout",
    ),
    Row(
        lambda at: at.path_backend == "flashinfer_mxfp4",
        BYPASSED,
        "sglang 0.5.9 and 0.5.23 srt/layers/moe/topk.py TopK: TopKOutputFormat.BYPASSED",
    ),
    Row(
        lambda at: (
            at.path_backend == "auto" and at.release >= (0, 5, 23) and at.nvfp4 and at.blackwell and at.path_fused == 0
        ),
        BYPASSED,
        "sglang 0.5.23 srt/layers/quantization/modelopt_quant.py ModelOptNvFp4FusedMoEMethod.create_moe_runner",
    ),
    Row(
        lambda at: (
            at.path_backend == "auto"
            and at.release >= (0, 5, 23)
            and not at.nvfp4
            and at.filled_quantization not in _PLAIN
        ),
        None,
        "sglang 0.5.23 srt/layers/quantization/: create_moe_runner of the quantization method, which the layer binds",
        "which runner the quantization method chose",
    ),
    Row(
        lambda _: True,
        STANDARD,
        "sglang 0.5.9 srt/layers/moe/topk.py TopK.forward_cuda; 0.5.23 TopK.bind_runner_backend",
    ),
)


def _no_shared(at: Situation) -> bool:
    return not at.number("n_shared_experts") or at.architecture not in DEEPSEEK | GLM4


def _deepep(at: Situation) -> bool:
    return at.args.get("moe_a2a_backend") not in {None, "none"} or bool(at.args.get("enable_deepep_moe"))


def _elsewhere(at: Situation) -> bool:
    overlap = at.args.get("enable_two_batch_overlap") or at.args.get("enable_single_batch_overlap")
    return bool(overlap) or _deepep(at) or (at.args.get("ep_size") or 1) > 1 or bool(at.args.get("enable_ep_moe"))


LORA: Final = {"lora_triton", "lora_cutedsl", "lora_marlin"}
_DETERMINE: Final = "determine_num_fused_shared_experts"


def _slots_of_ranks(at: Situation) -> bool:
    megamoe = "megamoe" in {at.backend, at.args.get("moe_a2a_backend")}
    return megamoe and at.architecture in DEEPSEEK and at.release >= (0, 5, 21)


# How many shared experts are fused, as the model decides before it makes its layers.
FUSED: Final[tuple[Row[int], ...]] = (
    Row(
        _slots_of_ranks,
        None,
        "sglang 0.5.21 srt/layers/moe/utils.py has_per_rank_fused_shared_slots",
        "the shared experts' slots of each rank",
    ),
    Row(_no_shared, 0, "the model's config.json, and sglang 0.5.9 srt/models/: only these models fuse"),
    Row(
        lambda at: bool(at.args.get("disable_shared_experts_fusion")) and at.release != (0, 4, 7, 0),
        0,
        f"sglang 0.5.9 srt/models/deepseek_v2.py {_DETERMINE}; 0.4.7 turns it on again on SM90 and later",
    ),
    Row(
        lambda at: at.release < (0, 4, 7) and at.number("n_routed_experts") == 256,  # noqa: PLR2004 - DeepSeek-V3's
        None,
        "sglang 0.4.6 srt/models/deepseek_v2.py determine_n_share_experts_fusion: as many as ranks, if not told",
        "n_share_experts_fusion as the server resolved it",
    ),
    Row(
        lambda at: (
            any(at.args.get(f) for f in ("enforce_shared_experts_fusion", "enable_waterfill"))
            or at.quantized_by("quark", "w4afp8")
        ),
        None,
        f"sglang 0.5.13 srt/models/deepseek_v2.py {_DETERMINE}",
        "the model's decision",
    ),
    Row(
        lambda at: at.release >= (0, 5, 0) and at.path_backend in {"flashinfer_trtllm", "flashinfer_trtllm_routed"},
        0,
        "sglang 0.5.1 and 0.5.9 srt/server_args.py: the runner needs it",
    ),
    Row(
        lambda at: (
            at.release >= (0, 5, 11) and at.path_backend in {"experimental_sgl_trtllm", "flashinfer_cutedsl"} | LORA
        ),
        0,
        "sglang 0.5.11 and 0.5.13 srt/server_args.py _handle_moe_kernel_config; 0.5.23 _moe_runner_fusion_disable",
    ),
    Row(_elsewhere, 0, f"sglang 0.5.9 and 0.5.13 srt/models/deepseek_v2.py {_DETERMINE}"),
    Row(
        lambda at: (
            at.architecture in DEEPSEEK and (at.number("n_routed_experts") != 256 or at.number("n_shared_experts") != 1)  # noqa: PLR2004 - same
        ),
        0,
        f"sglang 0.4.9 and 0.5.9 srt/models/deepseek_v2.py {_DETERMINE}: 256 experts and one shared",
    ),
    Row(
        lambda at: at.architecture in DEEPSEEK - {"DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM"},
        None,
        f"sglang 0.5.9 srt/models/deepseek_v2.py {_DETERMINE}: the class that the model is built with",
        "the architecture of the language model inside",
    ),
    Row(
        lambda at: at.architecture in GLM4 and at.release < (0, 5, 0) and at.number("n_routed_experts") != 128,  # noqa: PLR2004 - GLM-4.5-Air's
        0,
        f"sglang 0.4.10 srt/models/glm4_moe.py {_DETERMINE}: 128 experts",
    ),
    Row(
        lambda at: at.architecture in GLM4 and (0, 5, 4, 1) <= at.release < (0, 5, 6),
        0,
        "sglang 0.5.4.post1 and 0.5.5 srt/models/glm4_moe.py: no fusion",
    ),
    Row(
        lambda at: at.architecture in DEEPSEEK and at.release >= (0, 5, 21) and at.nvfp4 and at.keeps_shared_expert,
        0,
        "sglang 0.5.21 srt/layers/quantization/modelopt_quant.py ModelOptFp4Config.can_fuse_shared_expert",
    ),
    Row(
        lambda at: (
            at.architecture in DEEPSEEK
            and at.release >= (0, 5, 20)
            and at.nvfp4
            and at.hopper
            and at.path_backend in {"marlin", "experimental_sgl_marlin"}
        ),
        0,
        "sglang 0.5.20 srt/models/deepseek_v2.py shared_experts_fusion_disable_reason",
    ),
    Row(lambda at: at.capability is None or at.capability < (8, 0), 0, f"sglang 0.5.9 {_DETERMINE}: capability 8.0"),
    Row(lambda _: True, 1, f"sglang 0.5.9 srt/models/deepseek_v2.py and glm4_moe.py {_DETERMINE}"),
)


def _flashinfer(at: Situation) -> bool:
    experts, groups, top = at.experts, at.groups, at.top_groups
    if at.release < ((0, 5, 8) if at.path_fused == 0 else (0, 5, 11)) or experts & (experts - 1):
        return False
    each = experts // groups
    fits = each <= 32 and each * top <= 128 if groups > 1 else experts <= 384  # noqa: PLR2004 - the kernel's limits
    # One group of one never has room for eight experts by this test, so GLM-5 and GLM-4.x do not come here.
    return fits and at.top_k <= 8 and top <= groups and top * groups >= at.top_k  # noqa: PLR2004 - same


def _aot(at: Situation) -> bool:
    return at.experts & (at.experts - 1) == 0 and at.experts // at.groups <= 32  # noqa: PLR2004 - the kernel's limit


_GPU: Final = "srt/layers/moe/topk.py biased_grouped_topk_gpu"
_GATE: Final = "moe_fused_gate (Triton)"

# Which function computes the choice. GLM-4.x and the DeepSeek family are grouped, with a bias; Qwen3 is plain softmax.
LEAF: Final[tuple[Row[str], ...]] = (
    Row(
        _slots_of_ranks,
        None,
        f"sglang 0.5.21 {_GPU}: it counts the slots of the ranks",
        "the shared experts' slots of each rank",
    ),
    Row(
        lambda at: (
            at.architecture in QWEN3 and at.release >= (0, 5, 10) and at.path_backend == "flashinfer_trtllm_routed"
        ),
        "fused_topk_softmax_torch_raw_logits",
        "sglang 0.5.10 and 0.5.23 srt/layers/moe/topk.py select_experts",
    ),
    Row(
        lambda at: at.architecture in QWEN3 and at.release < (0, 5, 15),
        "sgl_kernel.topk_softmax",
        "sglang 0.4.6 and 0.5.9 srt/layers/moe/topk.py fused_topk",
    ),
    Row(
        lambda at: at.architecture in QWEN3,
        _GATE,
        "sglang 0.5.15 (unless SGLANG_OPT_USE_JIT_KERNEL_FUSED_TOPK=0, up to 0.5.17), 0.5.18 topk.py fused_topk",
    ),
    Row(
        lambda at: at.architecture not in READ or not at.shaped or at.path_fused is None,
        None,
        f"sglang 0.5.9 {_GPU}",
        "the model's shape",
    ),
    Row(_flashinfer, "fused_topk_deepseek (flashinfer)", f"sglang 0.5.8 and 0.5.11 {_GPU}, with flashinfer"),
    Row(lambda at: at.release >= (0, 5, 17), _GATE, f"sglang 0.5.17 and 0.5.23 {_GPU}"),
    Row(lambda at: at.release >= (0, 5, 15) and at.path_fused == 0, _GATE, f"sglang 0.5.15 {_GPU}"),
    Row(lambda at: at.release >= (0, 5, 15), "biased_grouped_topk_impl", f"sglang 0.5.15 {_GPU}"),
    Row(_aot, "sgl_kernel.moe_fused_gate", f"sglang 0.4.6 and 0.5.14 {_GPU}"),
    Row(
        lambda at: at.release >= (0, 5, 5, 3) and at.experts == 384 and at.groups == 1,  # noqa: PLR2004 - Kimi K2's
        "sgl_kernel.kimi_k2_moe_fused_gate",
        f"sglang 0.5.5.post3 and 0.5.6 {_GPU}",
    ),
    Row(
        lambda at: (
            at.release >= (0, 5, 11)
            and at.groups == at.top_groups == 1
            and at.path_fused == 0
            and at.experts <= 512  # noqa: PLR2004 - the kernel's limit
            and at.top_k <= 8  # noqa: PLR2004 - same
        ),
        "grouped_topk (JIT)",
        f"sglang 0.5.11 {_GPU}",
    ),
    Row(lambda _: True, "biased_grouped_topk_impl", f"sglang 0.4.6 and 0.5.9 {_GPU}"),
)


@dataclass(frozen=True)
class Decision:
    """What the tables say.

    Attributes:
        path: the derived values.
        unknown: the row that could not tell, if it takes the verdict with it.
        format: the row that gave the format, if it was asked.
    """

    path: Path
    unknown: Row[str] | None = None
    format: Row[str] | None = None


def decide(at: Situation) -> Decision:
    """Ask the tables in turn, each with what those before it gave."""
    backend = first(BACKEND, at)
    if backend.gives is None:
        return Decision(Path(), unknown=backend)
    resolved = at.backend if backend.gives == "as given" else backend.gives
    at = replace(at, path_backend=resolved)
    fused = first(FUSED, at).gives
    at = replace(at, path_fused=fused)
    form = first(FORMAT, at)
    path = Path(backend=resolved or None, format=form.gives, fused=fused)
    if form.gives is None:
        return Decision(path, unknown=form)
    if form.gives == STANDARD:
        path = replace(path, leaf=leaf(at))
    return Decision(path, format=form)


def leaf(at: Situation) -> str | None:
    """The leaf; where the fused shared experts are not known, the one that all their numbers lead to, if it is one."""
    if at.path_fused is not None:
        return first(LEAF, at).gives
    found = {first(LEAF, replace(at, path_fused=number)).gives for number in (0, 1)}
    return found.pop() if len(found) == 1 else None
