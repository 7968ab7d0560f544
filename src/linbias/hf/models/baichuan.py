# SPDX-License-Identifier: Apache-2.0
"""Baichuan-13B and Baichuan2-13B: slopes of the authors' code, added after 1 / sqrt(D), RMS norms, a gated MLP.

Baichuan2's head multiplies with rows of length 1 (`NormHead`). The 7B models of both are rotary, and refused; see
docs/models/baichuan.md.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ...semantics.slopes import alibi_slopes
from ..mlp import RowBlocks
from .decoder import Block, CausalModel, DecoderModel, SelfAttention, refuse, split_heads
from .published import Published, misfits

# What vLLM tells them apart by: both are of 13B and say "baichuan".
_VOCABULARY_2 = 125696
_WIDTH_OF_7B = 4096


class BaichuanConfig(PreTrainedConfig):
    """The published fields, and `norm_head`."""

    model_type = "baichuan"
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    vocab_size: int = 64000
    hidden_size: int = 5120
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_attention_heads: int = 40
    hidden_act: str = "silu"
    model_max_length: int = 4096
    """Of training; nothing is limited to it."""
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    z_loss_weight: float = 0.0
    """Of the squared largest logit of each token, in the loss (Baichuan2)."""
    norm_head: bool | None = None
    """Whether the head's rows are of length 1. None, as published: in a vocabulary of 125,696, which is Baichuan2's."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.norm_head is None:
            self.norm_head = self.vocab_size == _VOCABULARY_2
        super().__post_init__(**kwargs)


class BaichuanRMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), the quotient in float32 and rounded before the product."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width)."""
        wide = x if x.dtype == torch.float64 else x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * unit.to(self.weight.dtype)


class _MLP(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class BaichuanMLP(RowBlocks, _MLP):  # pyright: ignore[reportIncompatibleMethodOverride]
    """down(act(gate(x)) * up(x)), a long text in blocks."""


class BaichuanAttention(SelfAttention):
    """Queries, keys and values of all heads in one projection, `W_pack`."""

    def __init__(self, config: BaichuanConfig, layer: int) -> None:
        width, self_heads = config.hidden_size, config.num_attention_heads
        super().__init__(layer, (width // self_heads) ** -0.5)
        self.num_heads = self_heads
        self.W_pack = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All queries, then all keys, then all values."""
        return split_heads(self.W_pack(hidden), self.num_heads, self.num_heads)

    def project(self, context: Tensor, residual: Any) -> Tensor:
        """The residual is added by the block."""
        return self.o_proj(context)


class BaichuanLayer(Block):
    """A block under its published names."""

    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

    def __init__(self, config: BaichuanConfig, layer: int) -> None:
        first, second = (BaichuanRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        super().__init__((first, BaichuanAttention(config, layer), second, BaichuanMLP(config)))


class BaichuanModel(DecoderModel):
    """The layers and the norm behind them."""

    config_class = BaichuanConfig
    base_model_prefix = "model"
    blocks_name, norm_name = "layers", "norm"
    _input_embed_layer = "embed_tokens"
    _no_split_modules = ["BaichuanLayer"]

    def __init__(self, config: BaichuanConfig) -> None:
        refuse(PUBLISHED.name, PUBLISHED.refusals(config.to_dict()))
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(BaichuanLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = BaichuanRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes."""
        return alibi_slopes(self.config.num_attention_heads, device="cpu")


class NormHead(nn.Linear):
    """x @ (w / |w|), w each row of the weight, which stays as it was loaded.

    The published module writes the quotient into its weight in eval mode, so that saving it then loses the lengths;
    here they are found anew each time, at the price of reading the weight once more.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., vocabulary)."""
        wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        lengths = torch.linalg.vector_norm(self.weight, dim=1, dtype=wide).clamp_min(1e-12)
        return (F.linear(input, self.weight) / lengths).to(input.dtype)


class BaichuanForCausalLM(CausalModel):
    """`BaichuanModel` with a head of its own."""

    config_class = BaichuanConfig
    base_model_prefix = "model"
    _no_split_modules = ["BaichuanLayer"]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = BaichuanModel(config)
        head = NormHead if config.norm_head else nn.Linear
        self.lm_head = head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head; it goes on multiplying with rows of length 1 where it did."""
        head, weight = new_embeddings, new_embeddings.weight
        if self.config.norm_head and not isinstance(head, NormHead):
            # A resized head is a linear layer to transformers, whatever it was.
            head = NormHead(weight.shape[1], weight.shape[0], bias=False, device="meta")
            head.weight = weight
        self.lm_head = head

    def loss_of(self, logits: Tensor, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Cross-entropy, and `z_loss_weight` times the mean square of each token's largest logit."""
        loss, weight = super().loss_of(logits, labels, options), self.config.z_loss_weight
        return loss + weight * logits[..., :-1, :].float().amax(-1).square().mean() if weight else loss


def _claims(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "baichuan"


def _refusals(config: Mapping[str, Any]) -> list[str]:
    named = "BaiChuanForCausalLM" in (config.get("architectures") or ())
    if not named and config.get("hidden_size") != _WIDTH_OF_7B:
        return misfits(config, "hidden_size", "num_attention_heads", "hidden_act")
    what = "architectures=['BaiChuanForCausalLM']" if named else f"hidden_size={_WIDTH_OF_7B}"
    return [
        f"{what} is a Baichuan of 7B, whose positions are rotary and not ALiBi: there is nothing of linbias in it. Run "
        f"it with its authors' code or with vLLM"
    ]


PUBLISHED = Published(
    name="Baichuan-13B",
    claims=_claims,
    refusals=_refusals,
    config=BaichuanConfig,
    classes={"BaichuanModel": BaichuanModel, "BaichuanForCausalLM": BaichuanForCausalLM},
)
