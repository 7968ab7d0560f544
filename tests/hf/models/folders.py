# SPDX-License-Identifier: Apache-2.0
"""Folders as their authors published them: config.json by hand, safetensors, code that must not run, tokenizers.

Importing this skips the test module where transformers is missing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hf.models import dense, encoders

from linbias.hf.models import jina, jina_code, mosaic  # isort: skip

WEIGHTS = "model.safetensors"
WORDS = "the sun rose over a quiet town and every dog in it began to bark at once".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

_BERT = {
    **{"attention_probs_dropout_prob": 0.0, "classifier_dropout": None, "gradient_checkpointing": False},
    **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-12},
    **{"model_type": "bert", "num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 2, "use_cache": True},
    **{"torch_dtype": "float16", "transformers_version": "4.26.0", "vocab_size": 53},
}
_JINA = {
    **{"architectures": ["JinaBertForMaskedLM"], "attn_implementation": "torch", "emb_pooler": "mean"},
    **{"feed_forward_type": "geglu", "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3},
    **{"max_position_embeddings": 8192, "model_max_length": 8192, "position_embedding_type": "alibi"},
}
_MOSAIC = {
    **{"alibi_starting_size": 512, "architectures": ["BertForMaskedLM"], "hidden_size": 30, "intermediate_size": 44},
    **{"max_position_embeddings": 512, "num_attention_heads": 6, "position_embedding_type": "absolute"},
}


def _code(repository: str, kind: str) -> dict[str, Any]:
    """What leads to code: of another repository, or, "", of the folder."""
    place = f"{repository}--modeling" if repository else "modeling"
    return {"auto_map": {"AutoModel": f"{place}.{kind}", "AutoModelForCausalLM": f"{place}.{kind}"}}


_GPT2 = {"initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_embd": 48, "n_head": 6, "n_layer": 2, "n_inner": 40}
_GPT2 |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": True, "vocab_size": 53}
_JAIS = {
    **{"activation_function": "swiglu", "architectures": ["JAISLMHeadModel"], "bos_token_id": 0, "eos_token_id": 0},
    **{"embeddings_scale": 1.75, "model_type": "jais", "n_positions": 2048, "position_embedding_type": "alibi"},
    **{"reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
    **{"scale_qk_dot_by_d": True, "torch_dtype": "float32", "width_scale": 1.125, **_GPT2},
}
_BTLM = {
    **{"activation_function": "swiglu", "alibi_scaling": {"type": "linear", "train_seq_len": 6}, "model_type": "btlm"},
    **{"architectures": ["BTLMLMHeadModel"], "mup_embeddings_scale": 1.75, "mup_output_alpha": 0.75},
    **{"mup_scale_qk_dot_by_d": True, "mup_width_scale": 1.5, "n_positions": 8192, "position_embedding_type": "alibi"},
    **{"torch_dtype": "bfloat16", "summary_type": "cls_index", "bos_token_id": 0, "eos_token_id": 0, **_GPT2},
}
_REFACT = {
    **{"architectures": ["GPTRefactForCausalLM"], "attention_softmax_in_fp32": False, "do_sample": True, **_GPT2},
    **{"bos_token_id": -1, "eos_token_id": 0, "model_type": "gpt_refact", "multi_query": True, "n_inner": 60},
    **{"n_positions": 4096, "scale_attn_weights": True, "torch_dtype": "bfloat16"},
}
_BAICHUAN = {
    **{"_from_model_config": True, "architectures": ["BaichuanForCausalLM"], "bos_token_id": 1, "eos_token_id": 2},
    **{"gradient_checkpointing": [False], "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02},
    **{"intermediate_size": 40, "model_max_length": 4096, "model_type": "baichuan", "num_attention_heads": 6},
    **{"num_hidden_layers": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"tokenizer_class": "BaichuanTokenizer", "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 53},
}
_MPT_ATTENTION = {
    **{"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention"},
    **{"attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None},
}
_MPT = {
    **{"architectures": ["MPTForCausalLM"], "attn_config": _MPT_ATTENTION, "d_model": 48, "emb_pdrop": 0},
    **{"embedding_fraction": 1.0, "expansion_ratio": 1.25, "init_config": {"name": "kaiming_normal_", "verbose": 0}},
    **{"init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "model_type": "mpt"},
    **{"n_heads": 6, "n_layers": 2, "no_bias": False, "norm_type": "low_precision_layernorm", "resid_pdrop": 0},
    **{"torch_dtype": "bfloat16", "use_cache": False, "verbose": 0, "vocab_size": 53},
}
_GROUPED = {
    **{"alibi_bias_max": 16, "attn_impl": "triton", "attn_type": "grouped_query_attention", "clip_qkv": 1.5},
    **{"kv_n_heads": 2, "qk_ln": True, "rope": False, "rope_theta": 10000, "sliding_window_size": -1},
}

FACTS: dict[str, dict[str, Any]] = {
    "jina": _BERT | _JINA | _code("jinaai/jina-bert-implementation", "JinaBertModel"),
    "jina-code": _BERT | _JINA | _code("jinaai/jina-bert-v2-qk-post-norm", "JinaBertModel"),
    "mosaic": _BERT | _MOSAIC | {"auto_map": {"AutoModelForMaskedLM": "bert_layers.BertForMaskedLM"}},
    "baichuan": _BAICHUAN | _code("", "BaichuanForCausalLM"),
    "baichuan2": _BAICHUAN | _code("", "BaichuanForCausalLM") | {"norm_head": True, "z_loss_weight": 0},
    "jais": _JAIS | _code("", "JAISLMHeadModel"),
    "btlm-trained": _BTLM | _code("", "BTLMLMHeadModel"),
    "refact": _REFACT | _code("", "GPTRefactForCausalLM"),
    "mpt": _MPT | _code("", "MPTForCausalLM"),
    "mpt-grouped": _MPT
    | _code("", "MPTForCausalLM")
    | {"attn_config": _MPT_ATTENTION | _GROUPED, "logit_scale": "inv_sqrt_d_model", "no_bias": True},
}
"""config.json of a small model of every kind; decoders are called as in dense.py."""
ENCODERS: dict[str, Any] = {"jina": jina, "jina-code": jina_code, "mosaic": mosaic}


def make(kind: str, head: str = "ForMaskedLM", **options: Any) -> Any:
    """A random model of `FACTS`; heads are encoders'."""
    if kind not in ENCODERS:
        return dense.make(kind)
    published = ENCODERS[kind].PUBLISHED
    name = ("Bert" if kind == "mosaic" else "JinaBert") + head
    return encoders.randomised(published.classes[name](published.config(**FACTS[kind] | options)))


