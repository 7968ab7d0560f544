# SPDX-License-Identifier: Apache-2.0
"""A model small enough to train in a fraction of a second, and a monitor that stops when told."""

from linbias.lab.config import ModelConfig, TrainConfig

MODEL = ModelConfig(layers=2, width=24, heads=3)
TRAIN = TrainConfig(length=8, steps=7, passages=3, learning_rate=1e-2, warmup=2)


class StopAfter:
    """A monitor that asks to stop at its n-th question, and keeps what it was told."""

    def __init__(self, questions: int) -> None:
        self.questions = questions
        self.resumed: list[float] = []
        self.fractions: list[float] = []

    def resume(self, fraction: float) -> None:
        self.resumed.append(fraction)

    def advance(self, fraction: float, note: str) -> None:
        self.fractions.append(fraction)

    def should_stop(self) -> bool:
        self.questions -= 1
        return self.questions < 0
