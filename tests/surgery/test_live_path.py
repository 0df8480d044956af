"""Whether the site is reached, compared with what the wheels' own TopK does, and with the fact sheet's table."""

from __future__ import annotations

import enum
import random
from types import SimpleNamespace
from typing import Any

import pytest

from surgeon.surgery import CannotTell, NotReached, Reached, live_path
from tests.support.wheels import Wild, member, runnable

QWEN3 = "Qwen3MoeForCausalLM"
GLM5 = "GlmMoeDsaForCausalLM"
DSV3 = "DeepseekV3ForCausalLM"
GLM4 = "Glm4MoeForCausalLM"
GPT_OSS = "GptOssForCausalLM"
MOE = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
FP8 = {**MOE, "quantization_config": {"quant_method": "fp8"}}
SM90, SM100, SM120 = (9, 0), (10, 0), (12, 0)


class _Reached(Exception):  # noqa: N818 - says that select_experts was called
    pass


class _RoutedElsewhere(Exception):  # noqa: N818 - says that the triton_kernels package was asked
    pass


def _backends(version: str) -> Any:
    source = member(version, "sglang/srt/layers/moe/utils.py")
    names = {"MoeRunnerBackend"}
    if b"class _MoeRunnerBackendPredicates" in source:
        names.add("_MoeRunnerBackendPredicates")
    coin = random.Random(0)  # noqa: S311 - nothing secret
    return runnable(source, names, coin, {"Enum": enum.Enum}).MoeRunnerBackend


def _sglang_reaches(version: str, backend: str, forward: str) -> bool:
    """Run the wheel's own `TopK.<forward>` under a runner backend: is `select_experts` called?"""

    def select_experts(**_: object) -> None:
        raise _Reached

    def routing(*_: object, **__: object) -> None:
        raise _RoutedElsewhere

    coin = random.Random(0)  # noqa: S311 - nothing secret
    chosen = _backends(version)(backend)
    known = {
        "select_experts": select_experts,
        "routing": routing,
        "CustomOp": object,
        "get_global_server_args": lambda: SimpleNamespace(enable_lora=False),
        "get_moe_runner_backend": lambda: chosen,
        "get_lora": lambda: SimpleNamespace(enable_lora=False),
        "_can_bypass_trtllm_routing": lambda _: True,
        "is_expert_remapping_enabled": lambda: False,
        "MultiPlatformOp": object,
        "BaseFusedOp": object,
        "Enum": enum.Enum,
        "IntEnum": enum.IntEnum,
        "auto": enum.auto,
    }
    topk = runnable(member(version), {"TopK", "TopKOutputFormat"}, coin, known).TopK
    layer = topk.__new__(topk)
    layer.layer_id, layer.is_draft, layer.is_fp4_experts, layer.enable_waterfill = 0, False, False, False
    layer.waterfill_balancer = None
    layer.topk_config = SimpleNamespace(
        output_format=None, top_k=8, renormalize=True, torch_native=False, fused_gate_packed_ids=False
    )
    if hasattr(layer, "bind_runner_backend"):
        layer._runner_backend_bound = False
        layer.bind_runner_backend(chosen)
        layer._resolve_routing_inputs = lambda *_: (None, None)
    try:
        getattr(layer, forward)(hidden_states=Wild(coin), router_logits=Wild(coin))
    except _Reached:
        return True
    except _RoutedElsewhere:
        pass
    return False


