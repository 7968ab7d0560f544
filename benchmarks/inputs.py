# SPDX-License-Identifier: Apache-2.0
"""What is attended besides noise: noise with an attention sink, half types, the layers of a trained model."""

from dataclasses import replace

import torch
from torch import Tensor

from linbias import alibi_slopes
from linbias.lab.bench.race import Content, normal
from linbias.lab.config import ModelConfig, TrainConfig
from linbias.lab.data import load_corpus
from linbias.lab.positions import Positions
from linbias.lab.train import Run, Trainer

SINK = 30.0
"""How many times longer than its neighbours the first key is."""


def with_sink(length: int) -> Content:
    """Standard normal, but for a long first key."""
    content = normal(length)
    key = content.key.clone()
    key[:, :, :1] *= SINK
    return replace(content, name="with a sink", key=key)


def rounded(content: Content, dtype: torch.dtype) -> Content:
    """The same, in another dtype; slopes never are."""
    query, key, value = (part.to(dtype) for part in content.qkv)
    return replace(content, query=query, key=key, value=value)


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
    """The inputs of each layer's attention, on text not seen in training, after `steps` updates with ALiBi."""
    corpus = load_corpus()
    run = Run(scheme="alibi", model=model, train=TrainConfig(steps=steps), corpus=corpus, device="cpu")
    trainer = Trainer(run)
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