def publish(folder: Path, kind: str, tensors: Mapping[str, Tensor] | Any, **changes: Any) -> Path:
    """`tensors`, or those of a model, and config.json of the kind with `changes`."""
    held = tensors if isinstance(tensors, Mapping) else stored(tensors)
    save(folder, held)
    (folder / "config.json").write_text(json.dumps(FACTS[kind] | changes))
    for name in ("modeling", "modeling_bert", "bert_layers", "configuration"):
        (folder / f"{name}.py").write_text("raise AssertionError('code of the folder was run')\n")
    return folder


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """As the folder's safetensors."""
    save_file({name: part.contiguous().clone() for name, part in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def stored(model: Any) -> dict[str, Tensor]:
    """The tensors of a model that a file holds: a tied head is the embeddings."""
    tensors = dict(model.state_dict())
    tied = type(model)._tied_weights_keys if getattr(model.config, "tie_word_embeddings", False) else None
    return {name: part for name, part in tensors.items() if name not in (tied or ())}


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Tensors of the folder replaced, added or, by None, left out."""
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({name: part for name, part in tensors.items() if part is not None}, folder / WEIGHTS, {"format": "pt"})


def states(kind: str, base: Any, ids: Tensor) -> Tensor:
    """(T, width) in float64: an encoder's vectors of one text (T,), by its formula."""
    weights, heads = encoders.weights_of(base), FACTS[kind]["num_attention_heads"]
    arguments = weights, ids.numpy(), np.zeros(len(ids), int)
    if kind == "mosaic":
        return torch.from_numpy(encoders.mosaic(*arguments, heads=heads))
    return torch.from_numpy(encoders.jina(*arguments, heads=heads, code=kind == "jina-code", kind="geglu"))


def tokenize(folder: Path, **settings: Any) -> None:
    """A WordPiece tokenizer over `WORDS`, as vocab.txt and tokenizer_config.json."""
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *dict.fromkeys(WORDS), "##s", "##ing", ".", ","]) + "\n")
    facts = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 40, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def sentence_settings(folder: Path, *, modules: list[tuple[str, str, dict[str, Any]]], **settings: Any) -> None:
    """modules.json, a folder for each module after the first, and sentence_bert_config.json."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (path, kind, facts) in enumerate(modules, start=1):
        listed.append({"idx": number, "name": str(number), "path": path, "type": kind})
        (folder / path).mkdir()
        if facts:
            (folder / path / "config.json").write_text(json.dumps(facts))
    (folder / "modules.json").write_text(json.dumps(listed))
    if settings:
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
