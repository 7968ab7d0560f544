# SPDX-License-Identifier: Apache-2.0
"""MPT: key bias m * j on raw places, slopes of the authors' code with `alibi_bias_max`, added after the scale.

transformers ignores `alibi_bias_max`, `alibi`, `qk_ln`, `prefix_lm`, `attn_type` and `logit_scale`, and fails beyond
`max_seq_len`. Here the first is honoured, length has no limit, and the others are refused; see docs/models/mpt.md.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MptConfig
from transformers.models.mpt import modeling_mpt as original

from ..semantics.slopes import alibi_slopes
from .decoder import Attention, Decoder, FlatMasks, before_head, forward_of
from .families import Family
from .mlp import RowBlocks
from .parity import tiny_decoder


class MptModel(Decoder, original.MptModel):
    """`transformers.MptModel` without the n x n mask and the bias of `max_seq_len`."""

    counts_tokens = False
    blocks_name, norm_name, bias_argument = "blocks", "norm_f", "position_bias"
    forward = forward_of(original.MptModel)

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes, their last exponent `alibi_bias_max`."""
        return alibi_slopes(self.num_heads, max_bias=_max_bias(self.config), device="cpu")

    def eager_bias(self, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(H, 1, S) float32, 0 at the last key."""
        keys, maximum = key_mask.shape[1], _max_bias(self.config)
        return self.build_mpt_alibi_tensor(self.num_heads, keys, maximum, device=key_mask.device)


class MptAttention(Attention, original.MptAttention):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`MptAttention` whose bias is never built."""

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All queries, then all keys, then all values."""
        mixed = self.Wqkv(hidden)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = mixed.unflatten(2, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def project(self, context: Tensor, residual: Any) -> Tensor:
        """The residual is added by the block."""
        return self.out_proj(context)

    @property
    def score_scale(self: Any) -> float:
        """The configuration's `softmax_scale`."""
        return self.softmax_scale

    @property
    def dropout_p(self: Any) -> float:
        """A number here."""
        return self.attn_dropout_p

    def eager_formula(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Products rounded to the model's dtype, bias and softmax in float32."""
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.score_scale + bias
        scores = scores.masked_fill(~visible, torch.finfo(query.dtype).min)
        weights = F.softmax(scores.float(), dim=-1).to(value.dtype)
        dropped = F.dropout(weights, p=self.attn_dropout_p, training=self.training)
        return torch.matmul(dropped, value), weights


class MptMLP(RowBlocks, original.MptMLP):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`MptMLP`, a long text in blocks."""


class MptForCausalLM(FlatMasks, original.MptForCausalLM):
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
    before_head=before_head,
    example=lambda: tiny_decoder(original.MptModel, MptConfig(d_model=16, n_layers=2, n_heads=2)),
)
