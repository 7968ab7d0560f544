# SPDX-License-Identifier: Apache-2.0
"""MPT as llm-foundry has it, and Replit code v1.5: what transformers' own MPT reads of a configuration and drops.

Slopes with `alibi_bias_max`, grouped heads, norms of queries and keys, RMS norms, gated MLPs, a scale of the logits;
see docs/models/mpt_foundry.md.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...semantics.slopes import alibi_slopes
from ..mlp import RowBlocks
from .decoder import Block, CausalModel, DecoderModel, SelfAttention, refuse, split_heads
from .published import Published, is_number, misfits

_ATTENTION: dict[str, Any] = {
    "attn_type": "multihead_attention",
    "attn_pdrop": 0.0,
    "qk_ln": False,
    "qk_gn": False,
    "fused_qkv": True,
    "clip_qkv": None,
    "softmax_scale": None,
    "attn_uses_sequence_id": False,
    "alibi": False,
    "alibi_bias_max": 8,
}
_FFN: dict[str, Any] = {"ffn_type": "mptmlp"}
# llm-foundry lets any function of torch.nn.functional be named.
_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
_LAYER_NORMS, _RMS_NORMS = (
    ("layernorm", "low_precision_layernorm"),
    ("rmsnorm", "low_precision_rmsnorm", "triton_rmsnorm"),
)


class MPTConfig(PreTrainedConfig):
    """The published fields. It is saved as "mpt_foundry", so that transformers does not take it for its own MPT."""

    model_type = "mpt_foundry"
    keys_to_ignore_at_inference = ("past_key_values", "cache")
    attribute_map = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}

    d_model: int = 2048
    n_heads: int = 16
    n_layers: int = 24
    expansion_ratio: int | float = 4
    max_seq_len: int = 2048
    """Of training; nothing is limited to it."""
    vocab_size: int = 50368
    resid_pdrop: float = 0.0
    emb_pdrop: float = 0.0
    learned_pos_emb: bool = True
    """Without effect beside ALiBi, as in llm-foundry."""
    attn_config: dict[str, Any] | None = None
    ffn_config: dict[str, Any] | None = None
    logit_scale: float | str | None = None
    no_bias: bool = False
    embedding_fraction: float = 1.0
    norm_type: str = "low_precision_layernorm"
    norm_eps: float = 1e-5
    use_cache: bool = False
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.attn_config = _ATTENTION | (self.attn_config or {})
        self.ffn_config = _FFN | (self.ffn_config or {})
        super().__post_init__(**kwargs)


class LPLayerNorm(nn.LayerNorm):
    """A layer norm that stays in mixed precision's dtype, where torch's own would return float32."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., width)."""
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            parts: list[Tensor | None] = [self.weight, self.bias]
            weight, bias = [None if part is None else part.to(dtype) for part in parts]
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


class MPTRMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), in float32 and rounded once."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width)."""
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class _MLP(nn.Module):
    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        options = config.ffn_config or {}
        width, inner = config.d_model, options.get("ffn_hidden_size")
        inner = int(width * config.expansion_ratio) if inner is None else inner
        bias = not config.no_bias
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.gate_proj = nn.Linear(width, inner, bias=bias) if options["ffn_type"] == "mptglu" else None
        self.act_options = dict(options.get("ffn_act_fn") or {"name": "gelu"})
        self.act = _ACTIVATIONS[self.act_options.pop("name")]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x), **self.act_options))
        return self.down_proj(self.act(self.gate_proj(x), **self.act_options) * self.up_proj(x))


class MPTMLP(RowBlocks, _MLP):  # pyright: ignore[reportIncompatibleMethodOverride]
    """down(act(up(x))), or down(act(gate(x)) * up(x)); a long text in blocks."""


