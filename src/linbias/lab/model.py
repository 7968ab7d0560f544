# SPDX-License-Identifier: Apache-2.0
"""A small decoder over bytes in the shape of MPT, its positional scheme pluggable.

Pre-norm, LayerNorm and linear layers without bias, exact GELU, feed-forward of 4 widths, output tied to the embedding.
Parameters carry the names of a transformers MPT checkpoint. B batch, T tokens, C width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import VOCABULARY, ModelConfig
from .positions import SCHEMES, Positions


class Attention(nn.Module):
    """Causal self-attention; what a position means is the scheme's business."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden_BTC: Tensor, positions: Positions) -> Tensor:
        """Return the attended hidden states (B, T, C)."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.Wqkv(hidden_BTC).chunk(3, dim=-1)
        )
        return self.out_proj(positions.attend(query, key, value).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with an exact GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """Return the transformed hidden states (B, T, C)."""
        return self.down_proj(F.gelu(self.up_proj(hidden_BTC)))


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width, bias=False)
        self.attn = Attention(config.width, config.heads)
        self.norm_2 = nn.LayerNorm(config.width, bias=False)
        self.ffn = FeedForward(config.width)

    def forward(self, hidden_BTC: Tensor, positions: Positions) -> Tensor:
        """Return the residual stream (B, T, C) after this layer."""
        hidden_BTC = hidden_BTC + self.attn(self.norm_1(hidden_BTC), positions)
        return hidden_BTC + self.ffn(self.norm_2(hidden_BTC))


class Transformer(nn.Module):
    """Embedding, blocks and final norm: the `transformer.` part of an MPT checkpoint."""

    def __init__(self, config: ModelConfig, positions: Positions) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, config.width)
        self.positions = positions
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm_f = nn.LayerNorm(config.width, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the final hidden states (B, T, C)."""
        hidden_BTC = self.positions.embed(self.wte(tokens_BT))
        for block in self.blocks:
            hidden_BTC = block(hidden_BTC, self.positions)
        return self.norm_f(hidden_BTC)


class ByteDecoder(nn.Module):
    """A language model over bytes."""

    def __init__(self, config: ModelConfig, scheme: str, length: int) -> None:
        """Build the model for `scheme`, to be trained (or as it was trained) at `length` tokens."""
        super().__init__()
        self.config = config
        self.transformer = Transformer(config, SCHEMES[scheme].build(config, length))

    def initialise(self) -> None:
        """Draw all matrices from a normal distribution of variance 1 / width."""
        std = self.config.width**-0.5
        matrices = [(name, parameter) for name, parameter in self.named_parameters() if parameter.ndim > 1]
        # The scheme's own come last, so that with one seed all schemes agree in the rest.
        for name, parameter in sorted(matrices, key=lambda item: ".positions." in item[0]):
            # Two additions a layer: the residual stream keeps its size whatever the depth (GPT-2's rule).
            residual = name.endswith(("out_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=std / (2 * self.config.layers) ** 0.5 if residual else std)
        self.transformer.positions.reset_parameters()

    @property
    def longest(self) -> int | None:
        """Longest input the positional scheme can take, None if unlimited."""
        return self.transformer.positions.longest

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits (B, T, V): entry t scores the byte after token t."""
        return F.linear(self.transformer(tokens_BT), self.transformer.wte.weight)

    def nats(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the negative log-likelihood in nats (B, T): target t after tokens 0 .. t."""
        logits = self(tokens_BT).flatten(0, 1)
        return F.cross_entropy(logits, targets_BT.flatten(), reduction="none").view_as(targets_BT)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained numbers in `model`, each counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def build_decoder(config: ModelConfig, scheme: str, length: int, seed: int) -> ByteDecoder:
    """Return a decoder initialised from `seed`; schemes that share a seed share every weight they have in common."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = ByteDecoder(config, scheme, length)
        decoder.initialise()
        return decoder


def cost_per_token(config: ModelConfig, length: int) -> float:
    """Return about how many multiplications a token costs, forward, in causal windows of `length`."""
    return config.layers * (12 * config.width**2 + config.width * length)
