# SPDX-License-Identifier: Apache-2.0
"""What the evaluations can be told; the command line is generated from these classes, as from those of `lab.config`."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..config import (
    AnyScheme,
    ConfigError,
    DtypeName,
    EvaluateConfig,
    Split,
    TestScheme,
    TrainConfig,
    TrainedScheme,
    TrainingCommand,
    at_least,
)

FolderTest = Literal["loss", "retrieval", "streaming", "numerics"]
NEEDLE, ANSWER = 9, 4
"""Bytes of <kk=dddd> and of dddd."""


@dataclass(frozen=True, kw_only=True)
class FolderConfig:
    """What a model in a folder is asked besides its loss."""

    tests: tuple[FolderTest, ...] = get_args(FolderTest)
    """With --model: what to test."""
    depths: int = 5
    """With --model: at how many places from the start of a text to its end a needle lies, <ab=1234>."""
    trials: int = 8
    """With --model: texts with a needle for each length and depth."""
    tokens: int = 4096
    """With --model: tokens of a text that is streamed."""
    texts: int = 2
    """With --model: at most how many texts are streamed."""
    window: int = 512
    """With --model: keys that streaming with a window keeps."""
    sinks: int = 4
    """With --model: first tokens that streaming with sinks keeps besides."""
    out: Path = Path("linbias-evaluate")
    """With --model: folder for plots and numbers."""

    def __post_init__(self) -> None:
        at_least(1, trials=self.trials, tokens=self.tokens, texts=self.texts, window=self.window, sinks=self.sinks)
        at_least(2, depths=self.depths)
        if not self.tests:
            raise ConfigError(f"tests must name at least one of {', '.join(get_args(FolderTest))}")


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Test a trained checkpoint on text it has not seen, at lengths of your choice.

    Or test any causal language model of transformers in a folder on this machine, with its tokenizer: its loss, whether
    it finds values hidden in a text, its loss as it streams with fewer keys, and the numerics of its slopes. Lengths
    are then in tokens, 256, 512 and 1,024 if not given. No code of the folder is run and nothing is fetched.
    """

    checkpoint: Path | None = None
    """A checkpoint written by train or compare."""
    model: Path | None = None
    """A folder with config.json, model.safetensors and a tokenizer; instead of a checkpoint."""
    scheme: AnyScheme | None = None
    """Run the weights with another scheme than they were trained with, where that is possible: alibi-window limits
    ALiBi's attention to the training length, rope-yarn stretches RoPE."""
    data: Path | None = None
    """Text file or folder; if not given, the data that the checkpoint names, as long as no byte of it has changed."""
    split: Split = "test"
    """Which part of the data to score."""
    json: Path | None = None
    """Also write the result to this file."""
    device: str = "auto"
    """Where to compute: cpu, cuda, mps ...; auto takes CUDA if there is one."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    folder: FolderConfig = field(default_factory=FolderConfig)

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.model is None):
            raise ConfigError("evaluate needs either a checkpoint or a model, a folder of transformers")


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
class StreamCommand:
    """Read long texts in one go, and give the loss by tokens seen: all kept, a window, a window with sinks.

    Sinks are the first bytes of the text, kept although they lie before the window; their distance is counted in the
    text or, as StreamingLLM does, in what is kept. Writes a plot, and the same numbers as JSON and CSV. At one place
    full and window differ only by the use of what lies before the window: no byte has less context for standing near
    the start of a window, as in `evaluate`.
    """

    checkpoint: Path
    """A checkpoint written by train, compare or retrieve."""
    scheme: AnyScheme | None = None
    """Run the weights with another scheme than they were trained with, where that is possible."""
    data: Path | None = None
    """Text file or folder; if not given, the data that the checkpoint names, as long as no byte of it has changed."""
    split: Split = "test"
    """Which part of the data to read."""
    tokens: int = 16_384
    """Bytes of each text."""
    texts: int = 4
    """At most how many texts, one after the other in the data; intervals are over these."""
    window: int | None = None
    """Keys a query sees besides sinks, its own included; the training length if not given."""
    sinks: int = 4
    """First bytes of the text that stay visible."""
    device: str = "auto"
    """Where to compute: cpu, cuda, mps ...; auto takes CUDA if there is one."""
    out: Path = Path("linbias-stream")
    """Folder for the plot and the numbers."""

    def __post_init__(self) -> None:
        at_least(1, tokens=self.tokens, texts=self.texts, window=self.window, sinks=self.sinks)


@dataclass(frozen=True, kw_only=True)
class AttentionCommand:
    """Say what the heads of a trained model look at: the mass of their attention by distance, and on the first byte.

    For each layer and head: the distances within which half and nine tenths of the mass lie, the share of the causal
    pairs whose probability leaves a floating type, and for ALiBi the share that linbias skipped at its default
    tolerance. Writes a plot, and the mass by distance as JSON and CSV.
    """

    checkpoint: Path
    """A checkpoint written by train, compare or retrieve."""
    scheme: AnyScheme | None = None
    """Run the weights with another scheme than they were trained with, where that is possible."""
    data: Path | None = None
    """Text file or folder; if not given, the data that the checkpoint names, as long as no byte of it has changed."""
    split: Split = "test"
    """Which part of the data to read."""
    length: int | None = None
    """Bytes of each text; four times the training length if not given."""
    texts: int = 4
    """At most how many texts, one after the other in the data."""
    dtype: DtypeName = "bfloat16"
    """Type of which it is said what share of the probabilities leaves it."""
    device: str = "auto"
    """Where to compute: cpu, cuda, mps ...; auto takes CUDA if there is one."""
    out: Path = Path("linbias-attention")
    """Folder for the plot and the numbers."""

    def __post_init__(self) -> None:
        at_least(1, texts=self.texts)
        at_least(2, length=self.length)


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


@dataclass(frozen=True, kw_only=True)
class RetrieveCommand(TrainingCommand):
    """Train models on text in which keys and values are hidden, and ask for values from every depth of longer texts.

    A needle is <kk=dddd> somewhere in a text, two letters and four digits, and the text ends with <kk= of one of them:
    an answer counts if all four digits are the likeliest. Writes a heat map of accuracy by length and depth, and the
    same numbers as JSON and CSV. Interrupt it whenever you like (Ctrl-C): the same command goes on where it stopped.
    """

    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(steps=1200, passages=16, learning_rate=2e-3, warmup=50, weight_decay=0.05)
    )
    schemes: tuple[TrainedScheme, ...] = ("alibi", "rope")
    """Which schemes to train."""
    test_schemes: tuple[TestScheme, ...] = ("rope-yarn", "alibi-interpolated")
    """What else to run the trained weights with; those whose scheme is not trained are left out."""
    lengths: tuple[int, ...] | None = None
    """Lengths to ask at, in bytes; 1, 2, 4 and 8 times the training length if not given."""
    depths: int = 5
    """At how many places, evenly from the start of the text to its end, the needle that is asked for lies."""
    trials: int = 64
    """Texts for each length and depth, the same for every scheme and seed."""
    pairs: tuple[int, ...] = (1,)
    """How many needles a text holds: 1 is a passkey; more, and only the key tells which is asked for. Models are
    trained on all these numbers in turn."""
    seeds: tuple[int, ...] = (1,)
    """Each scheme is trained once with each of these instead of train's seed."""
    out: Path = Path("linbias-retrieve")
    """Folder for the heat map, numbers and checkpoints."""
    workers: int | None = None
    """Processes that work side by side; one per core, but no more than trainings, if not given."""

    def __post_init__(self) -> None:
        at_least(1, trials=self.trials, workers=self.workers)
        at_least(2, depths=self.depths)
        for name, least in (("schemes", None), ("test_schemes", None), ("pairs", 1), ("seeds", 0), ("lengths", 1)):
            _distinct(name, getattr(self, name), least)
        # Of a grid of needles, whose first place may be one short of a needle's length in, and the question.
        needed = NEEDLE * (max(self.pairs) + 2) - 3
        shortest = min(self.train.length, *self.lengths_asked())
        if shortest < needed:
            raise ConfigError(
                f"lengths must be at least {needed} to hold {max(self.pairs)} needles and a question, got {shortest}"
            )

    def lengths_asked(self) -> tuple[int, ...]:
        """Return the lengths, ascending."""
        return tuple(sorted(self.lengths or (self.train.length * factor for factor in (1, 2, 4, 8))))


def _distinct(name: str, values: tuple[object, ...] | None, least: int | None) -> None:
    if values is None or (name == "test_schemes" and not values):
        return
    if not values or len(set(values)) < len(values):
        raise ConfigError(f"{name} must be one or more, all different, got {values}")
    for value in values:
        if isinstance(value, int) and least is not None:
            at_least(least, **{name: value})
