# SPDX-License-Identifier: Apache-2.0
"""Refact 1.6B: many query heads on one key head, norms without bias, SwiGLU; see docs/models/refact.md.

The norm behind the blocks belongs to the language model, as in the checkpoint: `GPTRefactModel` gives what the last
block gives.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...semantics.slopes import alibi_slopes
from ..mlp import RowBlocks
from .decoder import Block, CausalModel, DecoderModel, SelfAttention, refuse
from .published import Published, misfits

# The MLP is two thirds of n_inner wide, rounded up to a multiple of this.
_MULTIPLE = 256


class GPTRefactConfig(PreTrainedConfig):
    """The published fields."""

    model_type = "gpt_refact"
    keys_to_ignore_at_inference = ("past_key_values", "cache")
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 49216
    n_positions: int = 4096
    """Of training; nothing is limited to it."""
    n_embd: int = 1024
    n_layer: int = 32
    n_head: int = 64
    n_inner: int | None = None
    """None: four times the width."""
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    """-1, as published, is none: there is no such token."""
    eos_token_id: int | list[int] | None = 0
    multi_query: bool = True
    attention_softmax_in_fp32: bool = True
    """Without effect, like the next two: scores, bias and softmax are float32 in any case."""
    scale_attention_softmax_in_fp32: bool = True
    attention_bias_in_fp32: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.bos_token_id = None if self.bos_token_id == -1 else self.bos_token_id
        super().__post_init__(**kwargs)


class _MLP(nn.Module):
    def __init__(self, config: GPTRefactConfig) -> None:
        super().__init__()
        asked = 4 * config.n_embd if config.n_inner is None else config.n_inner
        inner = -(-int(2 * asked / 3) // _MULTIPLE) * _MULTIPLE
        self.gate_up_proj = nn.Linear(config.n_embd, 2 * inner, bias=False)
        self.c_proj = nn.Linear(inner, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * up)


class RefactMLP(RowBlocks, _MLP):  # pyright: ignore[reportIncompatibleMethodOverride]
    """proj(silu(gate(x)) * up(x)), a long text in blocks."""


class RefactAttention(SelfAttention):
    """H query heads, one key and one value."""

    def __init__(self, config: GPTRefactConfig, layer: int) -> None:
        size = config.n_embd // config.n_head
        super().__init__(layer, size**-0.5, config.attn_pdrop)
        self.head_dim = size
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.kv = nn.Linear(config.n_embd, 2 * size, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One key head for all queries."""
        query = self.q(hidden).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        key, value = self.kv(hidden)[:, None].chunk(2, dim=-1)
        return query, key, value

    def project(self, context: Tensor, residual: Any) -> Tensor:
        """The residual is added by the block."""
        return self.c_proj(context)


class GPTRefactBlock(Block):
    """A block under GPT-2's names."""

    def __init__(self, config: GPTRefactConfig, layer: int) -> None:
        first, second = (nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=False) for _ in range(2))
        super().__init__((first, RefactAttention(config, layer), second, RefactMLP(config)), config.resid_pdrop)


class GPTRefactModel(DecoderModel):
    """Embeddings and blocks, without a norm behind them."""

    config_class = GPTRefactConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["GPTRefactBlock"]

    def __init__(self, config: GPTRefactConfig) -> None:
        refuse(PUBLISHED.name, PUBLISHED.refusals(config.to_dict()))
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(GPTRefactBlock(config, layer) for layer in range(config.n_layer))
        self.post_init()

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes."""
        return alibi_slopes(self.config.n_head, device="cpu")

    def embed(self, inputs_embeds: Tensor) -> Tensor:
        """Dropped out."""
        return F.dropout(inputs_embeds, self.config.embd_pdrop, self.training)

    def finish(self, hidden: Tensor) -> Tensor:
        """As it is."""
        return hidden


class GPTRefactForCausalLM(CausalModel):
    """`GPTRefactModel`, a norm, and a head."""

    config_class = GPTRefactConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["GPTRefactBlock"]
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: GPTRefactConfig) -> None:
        super().__init__(config)
        self.transformer = GPTRefactModel(config)
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Of the normalised."""
        return self.lm_head(self.ln_f(hidden))


def _refusals(config: Mapping[str, Any]) -> list[str]:
    found = misfits(config, "n_embd", "n_head", "")
    if not config.get("multi_query", True):
        found.append("multi_query=False: these models have one key head, so there is no checkpoint it could be of")
    if not config.get("scale_attn_weights", True):
        found.append("scale_attn_weights=False: these models always divide scores by sqrt(D); leave it out")
    return found


PUBLISHED = Published(
    name="Refact",
    claims=lambda config: config.get("model_type") == "gpt_refact",
    refusals=_refusals,
    config=GPTRefactConfig,
    classes={"GPTRefactModel": GPTRefactModel, "GPTRefactForCausalLM": GPTRefactForCausalLM},
)
