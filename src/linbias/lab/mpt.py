# SPDX-License-Identifier: Apache-2.0
"""A trained decoder as a transformers MPT checkpoint: configuration, weights and a tokenizer of bytes."""

import json
from pathlib import Path
from typing import Any

from .config import VOCABULARY, ConfigError, ModelConfig
from .evaluations.config import ExportCommand
from .storage import save_tensors, write_text
from .train import load_checkpoint

_REFUSALS = {
    "alibi-learned": "MPT computes its slopes from alibi_bias_max, and has no place for learned ones",
    "alibi-half": "MPT gives every head a slope, and has no place for heads without one",
}


def export_mpt(command: ExportCommand) -> list[Path]:
    """Write the folder and return its files.

    Raises:
        ConfigError: the scheme is one that MPT's code has no place for.
        CheckpointError: the checkpoint cannot be read.
    """
    trained = load_checkpoint(command.checkpoint)
    if trained.scheme != "alibi":
        reason = _REFUSALS.get(
            trained.scheme, "MPT's attention adds ALiBi's bias whatever the checkpoint was trained with"
        )
        raise ConfigError(
            f"checkpoint must be trained with 'alibi' to be exported as MPT, got {trained.scheme!r}: {reason}"
        )
    weights, config, tokenizer, tokens = (
        command.out / name for name in ("model.safetensors", "config.json", "tokenizer_config.json", "tokenizer.json")
    )
    save_tensors(weights, trained.weights, {"from": trained.about["fingerprint"]})
    write_text(config, json.dumps(_config(trained.model, command.length or 16 * trained.length), indent=1))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_text(tokenizer, json.dumps(kind, indent=1))
    write_text(tokens, json.dumps(_byte_tokenizer()))
    return [config, weights, tokenizer, tokens]


def _config(model: ModelConfig, length: int) -> dict[str, Any]:
    return {
        "model_type": "mpt",
        "architectures": ["MptForCausalLM"],
        "d_model": model.width,
        "n_heads": model.heads,
        "n_layers": model.layers,
        "expansion_ratio": 4,
        "max_seq_len": length,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": 1e-5,
        "learned_pos_emb": False,
        "no_bias": True,
        "tie_word_embeddings": True,
        # Readers of the first MPT checkpoints insist on these two.
        "embedding_fraction": 1.0,
        "norm_type": "low_precision_layernorm",
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "resid_pdrop": 0.0,
        "emb_pdrop": 0.0,
        "dtype": "float32",
        "torch_dtype": "float32",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are bytes: token n is byte n."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())},
            "merges": [],
        },
    }


def _letters() -> list[str]:
    """The letter that stands for each byte in a file of tokens: itself if it prints, one past 255 if not."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(VOCABULARY, 2 * VOCABULARY))
    return [chr(byte if byte in printing else next(others)) for byte in range(VOCABULARY)]