_BACKENDS_059 = ("triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_mxfp4", "deep_gemm")
_BACKENDS = (*_BACKENDS_059, "cutlass", "marlin", "flashinfer_trtllm_routed", "experimental_sgl_trtllm")


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "backend"),
    [("0.5.9", name) for name in _BACKENDS_059]
    + [(v, name) for v in ("0.5.13", "0.5.21", "0.5.23") for name in _BACKENDS],
)
def test_each_backend_is_judged_as_sglang_acts_on_cuda(version: str, backend: str) -> None:
    """For every runner backend, the verdict is what the release's own TopK.forward_cuda does."""
    verdict = live_path(version, QWEN3, MOE, {"moe_runner_backend": backend, "quantization": "fp8"}, SM90)
    expected = Reached if _sglang_reaches(version, backend, "forward_cuda") else NotReached
    assert isinstance(verdict, expected)


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.1", "0.5.5", "0.5.9", "0.5.13", "0.5.23"])
@pytest.mark.parametrize("backend", ["auto", "flashinfer_trtllm", "triton_kernel"])
def test_on_the_cpu_the_site_is_reached_whatever_the_backend(version: str, backend: str) -> None:
    """With and without AMX, TopK on the CPU calls select_experts; live_path says so and names the releases."""
    methods = ["forward_native", "forward_cpu"]
    assert all(_sglang_reaches(version, backend, method) for method in methods)
    verdict = live_path(version, QWEN3, MOE, {"device": "cpu", "moe_runner_backend": backend}, None)
    assert isinstance(verdict, Reached)
    assert "0.5.9" in verdict.source
    assert "0.5.23" in verdict.source


@pytest.mark.parametrize(
    ("version", "architecture", "quantization", "capability", "verdict"),
    [
        # DeepSeek V3 on SM100: from 0.5.5 for fp8, also where the checkpoint declares nothing; 0.5.11 looks into
        # the weights, and from 0.5.12 on it makes no difference.
        ("0.5.3", DSV3, "fp8", SM100, Reached),
        ("0.5.4", DSV3, "modelopt_fp4", SM100, NotReached),
        ("0.5.5", DSV3, "fp8", SM100, NotReached),
        ("0.5.9", DSV3, None, SM100, NotReached),
        ("0.5.11", DSV3, None, SM100, CannotTell),
        ("0.5.12", DSV3, None, SM100, NotReached),
        ("0.5.9", GLM5, None, SM100, Reached),
        ("0.5.9", GLM5, "fp8", SM100, NotReached),
        # Qwen3: from 0.5.6 for fp8, from 0.5.9 for bf16.
        ("0.5.5", QWEN3, "fp8", SM100, Reached),
        ("0.5.6", QWEN3, "fp8", SM100, NotReached),
        ("0.5.6", QWEN3, None, SM100, Reached),
        ("0.5.9", QWEN3, None, SM100, NotReached),
        # GLM-4.x: fp4 from 0.5.9, bf16 from 0.5.15, fp8 never.
        ("0.5.9", GLM4, "modelopt_fp4", SM100, NotReached),
        ("0.5.13", GLM4, None, SM100, Reached),
        ("0.5.15", GLM4, None, SM100, NotReached),
        ("0.5.23", GLM4, "fp8", SM100, Reached),
        # SM90 and SM120 are not SM100.
        ("0.5.23", GLM5, "fp8", SM90, Reached),
        ("0.5.23", GLM5, "modelopt_fp4", SM120, Reached),
        ("0.5.23", QWEN3, None, SM120, Reached),
        # gpt-oss never selects in topk.py under auto.
        ("0.5.9", GPT_OSS, None, SM90, NotReached),
        ("0.5.23", GPT_OSS, None, SM120, NotReached),
        # A model that no rule knows is no guess on SM100, and plain elsewhere.
        ("0.5.23", "SomeNewMoeForCausalLM", "fp8", SM100, CannotTell),
        ("0.5.23", "SomeNewMoeForCausalLM", "fp8", SM90, Reached),
        # A development build counts as the newest.
        ("0.0.0.dev1+gabcdef", QWEN3, None, SM100, NotReached),
    ],
)
def test_auto_is_resolved_as_the_release_does(
    version: str, architecture: str, quantization: str | None, capability: tuple[int, int], verdict: type
) -> None:
    """`--moe-runner-backend auto`, not yet resolved by a server, by release, model, quantization and GPU."""
    assert isinstance(live_path(version, architecture, MOE, {"quantization": quantization}, capability), verdict)


def test_a_running_servers_auto_is_believed() -> None:
    """What /server_info still calls auto has been through the server's own resolution."""
    assert isinstance(live_path("0.5.23", QWEN3, MOE, {"moe_runner_backend": "auto"}, SM100), NotReached)
    args = {"moe_runner_backend": "auto", "internal_states": []}
    assert isinstance(live_path("0.5.23", QWEN3, MOE, args, SM100), Reached)


