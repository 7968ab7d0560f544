# SPDX-License-Identifier: Apache-2.0
"""What is attended: normal noise, noise with an attention sink, and the layers of a trained model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...semantics.slopes import alibi_slopes
from ..config import ModelConfig, TrainConfig
from ..data import load_corpus
from ..positions import Positions
from ..train import Run, Trainer

HEADS, DIM = 12, 64
SINK = 30.0
"""How many times longer than its neighbours the first key is."""


@dataclass(frozen=True)
class Content:
    """Inputs of one causal attention: query, key and value (1, H, N, D), slopes (H,)."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor

    @property
    def heads(self) -> int:
        """H."""
        return self.query.shape[1]

    @property
    def length(self) -> int:
        """N."""
        return self.query.shape[2]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


def normal(length: int, *, dim: int = DIM, dtype: torch.dtype = torch.float32, sink: float = 1.0) -> Content:
    """Return standard normal inputs, the same for the same arguments; the first key is `sink` times as long."""
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(1, HEADS, length, dim, generator=generator).to(dtype) for _ in range(3))
    key[:, :, :1] *= sink
    return Content("normal" if sink == 1.0 else "with a sink", query, key, value, alibi_slopes(HEADS))


class _Recording(Positions):
    """Attends as `inner` does, and keeps what it was given."""

    def __init__(self, inner: Positions) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        self.seen.append((query_BHTD, key_BHTD, value_BHTD))
        return self.inner.attend(query_BHTD, key_BHTD, value_BHTD)


def trained(model: ModelConfig, steps: int, length: int) -> list[Content]:
    """Return the inputs of each layer's attention, on text not seen in training, after `steps` updates with ALiBi."""
    corpus = load_corpus()
    trainer = Trainer(
        Run(scheme="alibi", model=model, train=TrainConfig(steps=steps), corpus=corpus, device="cpu"),
    )
    for _ in range(steps):
        trainer.update()
    decoder = trainer.decoder
    decoder.transformer.positions = recording = _Recording(decoder.transformer.positions)
    with torch.no_grad():
        decoder(corpus.test.tensor()[None, :length].long())
    slopes = alibi_slopes(model.heads)
    return [
        Content(f"trained, layer {layer}", query.contiguous(), key.contiguous(), value.contiguous(), slopes)
        for layer, (query, key, value) in enumerate(recording.seen)
    ]
