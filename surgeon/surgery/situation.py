"""What is known about a server when its live path is judged, and what is derived from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

STANDARD: Final = "STANDARD"
BYPASSED: Final = "BYPASSED"
TRITON_KERNEL: Final = "TRITON_KERNEL"
PACKED: Final = "PACKED"

DEEPSEEK: Final = frozenset({"DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM", "KimiK25ForConditionalGeneration"}) | {
    "DeepseekV32ForCausalLM",
    "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration",
}
QWEN3: Final = frozenset({"Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"})
GLM4: Final = frozenset({"Glm4MoeForCausalLM"})
GPT_OSS: Final = frozenset({"GptOssForCausalLM"})
READ: Final = DEEPSEEK | QWEN3 | GLM4
# Other models for which a release resolves auto by rules of their own, on SM90 or SM120 too.
OWN_AUTO: Final = frozenset(
    {"DeepseekV4ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"}
) | {
    "InternS2MobiusForConditionalGeneration",
    "MiMoV2ForCausalLM",
    "MiniMaxM3ForCausalLM",
    "MiniMaxM3ForConditionalGeneration",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "NemotronH_Omni_Reasoning_V3",
}

_DEVELOPMENT = (999, 0, 0, 0)


@dataclass(frozen=True)
class Path:
    """What is derived on the way to the verdict; None where it could not be.

    Attributes:
        backend: the MoE runner backend after `auto`; None also in 0.4, which has none.
        format: what TopK hands over: STANDARD has been through select_experts; BYPASSED and TRITON_KERNEL
            have not; PACKED has, but the runner reads ids that were packed before the site.
        fused: shared experts fused into the routed ones, each an extra column at the end.
        leaf: the function that computes the choice inside select_experts.
    """

    backend: str | None = None
    format: str | None = None
    fused: int | None = None
    leaf: str | None = None


NOTHING: Final = Path()


@dataclass(frozen=True)
class Situation:
    """A server, as far as the choice of experts depends on it.

    Attributes:
        release: sglang's, with the number of its post-release; a development build counts as newer than every release.
        architecture: the model class, if known.
        config: the model's config.json; may be empty.
        args: sglang's server arguments by field name.
        capability: the GPU's compute capability, if there is one and it is known.
        device: "cuda", "cpu", ... if known.
        backend: the MoE runner backend, "auto" if none was asked for.
        quantization: the server argument.
        declared: the `quantization_config` of the checkpoint; empty if it has none.
        resolved: the arguments come from a running server, which has resolved "auto" as far as it goes.
        kernels: whether the sgl_kernel package is installed, if known.
        path_backend: the runner backend after "auto", once it is derived.
        path_fused: the number of fused shared experts, once it is derived; None if it could not be.
    """

    release: tuple[int, int, int, int]
    architecture: str | None
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    capability: tuple[int, int] | None
    device: str | None
    backend: str
    quantization: str | None
    declared: Mapping[str, Any]
    resolved: bool
    kernels: bool | None
    path_backend: str = ""
    path_fused: int | None = None

    @property
    def plain_auto(self) -> bool:
        """`auto` as typed, without an all-to-all backend that would choose for itself."""
        return self.backend == "auto" and not self.resolved and self.args.get("moe_a2a_backend") in {None, "none"}

    @property
    def sm100(self) -> bool:
        """A data-centre Blackwell: what sglang's `is_sm100_supported` tests; SM120 is none."""
        return self.capability is not None and self.capability[0] == 10  # noqa: PLR2004 - the major number

    @property
    def sm110_or_120(self) -> bool:
        """A Blackwell that is no SM100; sglang counts SM110 among them from 0.5.23 on."""
        major = self.capability[0] if self.capability else 0
        return major == 12 or (major == 11 and self.release >= (0, 5, 23))  # noqa: PLR2004 - the major numbers

    @property
    def blackwell(self) -> bool:
        """SM100, SM110 or SM120."""
        return self.capability is not None and self.capability >= (10, 0)

    @property
    def hopper(self) -> bool:
        """SM90."""
        return self.capability is not None and self.capability[0] == 9  # noqa: PLR2004 - the major number

    @property
    def declared_method(self) -> str | None:
        """The `quant_method` that the checkpoint declares."""
        method = self.declared.get("quant_method")
        return str(method) if method is not None else None

    @property
    def nvfp4(self) -> bool:
        """Whether the experts are NVFP4, by the server argument or by the checkpoint."""
        declared = self.declared_method == "modelopt" and "NVFP4" in str(self.declared.get("quant_algo", "NVFP4"))
        return "modelopt_fp4" in {self.quantization, self.declared_method} or declared

    @property
    def filled_quantization(self) -> str | None:
        """The quantization that the rules for SM100 see: given, else the checkpoint's; NVFP4 by name from 0.5.10 on."""
        if self.quantization is None and self.nvfp4 and self.release >= (0, 5, 10):
            return "modelopt_fp4"
        return self.quantization or self.declared_method

    @property
    def unquantized(self) -> bool:
        """Whether the model is built without a quantization.

        Up to 0.5.10, DeepSeek V3 on SM100 gets fp8 where the checkpoint declares nothing (server_args.py
        `_handle_model_specific_adjustments`).
        """
        since = (0, 5, 4, 1) if self.backend == "auto" else (0, 5, 5)
        filled = self.sm100 and self.architecture == "DeepseekV3ForCausalLM" and since <= self.release < (0, 5, 11)
        return self.quantization is None and self.declared_method is None and (self.resolved or not filled)

    @property
    def keeps_shared_expert(self) -> bool:
        """Whether the checkpoint leaves the shared expert out of its quantization."""
        names = [*(self.declared.get("ignore") or ()), *(self.declared.get("exclude_modules") or ())]
        return any("shared_expert" in str(one) and "shared_expert_gate" not in str(one) for one in names)

    def quantized_by(self, *names: str) -> bool:
        """Whether the server argument or the checkpoint names one of these methods."""
        return bool({self.quantization, self.declared_method} & set(names))

    def number(self, field: str) -> int:
        """A whole number of config.json; 0 if it is not there."""
        value = self.config.get(field)
        return value if isinstance(value, int) else 0

    @property
    def experts(self) -> int:
        """Routed experts; 0 if not known."""
        return self.number("n_routed_experts") or self.number("num_experts")

    @property
    def groups(self) -> int:
        """Groups of experts."""
        return self.number("n_group") or 1

    @property
    def top_groups(self) -> int:
        """Groups that a token may use."""
        return self.number("topk_group") or 1

    @property
    def top_k(self) -> int:
        """Routed experts of a token; 0 if not known."""
        return self.number("num_experts_per_tok")

    @property
    def shaped(self) -> bool:
        """Whether the numbers that choose the leaf are known."""
        return self.experts > 0 and self.top_k > 0


def situation(
    version: str,
    architecture: str | None,
    config: Mapping[str, Any],
    server_args: Mapping[str, Any],
    compute_capability: tuple[int, int] | None,
    *,
    kernels: bool | None = None,
) -> Situation:
    """Gather what `live_path` was given; its arguments are described there."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    release = (int(found[1]), int(found[2]), int(found[3]), int(found[4] or 0)) if found else _DEVELOPMENT
    names = config.get("architectures") or [None]
    declared = config.get("quantization_config")
    device = server_args.get("device")
    if device is None and compute_capability is not None:
        device = "cuda"
    return Situation(
        release=release if release > (0, 0, 0, 0) else _DEVELOPMENT,
        architecture=architecture or names[0],
        config=config,
        args=server_args,
        capability=compute_capability,
        device=str(device).partition(":")[0] if device is not None else None,
        backend=server_args.get("moe_runner_backend") or "auto",
        quantization=server_args.get("quantization"),
        declared=declared if isinstance(declared, dict) else {},
        resolved="internal_states" in server_args,
        kernels=kernels,
    )