def test_the_checkpoints_quantization_counts_where_none_was_typed() -> None:
    """Sglang fills the argument from config.json before it resolves auto."""
    config = {**MOE, "architectures": [DSV3], "quantization_config": {"quant_method": "fp8"}}
    assert isinstance(live_path("0.5.9", None, config, {}, SM100), NotReached)


def test_forced_standard_of_unquantised_deepseek_up_to_0_5_6() -> None:
    """There the model asks for standard output even under flashinfer_trtllm; later it does not."""
    args = {"moe_runner_backend": "flashinfer_trtllm"}
    assert isinstance(live_path("0.5.6", DSV3, MOE, args, SM90), Reached)
    assert isinstance(live_path("0.5.7", DSV3, MOE, args, SM90), NotReached)


def test_nvfp4_without_the_flag_ends_in_trtllm() -> None:
    """0.5.23 leaves auto to the quantization method unless --quantization modelopt_fp4 is typed."""
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*shared_experts*"]}
    config = {**MOE, "quantization_config": declared}
    verdict = live_path("0.5.23", GLM5, config, {}, SM120)
    assert isinstance(verdict, NotReached)
    assert "--quantization modelopt_fp4" in verdict.remedy
    typed = {"quantization": "modelopt_fp4"}
    assert isinstance(live_path("0.5.23", GLM5, config, typed, SM120), Reached)


@pytest.mark.parametrize(
    ("version", "quantization", "flag"),
    [
        ("0.5.9", "fp8", "triton"),
        ("0.5.9", "modelopt_fp4", "flashinfer_cutlass"),
        ("0.5.10", "fp8", "flashinfer_trtllm_routed"),
        ("0.5.10", "modelopt_fp4", "flashinfer_cutlass"),
        ("0.5.11", "modelopt_fp4", "flashinfer_trtllm_routed"),
    ],
)
def test_the_remedy_is_a_flag_the_release_has(version: str, quantization: str, flag: str) -> None:
    """flashinfer_trtllm_routed keeps the fast kernel, from 0.5.10, or 0.5.11 with NVFP4."""
    verdict = live_path(version, DSV3, MOE, {"quantization": quantization}, SM100)
    assert isinstance(verdict, NotReached)
    assert verdict.remedy.endswith(f"--moe-runner-backend {flag}.")


@pytest.mark.parametrize(
    ("architecture", "config", "args", "capability", "verdict"),
    [
        ("Qwen3ForCausalLM", {"hidden_size": 8}, {}, SM90, NotReached),
        ("QwenVL", {"text_config": {"num_experts": 8}}, {}, SM90, Reached),
        (QWEN3, {}, {}, SM90, Reached),
        (QWEN3, MOE, {"device": "npu"}, None, NotReached),
        (QWEN3, MOE, {"device": "xpu"}, None, CannotTell),
        (QWEN3, MOE, {"device": "cuda:0"}, SM90, Reached),
        (QWEN3, MOE, {}, None, CannotTell),
        (QWEN3, MOE, {"device": "cuda"}, None, CannotTell),
        (None, MOE, {}, SM90, CannotTell),
        (None, MOE, {"moe_runner_backend": "triton"}, SM90, Reached),
        ("KimiK3ForConditionalGeneration", MOE, {}, SM100, CannotTell),
        ("DeepseekV4ForCausalLM", FP8, {"moe_runner_backend": "flashinfer_mxfp4"}, SM120, CannotTell),
        ("DeepseekV4ForCausalLM", FP8, {}, SM90, CannotTell),
        ("BailingMoeV3ForCausalLM", FP8, {}, SM120, CannotTell),
        ("Cohere2MoeForCausalLM", MOE, {"moe_runner_backend": "flashinfer_trtllm"}, SM100, CannotTell),
        ("Llama4ForCausalLM", MOE, {"moe_runner_backend": "triton"}, SM90, NotReached),
        ("ZayaForCausalLM", MOE, {}, SM90, NotReached),
        ("DeepseekV4ForCausalLM", {**MOE, "num_hidden_layers": 3, "num_hash_layers": 3}, {}, SM90, NotReached),
    ],
)
def test_what_else_decides(
    architecture: str | None,
    config: dict[str, Any],
    args: dict[str, Any],
    capability: tuple[int, int] | None,
    verdict: type,
) -> None:
    """Dense models, other devices, and what is not known; every verdict says what it rests on."""
    answer = live_path("0.5.23", architecture, config, args, capability)
    assert isinstance(answer, verdict)
    assert answer.source
    if isinstance(answer, CannotTell):
        assert answer.missing


