# SPDX-License-Identifier: Apache-2.0
"""Texts in which a key and its value are hidden, and which end with the question for it.

<ab=1234> somewhere, and at the end <ab=1234, of which a model reads all but the last digit and is to guess the four.
P texts, N bytes each.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..model import ByteDecoder
from ..storage import digest_of_facts
from ..train import Run, passages
from .config import ANSWER, NEEDLE

_LETTERS, _DIGITS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8), np.frombuffer(b"0123456789", np.uint8)
_ASKED = NEEDLE - 1
"""The question with its answer: a needle without its last letter."""


def plant(texts_PN: Tensor, random: np.random.Generator, pairs: int, depth: float | None = None) -> Tensor:
    """Return the texts, int64, with `pairs` needles in each and the question for one of them at its end.

    Needles do not overlap, and the keys of a text are all different. The one asked for begins at `depth` of the way
    from the start (0, farthest from the question) to the last place it can have (1); anywhere if None.
    """
    planted = texts_PN.clone()
    room = texts_PN.shape[1] - _ASKED - NEEDLE
    for row in planted:
        place = int(random.integers(room + 1)) if depth is None else round(depth * room)
        # All needles stand on the grid that the asked one's place gives, so that none lies over another.
        free = np.setdiff1d(np.arange(place % NEEDLE, room + 1, NEEDLE), [place])
        places = [place, *random.choice(free, pairs - 1, replace=False).tolist()]
        for index, (start, key) in enumerate(zip(places, _keys(random, pairs), strict=True)):
            needle = torch.tensor([*b"<", *key, *b"=", *random.choice(_DIGITS, ANSWER), *b">"])
            row[start : start + NEEDLE] = needle
            if index == 0:
                row[-_ASKED:] = needle[:-1]
    return planted


def most_pairs(length: int) -> int:
    """Return how many needles a model that reads `length` bytes can be given, wherever the asked one lies."""
    # A grid that begins one short of a needle's length in has the fewest places.
    return max(0, (length + 1 - _ASKED - (NEEDLE - 1)) // NEEDLE)


def _keys(random: np.random.Generator, count: int) -> list[list[int]]:
    numbers = random.choice(len(_LETTERS) ** 2, count, replace=False)
    return [[int(_LETTERS[number // len(_LETTERS)]), int(_LETTERS[number % len(_LETTERS)])] for number in numbers]


@dataclass(frozen=True, kw_only=True)
class NeedleRun(Run):
    """A training on passages with needles, whose loss is that of all bytes plus that of the answers."""

    pairs: tuple[int, ...]
    """How many needles a passage holds: each of these as often."""

    @property
    def identity(self) -> str:
        """12 hexadecimal digits that change when the weights could."""
        return digest_of_facts(run=super().identity, pairs=self.pairs)

    def loss(self, model: ByteDecoder, text: Tensor, step: int) -> Tensor:
        """Return the mean loss of the passages' bytes plus that of the answers' bytes, in nats."""
        random = np.random.default_rng((self.train.seed, step, 1))
        pairs = self.pairs[step % len(self.pairs)]
        tokens = plant(passages(text, self.train, step).cpu(), random, pairs).to(text.device)
        nats = model.nats(tokens[:, :-1], tokens[:, 1:])
        return nats.mean() + nats[:, -ANSWER:].mean()


def answered(decoder: ByteDecoder, tokens_PN: Tensor) -> Tensor:
    """Return whether all bytes of each answer are the likeliest after what stands before them, (P,) bool.

    That is whether greedy decoding would write the answer.
    """
    likeliest = decoder(tokens_PN[:, :-1])[:, -ANSWER:].argmax(-1)
    return (likeliest == tokens_PN[:, -ANSWER:]).all(dim=1)
