"""Which function computes the top-k on a CPU that has no fused kernels; on CUDA it is a table of decision.py."""

from __future__ import annotations

from surgeon.surgery.situation import GLM4, QWEN3

_BIASED = GLM4 | {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}


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
    if architecture in _BIASED:
        return "biased_grouped_topk_impl"
    return "fused_topk_torch_native" if architecture in QWEN3 else None
