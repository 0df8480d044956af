"""Writes the lab's model: a tiny GLM-4-MoE with random weights and a tokenizer whose ids are bytes.

Run by a lab environment's interpreter, which has torch and transformers: ``python -I tiny_model.py FOLDER``.
The routing rule is GLM-5's: sigmoid scores plus a correction bias, one group, one shared expert. 20 M parameters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
END_OF_TEXT = 256


def write_weights(folder: Path, *, seed: int, bias: float) -> None:
    """Write the configuration and the random weights, in bfloat16.

    Args:
        folder: where to.
        seed: of every random number in the model.
        bias: standard deviation of the correction bias. 0 makes every expert equally likely, as formulas assume.
    """
    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        n_routed_experts=64,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        max_position_embeddings=4096,
        num_nextn_predict_layers=0,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
    )
    model = Glm4MoeForCausalLM(config)
    with torch.no_grad():
        # With embeddings as small as the rest, what a row attended to drowns its own token: all rows of a batch then
        # like the same experts (T = 51 of 64 at 16 rows; 56 so, where independent rows give 56.4).
        model.model.embed_tokens.weight.mul_(16.0)
        for name, buffer in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, bias) if bias else buffer.zero_()
    model.to(torch.bfloat16).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE without merges: ids 0 to 255 are bytes, 256 ends a text, the rest are names.

    Args:
        folder: where to.
    """
    # Byte-level BPE writes a byte as one printable character: itself, or the next one from U+0100 on.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    substitutes = (chr(code) for code in range(256, 512))
    vocabulary = {chr(byte) if chr(byte) in alphabet else next(substitutes): byte for byte in range(END_OF_TEXT)}
    end = "<|endoftext|>"
    vocabulary[end] = END_OF_TEXT
    vocabulary |= {f"<{index}>": index for index in range(END_OF_TEXT + 1, VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end).save_pretrained(
        folder
    )


def main() -> None:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bias", type=float, default=0.0)
    wanted = parser.parse_args()
    write_weights(wanted.folder, seed=wanted.seed, bias=wanted.bias)
    write_tokenizer(wanted.folder)


if __name__ == "__main__":
    main()
