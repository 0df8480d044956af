"""Which function computes the top-k inside `select_experts` on CUDA: for people to read, not for the graft.

Read from `biased_grouped_topk_gpu` and `fused_topk` in sglang's topk.py, 0.4.9 to 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_BIASED = {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Glm4MoeForCausalLM"}
_SOFTMAX = {"Qwen3MoeForCausalLM"}
_TORCH = "biased_grouped_topk_impl"
_TORCH_SOFTMAX = "fused_topk_torch_native"


def leaf_function(
    release: tuple[int, int, int], architecture: str, config: Mapping[str, Any], args: Mapping[str, Any]
) -> str | None:
    """Name the function, where the release and the model leave no doubt.

    Args:
        release: sglang's.
        architecture: the model class.
        config: the model's config.json.
        args: sglang's server arguments by field name.

    Returns:
        None if the model is not one of those that were read, or it depends on what is not known here.
    """
    if architecture in _SOFTMAX:
        if release < (0, 5, 15):
            return "sgl_kernel.topk_softmax"
        # SGLANG_OPT_USE_JIT_KERNEL_FUSED_TOPK decides in the releases between.
        return "moe_fused_gate (Triton)" if release >= (0, 5, 18) else None
    if architecture not in _BIASED:
        return None
    shape = _shape(config)
    if shape is None:
        return None
    if args.get("disable_shared_experts_fusion") or not config.get("n_shared_experts"):
        return _biased(release, shape, 0)
    # Whether the shared expert is fused depends on much; it often makes no difference.
    answers = {_biased(release, shape, fused) for fused in (0, 1)}
    return answers.pop() if len(answers) == 1 else None


def cpu_leaf(architecture: str, *, kernels: bool | None) -> str | None:
    """Name the function on a CPU.

    Without sgl_kernel's CPU build, and on a CPU without AMX, `TopK.forward_native` asks for torch's functions: every
    fused kernel is behind a test for its device, and module-level aliases name the CPU's only with AMX. Read from
    0.4.10 to 0.5.23: the aliases in topk.py, `biased_grouped_topk_gpu`, and `cpu_has_amx_support` in srt/utils.

    Args:
        architecture: the model class.
        kernels: whether sgl_kernel is installed; None if not known.

    Returns:
        None if the model is not one of those that were read, or sgl_kernel may be there: whether its build and the
        processor have AMX is not known here.
    """
    if kernels is not False:
        return None
    return _TORCH if architecture in _BIASED else _TORCH_SOFTMAX if architecture in _SOFTMAX else None


@dataclass(frozen=True)
class _Shape:
    experts: int
    top_k: int
    groups: int
    top_groups: int


def _shape(config: Mapping[str, Any]) -> _Shape | None:
    fields = [config.get("n_routed_experts"), config.get("num_experts_per_tok")]
    fields += [config.get("n_group") or 1, config.get("topk_group") or 1]
    numbers = [field for field in fields if isinstance(field, int) and field > 0]
    return _Shape(*numbers) if len(numbers) == len(fields) else None


def _biased(release: tuple[int, int, int], shape: _Shape, fused: int) -> str | None:
    power = shape.experts & (shape.experts - 1) == 0
    per_group = shape.experts // shape.groups
    columns = shape.top_k + fused
    if _flashinfer(release, shape, fused):
        return "fused_topk_deepseek (flashinfer)"
    if release >= (0, 5, 17):
        return "moe_fused_gate (Triton)"
    if release >= (0, 5, 15):
        return "moe_fused_gate (Triton)" if fused == 0 and columns <= 8 else _TORCH  # noqa: PLR2004 - its limit
    if per_group <= 32 and power:  # noqa: PLR2004 - the kernel's limit
        return "sgl_kernel.moe_fused_gate"
    if release >= (0, 5, 6) and shape.experts == 384 and shape.groups == 1:  # noqa: PLR2004 - Kimi K2's
        return "sgl_kernel.kimi_k2_moe_fused_gate"
    single = shape.groups == shape.top_groups == 1
    if release >= (0, 5, 11) and single and fused == 0 and shape.experts <= 512 and columns <= 8:  # noqa: PLR2004
        return "grouped_topk (JIT)"
    return _TORCH


def _flashinfer(release: tuple[int, int, int], shape: _Shape, fused: int) -> bool:
    if release < ((0, 5, 8) if fused == 0 else (0, 5, 11)) or shape.experts & (shape.experts - 1):
        return False
    per_group = shape.experts // shape.groups
    limits = per_group <= 32 and per_group * shape.top_groups <= 128  # noqa: PLR2004 - the kernel's
    small = limits if shape.groups > 1 else shape.experts <= 384  # noqa: PLR2004 - the kernel's
    # One group of one never has room for eight experts by this test, so GLM-5 does not come here.
    room = shape.top_groups * shape.groups >= shape.top_k
    return small and shape.top_k <= 8 and shape.top_groups <= shape.groups and room  # noqa: PLR2004 - same
