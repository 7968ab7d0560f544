# SPDX-License-Identifier: Apache-2.0
"""BLOOM: key bias m * (cumsum(mask) - 1), slopes of the authors' code, added after 1 / sqrt(D).

Exact: -m * distance in float32. transformers rounds the key bias to the model's dtype, so that in bfloat16 keys far
from the start of a text tie; see docs/models/bloom.md.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.models.bloom import modeling_bloom as original

from ..semantics.slopes import alibi_slopes
from .attention import attend
from .decoder import TESTED_VERSIONS, Decoder, decode, takes_cache
from .families import Family
from .mlp import in_blocks
from .sight import Sight


class BloomModel(Decoder, original.BloomModel):
    """`transformers.BloomModel` without the n x n mask."""

    counts_tokens = True

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes."""
        return alibi_slopes(self.num_heads, device="cpu")

    def own_bias(self, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(B * H, 1, S) in the model's dtype."""
        return self.build_alibi_tensor(key_mask, self.num_heads, dtype)

    def embed(self, inputs_embeds: Tensor) -> Tensor:
        """BLOOM normalises its embeddings."""
        return self.word_embeddings_layernorm(inputs_embeds)

    def layer_stack(self) -> Iterable[nn.Module]:
        """Its layers."""
        return self.h

    def last_norm(self, hidden: Tensor) -> Tensor:
        """LayerNorm."""
        return self.ln_f(hidden)

    def block_arguments(self, sight: Sight) -> dict[str, Any]:
        """BLOOM's blocks require `alibi`."""
        return {"attention_mask": sight, "alibi": None}

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
        """As transformers' own; `attention_mask` may also be 4-D, True = visible."""
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


class BloomAttention(original.BloomAttention):
    """`BloomAttention` whose bias is never built."""

    uses_alibi = True

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Any,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention, output projection, dropout and residual; `attention_mask` is a `Sight`."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
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
        output = original.dropout_add(self._project(context), residual, self.hidden_dropout, self.training)
        return output, weights

    def _project(self, context: Tensor) -> Tensor:
        if self.pretraining_tp <= 1 or not self.slow_but_exact:
            return self.dense(context)
        # As the original: one slice per rank of the training run, summed in order, and without the bias.
        width = self.hidden_size / self.pretraining_tp
        output = torch.zeros_like(context)
        for rank in range(self.pretraining_tp):
            part = slice(int(rank * width), int((rank + 1) * width))
            output = output + F.linear(context[:, :, part], self.dense.weight[:, part])
        return output

    def _own_formula(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """transformers': scores and probabilities rounded to the model's dtype, softmax in float32."""
        flat_key, flat_value = key.flatten(0, 1), value.flatten(0, 1)
        scores = bias.baddbmm(
            query.flatten(0, 1), flat_key.transpose(1, 2), beta=self.beta, alpha=self.inv_norm_factor
        ).unflatten(0, query.shape[:2])
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        dropped = self.attention_dropout(weights)
        return torch.bmm(dropped.flatten(0, 1), flat_value).unflatten(0, query.shape[:2]), weights


class BloomGelu(original.BloomGelu):
    """BLOOM's GELU in one pass over memory instead of five: the same formula, rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """x * 0.5 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x)))."""
        return F.gelu(x, approximate="tanh")


class BloomMLP(original.BloomMLP):
    """`BloomMLP`, a long text in blocks."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        """Both projections, dropout and residual."""
        return in_blocks(self, super().forward, hidden_states, residual, activation="gelu_impl")


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
    versions=TESTED_VERSIONS,
    sources=(
        original.build_alibi_tensor,
        original.dropout_add,
        original.bloom_gelu_forward,
        original.GeLUFunction,
        original.BloomGelu,
        original.BloomAttention,
        original.BloomMLP,
        original.BloomBlock,
        original.BloomModel,
        DynamicLayer,
    ),
    known_sources={
        "4a448bdb8bf65fba": "5.18",
        "f355072c713d940f": "5.19",
        "f1f0e16e50d727e9": "5.20",
        "988838346ae9fc02": "5.21",
        "5d1a0dc4225010f4": "5.22 and 5.23",
        "c1ada69c2e241a78": "5.24",
    },
)