def test_flags_of_0_4_bypass_too() -> None:
    """0.4 has no runner backend; two switches of its own let another kernel select."""
    assert isinstance(live_path("0.4.9.post2", QWEN3, MOE, {}, SM90), Reached)
    assert isinstance(live_path("0.4.9.post2", QWEN3, MOE, {"enable_triton_kernel_moe": True}, SM90), NotReached)
    assert isinstance(live_path("0.4.10", DSV3, MOE, {"enable_flashinfer_trtllm_moe": True}, SM100), NotReached)


def test_layers_that_pass_by_are_noted() -> None:
    """Hash-routed layers and draft models are said, though the site is reached."""
    args = {"moe_runner_backend": "triton", "speculative_algorithm": "EAGLE"}
    verdict = live_path("0.5.23", "DeepseekV4ForCausalLM", {**MOE, "num_hash_layers": 3}, args, SM90)
    assert isinstance(verdict, Reached)
    assert [note.split()[1] for note in verdict.notes] == ["first", "draft"]


GLM5_CONFIG = MOE
DSV3_CONFIG = {**MOE, "n_group": 8, "topk_group": 4}
KIMI_CONFIG = {**MOE, "n_routed_experts": 384}
GLM46_CONFIG = {**MOE, "n_routed_experts": 160}


@pytest.mark.parametrize(
    ("architecture", "config", "fusion_off", "leaves"),
    [
        # Rows of the table of live paths; test_live_path_table.py has them all.
        (QWEN3, {"num_experts": 128}, False, {"0.5.9": "topk_softmax", "0.5.15": "Triton", "0.5.18": "Triton"}),
        (GLM5, GLM5_CONFIG, True, {"0.5.9": "impl", "0.5.11": "JIT", "0.5.15": "Triton", "0.5.23": "Triton"}),
        (GLM5, GLM5_CONFIG, False, {"0.5.9": "impl", "0.5.11": "impl", "0.5.15": "impl", "0.5.18": "Triton"}),
        (DSV3, DSV3_CONFIG, True, {"0.4.9": "sgl_kernel.moe_fused_gate", "0.5.8": "deepseek", "0.5.23": "deepseek"}),
        (DSV3, DSV3_CONFIG, False, {"0.5.5": "sgl_kernel.moe_fused_gate", "0.5.9": "fused_gate", "0.5.11": "deepseek"}),
        (DSV3, KIMI_CONFIG, True, {"0.5.5": "impl", "0.5.6": "kimi_k2", "0.5.14": "kimi_k2", "0.5.15": "Triton"}),
        (GLM4, GLM46_CONFIG, True, {"0.5.5": "impl", "0.5.11": "JIT", "0.5.15": "Triton", "0.5.18": "Triton"}),
        ("SomeNewMoeForCausalLM", MOE, True, {"0.5.23": None}),
        (DSV3, {"n_routed_experts": 256}, True, {"0.5.23": None}),
    ],
)
def test_the_leaf_is_named_where_it_is_certain(
    architecture: str, config: dict[str, Any], *, fusion_off: bool, leaves: dict[str, str | None]
) -> None:
    """The function that computes the top-k, as the table of releases and models has it."""
    args = {"moe_runner_backend": "triton", "disable_shared_experts_fusion": fusion_off}
    for version, leaf in leaves.items():
        verdict = live_path(version, architecture, config, args, SM90)
        assert isinstance(verdict, Reached)
        assert (verdict.leaf is None) == (leaf is None), version
        assert leaf is None or leaf in (verdict.leaf or ""), version
