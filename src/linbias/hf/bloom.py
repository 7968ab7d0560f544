# SPDX-License-Identifier: Apache-2.0
"""BLOOM: key bias m * (cumsum(mask) - 1), slopes of the authors' code, added after 1 / sqrt(D).

Exact: -m * distance in float32. transformers rounds the key bias to the model's dtype, so that in bfloat16 keys far
from the start of a text tie; see docs/models/bloom.md.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BloomConfig
from transformers.models.bloom import modeling_bloom as original

from ..semantics.slopes import alibi_slopes
from .decoder import Attention, Decoder, before_head, forward_of
from .families import Family
from .mlp import RowBlocks
from .parity import tiny_decoder


class BloomModel(Decoder, original.BloomModel):
    """`transformers.BloomModel` without the n x n mask."""

    forward = forward_of(original.BloomModel)

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes."""
        return alibi_slopes(self.num_heads, device="cpu")

    def eager_bias(self, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(B * H, 1, S) in the model's dtype."""
        return self.build_alibi_tensor(key_mask, self.num_heads, dtype)

    def embed(self, inputs_embeds: Tensor) -> Tensor:
        """BLOOM normalises its embeddings."""
        return self.word_embeddings_layernorm(inputs_embeds)


class BloomAttention(Attention, original.BloomAttention):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`BloomAttention` whose bias is never built."""

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of each head lie side by side."""
        return self._reshape(self.query_key_value(hidden))

    def project(self, context: Tensor, residual: Any) -> Tensor:
        """Output projection, dropout and residual."""
        if self.pretraining_tp <= 1 or not self.slow_but_exact:
            output = self.dense(context)
        else:
            # As the original: one slice per rank of the training run, summed in order, and without the bias.
            width = self.hidden_size / self.pretraining_tp
            output = torch.zeros_like(context)
            for rank in range(self.pretraining_tp):
                part = slice(int(rank * width), int((rank + 1) * width))
                output = output + F.linear(context[:, :, part], self.dense.weight[:, part])
        return original.dropout_add(output, residual, self.hidden_dropout, self.training)

    def eager_formula(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Scores and probabilities rounded to the model's dtype, softmax in float32."""
        # Mixed precision may have given the layer another dtype than the embeddings'.
        scores = bias.to(query.dtype).baddbmm(
            query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), beta=self.beta, alpha=self.inv_norm_factor
        )
        scores = scores.unflatten(0, query.shape[:2])
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        dropped = self.attention_dropout(weights)
        return torch.bmm(dropped.flatten(0, 1), value.flatten(0, 1)).unflatten(0, query.shape[:2]), weights


class BloomGelu(original.BloomGelu):
    """BLOOM's GELU in one pass over memory instead of five: the same formula, rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """x * 0.5 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x)))."""
        return F.gelu(x, approximate="tanh")


class BloomMLP(RowBlocks, original.BloomMLP):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`BloomMLP`, a long text in blocks."""


def _differences(model: Any, fidelity: str) -> list[str]:
    dtype = model.word_embeddings.weight.dtype
    if fidelity == "checkpoint" or dtype not in (torch.float16, torch.bfloat16):
        return []
    return [f"transformers rounds bias, scores and probabilities to {dtype}, so that far keys tie"]


FAMILY = Family(
    name="bloom",
    decoder=original.BloomModel,
    layers=lambda model: [block.self_attention for block in model.h],
    swaps={original.BloomModel: BloomModel, original.BloomAttention: BloomAttention},
    exact_swaps={original.BloomGelu: BloomGelu, original.BloomMLP: BloomMLP},
    convention="slopes 'press', bias added after 1/sqrt(D), positions count what attention_mask calls real",
    differences=_differences,
    before_head=before_head,
    example=lambda: tiny_decoder(original.BloomModel, BloomConfig(hidden_size=16, n_layer=2, n_head=2)),
)
