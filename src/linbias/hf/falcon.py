# SPDX-License-Identifier: Apache-2.0
"""Falcon with alibi (the RW models): key bias m * (cumsum(mask) - 1) / sqrt(D), slopes rounded to bfloat16.

Exact: those rounded slopes and exact arithmetic. transformers also rounds their product with the position to bfloat16,
even in float32 models, and its eager path adds the bias twice; see docs/models/falcon.md.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.models.falcon import modeling_falcon as original

from ..semantics.slopes import alibi_slopes
from .attention import attend
from .decoder import TESTED_VERSIONS, Decoder, MaskStaysFlat, decode, takes_cache
from .families import Family
from .mlp import in_blocks
from .sight import Sight


class FalconModel(Decoder, original.FalconModel):
    """`transformers.FalconModel` with alibi, without the n x n mask that carries the bias."""

    counts_tokens = True

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes in bfloat16, over sqrt(D): Falcon scales product and bias together."""
        rounded = alibi_slopes(self.num_heads, device="cpu").bfloat16().double()
        return rounded / math.sqrt(self.config.hidden_size // self.num_heads)

    def own_bias(self, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, H, 1, S) in the model's dtype, scaled."""
        bias = original.build_alibi_tensor(key_mask, self.num_heads, dtype).unflatten(0, (-1, self.num_heads))
        return bias / math.sqrt(self.config.hidden_size // self.num_heads)

    def layer_stack(self) -> Iterable[nn.Module]:
        """Its layers."""
        return self.h

    def last_norm(self, hidden: Tensor) -> Tensor:
        """LayerNorm."""
        return self.ln_f(hidden)

    def block_arguments(self, sight: Sight) -> dict[str, Any]:
        """Falcon's blocks require `alibi`; the rotary embeddings they also offer are not used with it."""
        return {"attention_mask": sight, "alibi": None}

    @takes_cache
    def forward(  # noqa: PLR0913, PLR0917  (the signature is transformers')
        self,
        input_ids: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' own; `attention_mask` may also be 4-D.

        `position_ids` only tell packed sequences apart, where there is neither mask nor cache; positions are counted
        in the mask.
        """
        return decode(
            self,
            input_ids,
            cache,
            attention_mask,
            inputs_embeds,
            position_ids=position_ids,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )


class _Attention:
    """The forward of both patched attention classes."""

    uses_alibi = True

    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Any,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention and output projection; `attention_mask` is a `Sight`."""
        query, key, value = self._heads(self.query_key_value(hidden_states))
        context, weights = attend(
            query,
            key,
            value,
            attention_mask,
            into=(layer_past, self.layer_idx),
            scale=self.inv_norm_factor,
            dropout_p=self.attention_dropout.p if self.training else 0.0,
            own=self._own_formula,
        )
        return self.dense(context), weights

    def _heads(self: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, H, T, D), key and value (B, G, T, D): the three layouts of the projection."""
        if self.new_decoder_architecture:
            groups = fused.unflatten(2, (self.num_kv_heads, -1, self.head_dim)).transpose(1, 2)
            query, key, value = groups[:, :, :, :-2], groups[:, :, :, -2], groups[:, :, :, -1]
            return query.transpose(2, 3).flatten(1, 2), key, value
        if self.multi_query:
            heads = fused.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
        heads = fused.unflatten(2, (self.num_heads, 3, self.head_dim)).transpose(1, 2)
        return heads[:, :, :, 0], heads[:, :, :, 1], heads[:, :, :, 2]

    def _own_formula(
        self: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """transformers' sdpa path: the bias rides on a mask in the model's dtype."""
        mask = torch.where(visible, bias, torch.finfo(query.dtype).min)
        # One shared key head stays one, as in the original; SDPA broadcasts it.
        if self.new_decoder_architecture:
            shared = self.num_heads // key.shape[1]
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        dropout_p = self.attention_dropout.p if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
        if not with_weights:
            return out, None
        return out, F.softmax(query @ key.transpose(-1, -2) * self.inv_norm_factor + mask, -1)


class FalconAttention(_Attention, original.FalconAttention):
    """`FalconAttention` whose bias is never built."""


class FalconFlashAttention2(_Attention, original.FalconFlashAttention2):
    """`FalconFlashAttention2`, which refuses alibi, without that refusal; no flash-attn is called."""


class FalconMLP(original.FalconMLP):
    """`FalconMLP`, a long text in blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """Both projections."""
        return in_blocks(self, super().forward, x, linear=original.FalconLinear)


class FalconForCausalLM(MaskStaysFlat, original.FalconForCausalLM):
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
    versions=TESTED_VERSIONS,
    sources=(
        original.build_alibi_tensor,
        original.FalconAttention,
        original.FalconFlashAttention2,
        original.FalconMLP,
        original.FalconDecoderLayer,
        original.FalconModel,
        DynamicLayer,
    ),
    known_sources={
        "ab592d4d362d7ae2": "5.18",
        "b31bf45f59430378": "5.19",
        "1592b79543d703e6": "5.20 and 5.21",
        "bd8a39cd5f41c3d3": "5.22",
        "0d58207182f69fcb": "5.23",
        "22a91f08204666e0": "5.24",
    },
)
