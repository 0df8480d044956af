"""Models that choose their experts without topk.py, or give it a routing function of their own.

Found by reading every file of sglang/srt/models in the wheels of 0.4.6 to 0.5.23; tests/surgery/test_own_routers.py
does that again.
"""

from __future__ import annotations

from typing import Final

# The architecture, the first release in which it has experts and its own router, and its file in srt/models.
OWN_ROUTERS: Final[dict[str, tuple[str, str]]] = {
    "InklingForConditionalGeneration": ("0.5.16", "inkling.py"),
    "InklingForConditionalGenerationMTP": ("0.5.16", "inkling.py"),
    "TransformersForCausalLM": ("0.5.10", "transformers.py"),
    "TransformersMoEForCausalLM": ("0.5.10", "transformers.py"),
    "TransformersMultiModalForCausalLM": ("0.5.10", "transformers.py"),
    "TransformersMultiModalMoEForCausalLM": ("0.5.10", "transformers.py"),
    "TransformersEmbeddingModel": ("0.5.10", "transformers.py"),
    "TransformersMoEEmbeddingModel": ("0.5.10", "transformers.py"),
    "TransformersMultiModalEmbeddingModel": ("0.5.10", "transformers.py"),
    "TransformersMultiModalMoEEmbeddingModel": ("0.5.10", "transformers.py"),
    "TransformersForSequenceClassification": ("0.5.10", "transformers.py"),
    "TransformersMoEForSequenceClassification": ("0.5.10", "transformers.py"),
    "TransformersMultiModalForSequenceClassification": ("0.5.10", "transformers.py"),
    "TransformersMultiModalMoEForSequenceClassification": ("0.5.10", "transformers.py"),
    "ZayaForCausalLM": ("0.5.14", "zaya.py"),
}

# The architecture, and its file in srt/models that passes custom_routing_function.
OWN_ROUTING_FUNCTIONS: Final[dict[str, str]] = {
    "AfmoeForCausalLM": "afmoe.py",
    "Cohere2MoeForCausalLM": "cohere2_moe.py",
    "Cohere2VisionForConditionalGeneration": "cohere2_moe.py",
    "Gemma4ForCausalLM": "gemma4_causal.py",
    "Gemma4ForConditionalGeneration": "gemma4_causal.py",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_causal.py",
    "Grok1ForCausalLM": "grok.py",
    "Grok1ModelForCausalLM": "grok.py",
    "InternS1ProForConditionalGeneration": "interns1pro.py",
    "Llama4ForCausalLM": "llama4.py",
    "Llama4ForConditionalGeneration": "llama4.py",
    "PhiMoEForCausalLM": "phimoe.py",
}
