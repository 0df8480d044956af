"""The models the table is about: their config.json, as far as sglang's server arguments and MoE blocks read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}
_KIMI_K2: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_GLM_5: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 12288,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
}
_GLM_46: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "max_position_embeddings": 202752,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}
_GLM_45_AIR: dict[str, Any] = {
    **_GLM_46,
    "hidden_size": 4096,
    "num_hidden_layers": 46,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "use_qk_norm": False,
    "max_position_embeddings": 131072,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Served:
    """A model, and where its MoE block is.

    Attributes:
        config: its config.json, without quantization.
        module: the file in sglang/srt/models that has the architecture.
        block_module: the file that has the MoE block.
        block: the MoE block's class.
        inner: the class that the architecture builds its layers with.
    """

    config: dict[str, Any]
    module: str
    block_module: str
    block: str
    inner: str

    @property
    def architecture(self) -> str:
        """The model class."""
        return str(self.config["architectures"][0])


MODELS = {
    "GLM-5": Served(_GLM_5, "glm4_moe", "deepseek_v2", "DeepseekV2MoE", "DeepseekV2Model"),
    "DeepSeek-V3": Served(_DEEPSEEK_V3, "deepseek_v2", "deepseek_v2", "DeepseekV2MoE", "DeepseekV2Model"),
    "Kimi-K2": Served(_KIMI_K2, "deepseek_v2", "deepseek_v2", "DeepseekV2MoE", "DeepseekV2Model"),
    "GLM-4.6": Served(_GLM_46, "glm4_moe", "glm4_moe", "Glm4MoeSparseMoeBlock", "Glm4MoeModel"),
    "GLM-4.5-Air": Served(_GLM_45_AIR, "glm4_moe", "glm4_moe", "Glm4MoeSparseMoeBlock", "Glm4MoeModel"),
    "Qwen3-MoE": Served(_QWEN3, "qwen3_moe", "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeModel"),
}

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    # The form of hf_quant_config.json, which older releases read.
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head", "*shared_experts*"],
    "ignore": ["lm_head", "*shared_experts*"],
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    },
}

# What the checkpoint declares, and what --quantization was given.
QUANTIZATIONS: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "bf16": (None, None),
    "fp8": (_FP8, None),
    "modelopt_fp4": (_NVFP4, "modelopt_fp4"),
    "NVFP4, no flag": (_NVFP4, None),
}
