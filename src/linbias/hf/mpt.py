# SPDX-License-Identifier: Apache-2.0
"""MPT: key bias m * j on raw places, slopes of the authors' code with `alibi_bias_max`, added after the scale.

transformers ignores `alibi_bias_max`, `alibi`, `qk_ln`, `prefix_lm`, `attn_type` and `logit_scale`, and fails beyond
`max_seq_len`. Here the first is honoured, length has no limit, and the others are refused; see docs/models/mpt.md.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.models.mpt import modeling_mpt as original

from ..semantics.slopes import alibi_slopes
from .attention import attend
from .decoder import TESTED_VERSIONS, Decoder, MaskStaysFlat, decode, takes_cache
from .families import Family
from .mlp import in_blocks
from .sight import Sight


class MptModel(Decoder, original.MptModel):
    """`transformers.MptModel` without the n x n mask and the bias of `max_seq_len`."""

    counts_tokens = False

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes, their last exponent `alibi_bias_max`."""
        return alibi_slopes(self.num_heads, max_bias=_max_bias(self.config), device="cpu")

    def own_bias(self, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(H, 1, S) float32, 0 at the last key."""
        keys, maximum = key_mask.shape[1], _max_bias(self.config)
        return self.build_mpt_alibi_tensor(self.num_heads, keys, maximum, device=key_mask.device)

    def layer_stack(self) -> Iterable[nn.Module]:
        """Its layers."""
        return self.blocks

    def last_norm(self, hidden: Tensor) -> Tensor:
        """LayerNorm without bias."""
        return self.norm_f(hidden)

    def block_arguments(self, sight: Sight) -> dict[str, Any]:
        """MPT's blocks require `position_bias`."""
        return {"attention_mask": sight, "position_bias": None}

    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' own; a boolean 4-D `attention_mask` has True = visible, as in the rest of transformers."""
        return decode(
            self,
            input_ids,
            cache,
            attention_mask,
            inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )


class MptAttention(original.MptAttention):
    """`MptAttention` whose bias is never built."""

    uses_alibi = True
    softmax_scale: float

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_bias: None,
        cache: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention and output projection; `attention_mask` is a `Sight`."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = mixed.unflatten(2, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        context, weights = attend(
            query,
            key,
            value,
            attention_mask,
            into=(cache, self.layer_idx),
            scale=self.softmax_scale,
            dropout_p=self.attn_dropout_p if self.training else 0.0,
            own=self._own_formula,
        )
        return self.out_proj(context), weights

    def _own_formula(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """transformers': products rounded to the model's dtype, bias and softmax in float32."""
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.softmax_scale + bias
        scores = scores.masked_fill(~visible, torch.finfo(query.dtype).min)
        weights = F.softmax(scores.float(), dim=-1).to(value.dtype)
        dropped = F.dropout(weights, p=self.attn_dropout_p, training=self.training)
        return torch.matmul(dropped, value), weights


class MptMLP(original.MptMLP):
    """`MptMLP`, a long text in blocks."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        """Both projections, dropout and residual."""
        return in_blocks(self, super().forward, hidden_states, residual)


class MptForCausalLM(MaskStaysFlat, original.MptForCausalLM):
    """`transformers.MptForCausalLM`; `generate` keeps its masks flat."""


def _max_bias(config: Any) -> int:
    return config.attn_config.alibi_bias_max


def _refusals(model: Any) -> list[str]:
    attention, config = model.config.attn_config, model.config
    groups = getattr(attention, "kv_n_heads", None)
    unsupported = {
        "attn_config.alibi": (not attention.alibi, "without ALiBi there is nothing to patch"),
        "attn_config.qk_ln": (attention.qk_ln, "transformers has no layer norm of queries and keys"),
        "attn_config.prefix_lm": (attention.prefix_lm, "transformers has no bidirectional prefix"),
        "attn_config.attn_type": (
            attention.attn_type != "multihead_attention",
            "transformers gives every query head a key head",
        ),
        "attn_config.kv_n_heads": (
            groups is not None and groups != config.n_heads,
            "transformers gives every query head a key head",
        ),
        "attn_config.attn_uses_sequence_id": (
            attention.attn_uses_sequence_id,
            "transformers takes no sequence ids; pass a 4-D attention_mask with this option off",
        ),
        "logit_scale": (config.logit_scale is not None, "transformers does not scale logits"),
        "norm_type": ("rms" in config.norm_type, "transformers always takes a layer norm"),
    }
    return [
        f"{name}={_value(config, name)!r} cannot be honoured: {reason}, so its results were not the checkpoint's either"
        for name, (wrong, reason) in unsupported.items()
        if wrong
    ]


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _not_covered(model: Any) -> list[str]:
    ignored = {"resid_pdrop": 0, "emb_pdrop": 0, "embedding_fraction": 1, "no_bias": True, "expansion_ratio": 4}
    return [
        f"{name}={getattr(model.config, name)!r}: transformers' MPT does not read it"
        for name, neutral in ignored.items()
        if getattr(model.config, name) != neutral
    ]


def _differences(model: Any, fidelity: str) -> list[str]:
    maximum = _max_bias(model.config)
    return [] if maximum == 8 else [f"attn_config.alibi_bias_max={maximum} is honoured; transformers computes with 8"]


FAMILY = Family(
    name="mpt",
    decoder=original.MptModel,
    layers=lambda model: [block.attn for block in model.blocks],
    swaps={
        original.MptModel: MptModel,
        original.MptAttention: MptAttention,
        original.MptForCausalLM: MptForCausalLM,
    },
    exact_swaps={original.MptMLP: MptMLP},
    convention="slopes 'press' with alibi_bias_max, bias added after softmax_scale, positions are places in storage",
    refusals=_refusals,
    not_covered=_not_covered,
    differences=_differences,
    versions=TESTED_VERSIONS,
    sources=(
        original.build_mpt_alibi_tensor,
        original.MptAttention,
        original.MptMLP,
        original.MptBlock,
        original.MptModel,
        DynamicLayer,
    ),
    known_sources={
        "f8d51853e221c5a9": "5.18",
        "c43a8b6dff271000": "5.19",
        "eb56a2ba52bea470": "5.20 and 5.21",
        "e2818a36a4aef612": "5.22 and 5.23",
        "d78e12a802f8a9ba": "5.24",
    },
)