class MPTAttention(SelfAttention):
    """H query heads on G key heads, clipped and normalised as the configuration has it."""

    def __init__(self, config: MPTConfig, layer: int) -> None:
        options: dict[str, Any] = config.attn_config or {}
        width, bias = config.d_model, not config.no_bias
        size, scale = width // config.n_heads, options["softmax_scale"]
        super().__init__(layer, size**-0.5 if scale is None else scale, options["attn_pdrop"])
        self.num_heads, self.groups = config.n_heads, groups_of(config.to_dict())
        self.clip_qkv, self.per_head = options["clip_qkv"], options["qk_gn"]
        kept = self.groups * size
        if options["fused_qkv"]:
            self.Wqkv = nn.Linear(width, width + 2 * kept, bias=bias)
        else:
            self.Wq, self.Wk, self.Wv = (nn.Linear(width, out, bias=bias) for out in (width, kept, kept))
        if options["qk_ln"] or options["qk_gn"]:
            self.q_ln = norm_of(config, size if self.per_head else width)
            self.k_ln = norm_of(config, size if self.per_head else kept)
        self.out_proj = nn.Linear(width, width, bias=bias)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All queries, then all keys, then all values."""
        fused = hasattr(self, "Wqkv")
        mixed = self.Wqkv(hidden) if fused else torch.cat([self.Wq(hidden), self.Wk(hidden), self.Wv(hidden)], -1)
        if self.clip_qkv:
            mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = split_heads(mixed, self.num_heads, self.groups)
        if hasattr(self, "q_ln"):
            query, key = self._normalised(self.q_ln, query), self._normalised(self.k_ln, key)
        return query, key, value

    def _normalised(self, norm: nn.Module, heads: Tensor) -> Tensor:
        """Over each head, or over all of them."""
        if self.per_head:
            return norm(heads).to(heads.dtype)
        flat = heads.transpose(1, 2).flatten(2)
        return norm(flat).to(heads.dtype).unflatten(2, (heads.shape[1], -1)).transpose(1, 2)

    def project(self, context: Tensor, residual: Any) -> Tensor:
        """The residual is added by the block."""
        return self.out_proj(context)


class MPTBlock(Block):
    """A block under its published names."""

    parts = ("norm_1", "attn", "norm_2", "ffn")

    def __init__(self, config: MPTConfig, layer: int) -> None:
        first, second = (norm_of(config, config.d_model) for _ in range(2))
        super().__init__((first, MPTAttention(config, layer), second, MPTMLP(config)), config.resid_pdrop)


class MPTModel(DecoderModel):
    """Embeddings, blocks, and the norm behind them."""

    config_class = MPTConfig
    base_model_prefix = "transformer"
    blocks_name, norm_name = "blocks", "norm_f"
    _no_split_modules = ["MPTBlock"]

    def __init__(self, config: MPTConfig) -> None:
        refuse(PUBLISHED.name, PUBLISHED.refusals(config.to_dict()))
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(MPTBlock(config, layer) for layer in range(config.n_layers))
        self.norm_f = norm_of(config, config.d_model)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        sequence_id: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As `DecoderModel.forward`; `sequence_id` (B, T) tells documents apart where the configuration says so.

        Raises:
            TypeError, ValueError: as there; a `sequence_id` without ``attn_uses_sequence_id``, which ignores it.
        """
        if sequence_id is not None:
            if not self.config.attn_config["attn_uses_sequence_id"]:
                raise ValueError(
                    "sequence_id has no effect in a model with attn_config['attn_uses_sequence_id']=False; set that, "
                    "or pass seq_idx, which always tells documents apart"
                )
            options["seq_idx"] = sequence_id
        return super().forward(input_ids, attention_mask, inputs_embeds, cache, **options)

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes, their last exponent `alibi_bias_max`."""
        return alibi_slopes(self.config.n_heads, max_bias=self.config.attn_config["alibi_bias_max"], device="cpu")

    def embed(self, inputs_embeds: Tensor) -> Tensor:
        """With `embedding_fraction` of the gradient, and dropped out."""
        fraction = self.config.embedding_fraction
        if fraction != 1:
            inputs_embeds = inputs_embeds * fraction + inputs_embeds.detach() * (1 - fraction)
        return F.dropout(inputs_embeds, self.config.emb_pdrop, self.training)


class MPTForCausalLM(CausalModel):
    """`MPTModel`, its head usually the embeddings."""

    config_class = MPTConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["MPTBlock"]
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: MPTConfig) -> None:
        super().__init__(config)
        self.transformer = MPTModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Times `logit_scale`."""
        scale = self.config.logit_scale
        scale = self.config.d_model**-0.5 if scale == "inv_sqrt_d_model" else scale
        return self.lm_head(hidden) if scale is None else self.lm_head(hidden) * scale


def norm_of(config: MPTConfig, width: int) -> nn.Module:
    """The norm that `norm_type` names."""
    name = config.norm_type.lower()
    if name in _RMS_NORMS:
        return MPTRMSNorm(width, config.norm_eps)
    kind = LPLayerNorm if name == "low_precision_layernorm" else nn.LayerNorm
    return kind(width, eps=config.norm_eps, bias=not config.no_bias)


def groups_of(config: Mapping[str, Any]) -> int:
    """G, by `attn_type`."""
    options, heads = _ATTENTION | (config.get("attn_config") or {}), config.get("n_heads", MPTConfig.n_heads)
    return {"multihead_attention": heads, "multiquery_attention": 1}.get(options["attn_type"]) or options["kv_n_heads"]


