"""The shape of a model: how many layers route, and what an expert weighs."""

from __future__ import annotations

from typing import Any

import pytest

from surgeon.bench import latency, shape
from surgeon.errors import DoesNotFitError, UsageError

# The fields that count, from the models' published config.json.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "quantization_config": {"quant_method": "mxfp4"},
}


def qwen(**fields: Any) -> dict[str, Any]:
    """A config of Qwen's family with six layers."""
    plain = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2}
    return {**plain, "num_hidden_layers": 6, "decoder_sparse_step": 1, "mlp_only_layers": [], **fields}


@pytest.mark.parametrize(
    ("config", "experts", "top_k", "layers"),
    [
        (latency.data("models")["GLM-5"], 256, 8, 75),
        (latency.data("models")["Qwen3-30B-A3B"], 128, 8, 48),
        (latency.data("models")["Qwen3-235B-A22B"], 128, 8, 94),
        (DEEPSEEK_V3, 256, 8, 58),
        (GPT_OSS_120B, 128, 4, 36),
        (qwen(mlp_only_layers=[0, 3]), 16, 2, 4),
        (qwen(decoder_sparse_step=2), 16, 2, 3),
        (qwen(decoder_sparse_step=2, mlp_only_layers=[1]), 16, 2, 2),
        (qwen(decoder_sparse_step=1, moe_layer_freq=[0, 1, 1, 0, 1, 1]), 16, 2, 4),
        (qwen(mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse"]), 16, 2, 5),
        ({"text_config": qwen(), "vision_config": {"num_hidden_layers": 27}}, 16, 2, 6),
    ],
    ids=["GLM-5", "30B", "235B", "DeepSeek-V3", "gpt-oss", "only", "step", "step-only", "list", "types", "text"],
)
def test_the_layers_that_route_are_counted_as_each_family_says_it(
    config: dict[str, Any], experts: int, top_k: int, layers: int
) -> None:
    """Dense layers at the start, between and by list are left out; so is the draft model's."""
    found = shape.parse(config)
    assert (found.experts, found.top_k, found.layers) == (experts, top_k, layers)


@pytest.mark.parametrize("row", latency.rows(), ids=lambda row: f"{row.gpu}-{row.dtype}-{row.model}-tp{row.tp}")
def test_an_expert_weighs_what_the_measured_rows_say(row: latency.Row) -> None:
    """Three matrices of hidden by width, with block scales, over the GPUs: within 1 % of each row's own number."""
    model = shape.parse(latency.data("models")[row.model])
    assert model.expert_mb(row.dtype, tp=row.tp) == pytest.approx(row.mb, rel=0.01)


def test_expert_parallel_ranks_hold_whole_experts() -> None:
    """TP8 and EP8 give each GPU fewer experts, not thinner ones."""
    model = shape.parse(latency.data("models")["GLM-5"])
    assert model.expert_mb("nvfp4", tp=8, ep=8) == pytest.approx(model.expert_mb("nvfp4"))
    assert model.expert_mb("nvfp4", tp=8, ep=2) == pytest.approx(model.expert_mb("nvfp4", tp=4))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (DEEPSEEK_V3, "fp8"),
        (GPT_OSS_120B, "mxfp4"),
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float16"}, "bf16"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}, "fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}, "nvfp4"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}, "int4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "modelopt"}, "torch_dtype": "bfloat16"}, ""),
        ({}, ""),
    ],
)
def test_how_experts_are_stored_is_read_or_not_known(config: dict[str, Any], dtype: str) -> None:
    """A quantised checkpoint's torch_dtype says nothing about its experts."""
    assert shape.stored_as(config) == dtype


def test_a_dense_model_is_refused() -> None:
    """There is nothing to choose from."""
    dense = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32}
    with pytest.raises(DoesNotFitError, match="LlamaForCausalLM has no routed experts") as refused:
        shape.parse(dense)
    assert refused.value.code == "not-moe"


def test_a_config_without_a_needed_field_says_which() -> None:
    """No number is made up."""
    with pytest.raises(DoesNotFitError, match="has no num_experts_per_tok, hidden_size"):
        shape.parse({"num_experts": 8, "intermediate_size": 4, "num_hidden_layers": 2})


def test_an_unknown_dtype_is_refused() -> None:
    """With those that are known."""
    with pytest.raises(UsageError, match="expected one of bf16, fp8, nvfp4, mxfp4, int4"):
        shape.checked_dtype("fp12")
