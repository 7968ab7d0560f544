# SPDX-License-Identifier: Apache-2.0
"""What the evaluations can be told; the command line is generated from these classes, as from those of `lab.config`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config import ConfigError, DtypeName, at_least


@dataclass(frozen=True, kw_only=True)
class NumericsCommand:
    """Say from what distance each head is blind in a floating type, and what share of the causal pairs that is.

    A weight, relative to that of the query's own key, is e^(content - slope * distance). Three limits are given: below
    the smallest normal number (hardware that flushes to zero), below the smallest number there is, and where a number
    is rounded to 0. Shares are those of all causal pairs, of the keys of the last query, and of all pairs once each row
    is divided by its sum.
    """

    heads: int = 16
    """Number of query heads."""
    rule: Literal["press", "geometric"] = "press"
    """press: the authors' code, used by BLOOM, MPT, Falcon and others. geometric: the paper's text."""
    max_bias: float = 8.0
    """Exponent of the last slope; MPT calls it alibi_bias_max."""
    length: int = 2048
    """Length of the text, in tokens."""
    dtype: DtypeName = "bfloat16"
    """Type that the weights are kept in."""
    content: float = 0.0
    """By how much a far key's content score exceeds that of the query's own key."""
    json: Path | None = None
    """Also write the numbers to this file."""

    def __post_init__(self) -> None:
        at_least(1, heads=self.heads, length=self.length)
        if not 0 < self.max_bias < math.inf:
            raise ConfigError(f"max_bias must be greater than 0 and finite, got {self.max_bias}; the paper uses 8")
        if not math.isfinite(self.content):
            raise ConfigError(f"content must be finite, got {self.content}; 0 asks about the bias alone")


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a checkpoint trained with ALiBi as a folder that transformers reads as MPT, with the same logits.

    The folder has a tokenizer whose tokens are the bytes of UTF-8. Other schemes are refused: MPT's code has no place
    for them.
    """

    checkpoint: Path
    """A checkpoint written by train or compare."""
    out: Path = Path("linbias-export")
    """Folder to write."""
    length: int | None = None
    """Longest text that the folder says it takes; 16 times the training length if not given."""

    def __post_init__(self) -> None:
        at_least(1, length=self.length)
