# SPDX-License-Identifier: Apache-2.0
"""Falcon with alibi (the RW models): key bias m * (cumsum(mask) - 1) / sqrt(D), slopes rounded to bfloat16.

Exact: those rounded slopes and exact arithmetic. transformers also rounds their product with the position to bfloat16,
even in float32 models, and its eager path adds the bias twice; see docs/models/falcon.md.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import FalconConfig
from transformers.models.falcon import modeling_falcon as original

from ..semantics.slopes import alibi_slopes
from .decoder import Attention, Decoder, FlatMasks, before_head, forward_of
from .families import Family
from .mlp import RowBlocks
from .parity import tiny_decoder


class FalconModel(Decoder, original.FalconModel):
    """`transformers.FalconModel` with alibi, without the n x n mask that carries the bias."""

    forward = forward_of(original.FalconModel)

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes in bfloat16, over sqrt(D): Falcon scales product and bias together."""
        rounded = alibi_slopes(self.num_heads, device="cpu").bfloat16().double()
        return rounded / math.sqrt(self.config.hidden_size // self.num_heads)

    def eager_bias(self, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, H, 1, S) in the model's dtype, scaled."""
        bias = original.build_alibi_tensor(key_mask, self.num_heads, dtype).unflatten(0, (-1, self.num_heads))
        return bias / math.sqrt(self.config.hidden_size // self.num_heads)


class _Attention(Attention):
    """What both patched attention classes share."""

    def project(self: Any, context: Tensor, residual: Any) -> Tensor:
        """The residual is added by the block."""
        return self.dense(context)

    def heads(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key and value once a group, in the three layouts of the projection."""
        fused = self.query_key_value(hidden)
        if self.new_decoder_architecture:
            groups = fused.unflatten(2, (self.num_kv_heads, -1, self.head_dim)).transpose(1, 2)
            query, key, value = groups[:, :, :, :-2], groups[:, :, :, -2], groups[:, :, :, -1]
            return query.transpose(2, 3).flatten(1, 2), key, value
        if self.multi_query:
            heads = fused.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
        heads = fused.unflatten(2, (self.num_heads, 3, self.head_dim)).transpose(1, 2)
        return heads[:, :, :, 0], heads[:, :, :, 1], heads[:, :, :, 2]

    def eager_formula(
        self: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The sdpa path: the bias rides on a mask in the model's dtype."""
        # Mixed precision may have given the layer another dtype than the embeddings'.
        mask = torch.where(visible, bias.to(query.dtype), torch.finfo(query.dtype).min)
        # One shared key head stays one, as in the original; SDPA broadcasts it.
        if self.new_decoder_architecture:
            shared = self.num_heads // key.shape[1]
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        dropout_p = self.attention_dropout.p if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
        if not with_weights:
            return out, None
        return out, F.softmax(query @ key.transpose(-1, -2) * self.inv_norm_factor + mask, -1)


class FalconAttention(_Attention, original.FalconAttention):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`FalconAttention` whose bias is never built."""


class FalconFlashAttention2(_Attention, original.FalconFlashAttention2):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`FalconFlashAttention2`, which refuses alibi, without that refusal; no flash-attn is called."""


class FalconMLP(RowBlocks, original.FalconMLP):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`FalconMLP`, a long text in blocks."""


class FalconForCausalLM(FlatMasks, original.FalconForCausalLM):
    """`transformers.FalconForCausalLM`; `generate` keeps its masks flat."""

    def _get_static_cache_init_shape(self: Any) -> Any:
        """As transformers, for prompts in pieces on a static cache; but keys enter it once a group, not once a head."""
        parent: Any = original.FalconForCausalLM
        shape = parent._get_static_cache_init_shape(self)
        return shape and (self.transformer.h[0].self_attention.num_kv_heads, shape[1])


def _refusals(model: Any) -> list[str]:
    if model.config.alibi:
        return []
    return ["alibi=False: this Falcon has rotary embeddings and no linear bias, so there is nothing to patch"]


def _differences(model: Any, fidelity: str) -> list[str]:
    eager = "the eager path of transformers, also taken under output_attentions, adds the bias twice"
    if fidelity == "checkpoint":
        return [eager]
    return ["transformers rounds slope * position to bfloat16, in every dtype, which shows beyond 256 tokens", eager]


FAMILY = Family(
    name="falcon",
    decoder=original.FalconModel,
    layers=lambda model: [block.self_attention for block in model.h],
    swaps={
        original.FalconModel: FalconModel,
        original.FalconAttention: FalconAttention,
        original.FalconFlashAttention2: FalconFlashAttention2,
        original.FalconForCausalLM: FalconForCausalLM,
    },
    exact_swaps={original.FalconMLP: FalconMLP},
    convention="slopes 'press' rounded to bfloat16, bias scaled by 1/sqrt(D) with the product, positions count what "
    "attention_mask calls real",
    refusals=_refusals,
    differences=_differences,
    before_head=before_head,
    example=lambda: tiny_decoder(
        original.FalconModel, FalconConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True)
    ),
)