def _refusals(config: Mapping[str, Any]) -> list[str]:
    given: dict[str, Any] = config.get("attn_config") or {}
    ffn: dict[str, Any] = config.get("ffn_config") or {}
    if "attn_config" not in config and "alibi" in config:
        return [
            "alibi stands by itself and attn_config is missing: this is an early form of llm-foundry's, with other "
            "names of weights; convert it with llm-foundry"
        ]
    attention = _ATTENTION | given
    kinds = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    groups = attention.get("kv_n_heads")
    wrong = {
        "alibi": (not attention["alibi"], "without ALiBi there is nothing of linbias in it; use llm-foundry"),
        "rope": (attention.get("rope"), "rotary positions are not computed here; use llm-foundry"),
        "prefix_lm": (attention.get("prefix_lm"), "no prefix_mask is taken; turn it off and pass a 4-D attention_mask"),
        "attn_type": (attention["attn_type"] not in kinds, f"known are {', '.join(kinds)}"),
        "kv_n_heads": (
            attention["attn_type"] == kinds[2] and not _divides(groups, config.get("n_heads", MPTConfig.n_heads)),
            "it must divide n_heads",
        ),
        "sliding_window_size": (attention.get("sliding_window_size", -1) != -1, "no window is computed here"),
        "attn_logit_softcapping": (attention.get("attn_logit_softcapping"), "scores are not capped here"),
        "kv_dim": (attention.get("kv_dim"), "keys of another width are not computed here"),
        "flex_attn_mod_list": (attention.get("flex_attn_mod_list"), "masks and scores are not modified here"),
        "reuse_kv_layer_idx": (attention.get("reuse_kv_layer_idx") is not None, "each layer has its own keys here"),
    }
    wrong |= _numbers(attention)
    found = [f"attn_config[{name!r}]={attention.get(name)!r}: {why}" for name, (bad, why) in wrong.items() if bad]
    return found + misfits(config, "d_model", "n_heads", "") + _other_refusals(config, _FFN | ffn)


def _numbers(attention: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    largest, limit, scale, dropped = (
        attention[name] for name in ("alibi_bias_max", "clip_qkv", "softmax_scale", "attn_pdrop")
    )
    return {
        "alibi_bias_max": (not is_number(largest) or largest <= 0, "a number above 0"),
        "clip_qkv": (limit is not None and (not is_number(limit) or limit < 0), "null or a number of at least 0"),
        "softmax_scale": (scale is not None and not is_number(scale), "null or a number"),
        "attn_pdrop": (not is_number(dropped) or not 0 <= dropped <= 1, "a number from 0 to 1"),
    }


def _other_refusals(config: Mapping[str, Any], ffn: Mapping[str, Any]) -> list[str]:
    norm, scale = str(config.get("norm_type", MPTConfig.norm_type)).lower(), config.get("logit_scale")
    given = ffn.get("ffn_act_fn") or {"name": "gelu"}
    activation = given.get("name") if isinstance(given, Mapping) else given
    scaled = scale in (None, "inv_sqrt_d_model") or is_number(scale)
    known = isinstance(given, Mapping) and activation in _ACTIVATIONS
    wrong = {
        "norm_type": (norm not in _LAYER_NORMS + _RMS_NORMS, f"known are {', '.join(_LAYER_NORMS + _RMS_NORMS)}"),
        "logit_scale": (not scaled, "a number or 'inv_sqrt_d_model'"),
        "block_overrides": (config.get("block_overrides"), "all blocks are alike here"),
        "residual_modification": (config.get("residual_modification"), "residuals are sums here"),
        "final_logit_softcapping": (config.get("final_logit_softcapping"), "logits are not capped here"),
    }
    found = [f"{name}={config.get(name)!r}: {why}" for name, (bad, why) in wrong.items() if bad]
    if ffn["ffn_type"] not in ("mptmlp", "mptglu"):
        found.append(f"ffn_config['ffn_type']={ffn['ffn_type']!r}: known are mptmlp and mptglu")
    if not known:
        names = ", ".join(_ACTIVATIONS)
        found.append(f"ffn_config['ffn_act_fn'] names {activation!r}: known are {{'name': ...}} of {names}")
    return found


def _divides(groups: Any, heads: int) -> bool:
    return isinstance(groups, int) and groups > 0 and heads % groups == 0


def _claims(config: Mapping[str, Any]) -> bool:
    """Ours; or "mpt" with llm-foundry's classes, whose names are in capitals, unlike those of transformers' own."""
    if config.get("model_type") == "mpt_foundry":
        return True
    names = [*(config.get("architectures") or ()), *(config.get("auto_map") or {}).values()]
    return config.get("model_type") == "mpt" and any("MPT" in str(name) for name in names)


PUBLISHED = Published(
    name="MPT (llm-foundry)",
    claims=_claims,
    refusals=_refusals,
    config=MPTConfig,
    classes={"MPTModel": MPTModel, "MPTForCausalLM": MPTForCausalLM},
)
