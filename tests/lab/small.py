# SPDX-License-Identifier: Apache-2.0
"""A model small enough to train in a fraction of a second, and a Tell that stops when told."""

from linbias.lab.config import ModelConfig, TrainConfig
from linbias.lab.progress import Interrupted

MODEL = ModelConfig(layers=2, width=24, heads=3)
TRAIN = TrainConfig(length=8, steps=7, passages=3, learning_rate=1e-2, warmup=2)


class StopAfter:
    """A Tell that asks to stop after so many steps of the work, and keeps what it was told."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.fractions: list[float] = []

    def __call__(self, fraction: float, note: str) -> None:
        self.fractions.append(fraction)
        if len(self.fractions) > self.steps:
            raise Interrupted("told to")
