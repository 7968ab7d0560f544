# SPDX-License-Identifier: Apache-2.0
"""Small decoders of every family of our own, and their logits by the formulas: dense, in any dtype, sharing no code.

Importing this skips the test module where transformers is missing.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")

from linbias.hf.models import baichuan, btlm, jais, mpt_foundry, refact  # noqa: E402

VOCABULARY, HEADS, WIDTH = 53, 6, 48
_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_inner": 40}
_MUP = {"mup_scale_qk_dot_by_d": True, "mup_embeddings_scale": 1.75, "mup_output_alpha": 0.75, "mup_width_scale": 1.5}
_JAIS = {**_GPT2, **_MUP, "activation_function": "swiglu", "position_embedding_type": "alibi"}
_BAICHUAN = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": HEADS}
_MPT = {"d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "expansion_ratio": 1.25, "use_cache": True}
_GROUPED = {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "qk_ln": True, "clip_qkv": 1.5}
_SINGLE = {"attn_type": "multiquery_attention", "qk_gn": True, "fused_qkv": False, "softmax_scale": 0.3}
_BARE = {"no_bias": True, "norm_type": "rmsnorm", "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 56}}

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "baichuan": (baichuan, _BAICHUAN),
    "baichuan2": (baichuan, {**_BAICHUAN, "norm_head": True}),
    "jais": (jais, _JAIS),
    "jais-gelu": (jais, {**_JAIS, "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True}),
    "btlm-factor": (btlm, {**_JAIS, "alibi_scaling": {"type": "linear", "factor": 2.5}}),
    "btlm-trained": (btlm, {**_JAIS, "alibi_scaling": {"type": "linear", "train_seq_len": 6}}),
    "refact": (refact, {**_GPT2, "n_inner": 60}),
    "mpt": (mpt_foundry, {**_MPT, "attn_config": {"alibi": True}}),
    "mpt-grouped": (
        mpt_foundry,
        {**_MPT, "no_bias": True, "logit_scale": "inv_sqrt_d_model"}
        | {"attn_config": {"alibi": True, "alibi_bias_max": 16, **_GROUPED}},
    ),
    "mpt-single": (mpt_foundry, {**_MPT, **_BARE, "attn_config": {"alibi": True, **_SINGLE}}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, **options: Any) -> Any:
    """A random language model in eval mode; its weights are large enough that content and bias both matter."""
    home, sizes = KINDS[kind]
    settings = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = list(home.PUBLISHED.classes.values())[1](home.PUBLISHED.config(**settings, **sizes | options)).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if not label.endswith("slopes"):
                one = parameter.dim() == 1
                parameter.normal_(0, 0.2 if one else 1.5 / math.sqrt(WIDTH))
                parameter.add_(1.0 if one and label.endswith("weight") else 0.0)
    model.tie_weights()
    return model


def logits(kind: str, weights: Mapping[str, Tensor], ids: Tensor, real: Tensor | None = None) -> Tensor:
    """(B, T, vocabulary) in the weights' dtype, by the family's formula; `real` (B, T) is false for padding."""
    home, sizes = KINDS[kind]
    formula = {baichuan: _baichuan, jais: _jais, btlm: _jais, refact: _refact, mpt_foundry: _mpt}[home]
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()
    return formula(weights, sizes, ids, real)


def slopes(maximum: float = 8.0) -> Tensor:
    """Of six heads: four of four, then the first and third of eight; rounded to float32 as models have them."""
    four, eight = ([2 ** (-maximum * h / count) for h in range(1, count + 1)] for count in (4, 8))
    return torch.tensor([*four, eight[0], eight[2]], dtype=torch.float32).double()


def attend(query: Tensor, key: Tensor, value: Tensor, steep: Tensor, real: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k - m (i - j)) v over real keys j <= i; (B, T, H, D) and (B, T, G, D) to (B, T, H * D).

    Slopes m are (H,), (B, H) or (1, H, T, 1).
    """
    heads, length = query.shape[2], query.shape[1]
    key, value = (part.repeat_interleave(heads // part.shape[2], 2) for part in (key, value))
    places = torch.arange(length)
    distance = (places[:, None] - places).abs()
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale
    steep = steep if steep.dim() == 4 else steep.reshape(-1, heads, 1, 1)
    scores = scores - (steep * distance).to(scores.dtype)
    seen = (places[:, None] >= places) & real[:, None, None, :]
    weights = torch.where(seen, scores, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, value).flatten(2)


def _parts(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in weights.items() if name.startswith(prefix)}


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _normal(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    unit = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return unit * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def _split(mixed: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    size = mixed.shape[-1] // (heads + 2 * groups)
    cuts = heads * size, (heads + groups) * size
    parts = mixed[..., : cuts[0]], mixed[..., cuts[0] : cuts[1]], mixed[..., cuts[1] :]
    query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
    return query, key, value


def _baichuan(weights: Mapping[str, Tensor], sizes: Mapping[str, Any], ids: Tensor, real: Tensor) -> Tensor:
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(2):
        w = _parts(weights, f"model.layers.{layer}.")
        mixed = _rms(hidden, w["input_layernorm.weight"], 1e-6) @ w["self_attn.W_pack.weight"].T
        context = attend(*_split(mixed, HEADS, HEADS), slopes(), real, (WIDTH / HEADS) ** -0.5)
        hidden = hidden + context @ w["self_attn.o_proj.weight"].T
        x = _rms(hidden, w["post_attention_layernorm.weight"], 1e-6)
        gate = x @ w["mlp.gate_proj.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    head = weights["lm_head.weight"]
    if sizes.get("norm_head"):
        head = head / head.pow(2).sum(1, keepdim=True).sqrt()
    return _rms(hidden, weights["model.norm.weight"], 1e-6) @ head.T


def _jais(weights: Mapping[str, Tensor], sizes: Mapping[str, Any], ids: Tensor, real: Tensor) -> Tensor:
    scaling = sizes.get("alibi_scaling") or {"factor": 1.0}
    steep = slopes()
    if "factor" in scaling:
        steep = steep / scaling["factor"]
    elif "lengths" in sizes:  # of the text when each token came
        steep = steep[:, None, None] / (sizes["lengths"] / scaling["train_seq_len"]).clamp(min=1)[:, None]
        steep = steep[None]
    else:
        steep = steep / (real.double().sum(1, keepdim=True) / scaling["train_seq_len"]).clamp(min=1)
    hidden = weights["transformer.wte.weight"][ids] * sizes["mup_embeddings_scale"]
    for layer in range(2):
        w = _parts(weights, f"transformer.h.{layer}.")
        mixed = _normal(hidden, w, "ln_1") @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"]
        scale = HEADS / WIDTH / (layer + 1 if sizes.get("scale_attn_by_inverse_layer_idx") else 1)
        context = attend(*_split(mixed, HEADS, HEADS), steep, real, scale)
        hidden = hidden + context @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
        x = _normal(hidden, w, "ln_2")
        inner = x @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"]
        if sizes["activation_function"] == "swiglu":
            gate = x @ w["mlp.c_fc2.weight"] + w["mlp.c_fc2.bias"]
            inner = inner * gate * gate.sigmoid()
        else:
            inner = F.gelu(inner)
        hidden = hidden + inner @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    out = _normal(hidden, weights, "transformer.ln_f") @ weights["transformer.wte.weight"].T
    return out * (sizes["mup_output_alpha"] * sizes["mup_width_scale"])


def _refact(weights: Mapping[str, Tensor], sizes: Mapping[str, Any], ids: Tensor, real: Tensor) -> Tensor:
    hidden = weights["transformer.wte.weight"][ids]
    for layer in range(2):
        w = _parts(weights, f"transformer.h.{layer}.")
        x = _normal(hidden, w, "ln_1")
        mixed = torch.cat([x @ w["attn.q.weight"].T, x @ w["attn.kv.weight"].T], -1)
        context = attend(*_split(mixed, HEADS, 1), slopes(), real, (WIDTH / HEADS) ** -0.5)
        hidden = hidden + context @ w["attn.c_proj.weight"].T
        both = _normal(hidden, w, "ln_2") @ w["mlp.gate_up_proj.weight"].T
        gate, up = both[..., :256], both[..., 256:]
        hidden = hidden + (gate * gate.sigmoid() * up) @ w["mlp.c_proj.weight"].T
    return _normal(hidden, weights, "ln_f") @ weights["lm_head.weight"].T


def _mpt(weights: Mapping[str, Tensor], sizes: Mapping[str, Any], ids: Tensor, real: Tensor) -> Tensor:
    options, bare = sizes["attn_config"], sizes.get("norm_type") == "rmsnorm"

    def norm(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
        return _rms(x, w[f"{name}.weight"], 1e-5) if bare else _normal(x, w, name)

    def linear(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    groups = {"grouped_query_attention": 2, "multiquery_attention": 1}.get(options.get("attn_type"), HEADS)
    hidden = weights["transformer.wte.weight"][ids]
    for layer in range(2):
        w = _parts(weights, f"transformer.blocks.{layer}.")
        x = norm(hidden, w, "norm_1")
        names = ("attn.Wqkv",) if options.get("fused_qkv", True) else ("attn.Wq", "attn.Wk", "attn.Wv")
        mixed = torch.cat([linear(x, w, name) for name in names], -1)
        limit = options.get("clip_qkv") or torch.inf
        query, key, value = _split(mixed.clamp(-limit, limit), HEADS, groups)
        if options.get("qk_gn"):
            query, key = norm(query, w, "attn.q_ln"), norm(key, w, "attn.k_ln")
        if options.get("qk_ln"):
            query = norm(query.flatten(2), w, "attn.q_ln").view_as(query)
            key = norm(key.flatten(2), w, "attn.k_ln").view_as(key)
        scale = options.get("softmax_scale", (WIDTH / HEADS) ** -0.5)
        context = attend(query, key, value, slopes(options.get("alibi_bias_max", 8)), real, scale)
        hidden = hidden + linear(context, w, "attn.out_proj")
        x = norm(hidden, w, "norm_2")
        up = linear(x, w, "ffn.up_proj")
        inner = F.gelu(linear(x, w, "ffn.gate_proj")) * up if bare else F.gelu(up)
        hidden = hidden + linear(inner, w, "ffn.down_proj")
    out = norm(hidden, weights, "transformer.norm_f") @ weights["transformer.wte.weight"].T
    return out * WIDTH**-0.5 if sizes.get("logit_scale") else out
