# SPDX-License-Identifier: Apache-2.0
"""What an experiment can be told. The command line is generated from these classes, one flag per field."""

import math
import shlex
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .positions import SCHEMES

VOCABULARY = 256
"""Models read and predict bytes."""
MOST_PARAMETERS = 2**30
"""In the matrices of a model."""
_MOST_LAYERS = 1024
_MOST_TOKENS = 2**26
_MOST_HEADS = 4096
_MOST_WORKERS = 1024
_INT64 = 2**63 - 1

ALL_SCHEMES: tuple[str, ...] = tuple(name for name, scheme in SCHEMES.items() if scheme.trained_as is None)
USUAL_SCHEMES: tuple[str, ...] = tuple(name for name in ALL_SCHEMES if SCHEMES[name].usual)
TEST_SCHEMES: tuple[str, ...] = tuple(name for name, scheme in SCHEMES.items() if scheme.trained_as is not None)
USUAL_TESTS: tuple[str, ...] = tuple(name for name in TEST_SCHEMES if SCHEMES[name].usual)
if TYPE_CHECKING:
    TrainedScheme = str
    TestScheme = str
    AnyScheme = str
else:  # the command line shows and checks the names that SCHEMES has
    TrainedScheme, TestScheme, AnyScheme = Literal[ALL_SCHEMES], Literal[TEST_SCHEMES], Literal[tuple(SCHEMES)]
Split = Literal["train", "validation", "test"]
BenchPart = Literal["forward", "training"]
DtypeName = Literal["float16", "bfloat16", "float32", "float64"]

ALL_PARTS: tuple[BenchPart, ...] = ("forward", "training")


class ConfigError(ValueError):
    """A setting outside its range, alone or together with another."""


def at_least(least: float, **values: float | None) -> None:
    """Raise ConfigError, naming the field, unless each value is None or at least `least`."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def at_most(most: float, **values: float | None) -> None:
    """Raise ConfigError, naming the field, if a value is greater than `most`."""
    for name, value in values.items():
        if value is not None and value > most:
            raise ConfigError(f"{name} must be at most {most}, got {value}")


def command_line(name: str, command: Any) -> str:
    """Return the shell's words that make `command`: every field that differs from its default."""
    return shlex.join(["linbias", name, *_flags(command)])


def _flags(settings: Any) -> list[str]:
    words: list[str] = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            words += _flags(value)
        elif value != each.default:
            words.append(f"--{each.name.replace('_', '-')}")
            words += [] if value is True else map(str, value if isinstance(value, tuple) else (value,))
    return words


C = TypeVar("C")


def config_from(kind: type[C], facts: Any) -> C:
    """Return the configuration of `kind` whose fields a file gives by name.

    Raises: ConfigError if a field is missing, unknown, of another type or out of its range.
    """
    known: dict[str, Any] = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(facts, dict) or facts.keys() != known.keys():
        raise ConfigError(f"{kind.__name__} must have the fields {', '.join(known)}, got {facts!r:.200}")
    for name, value in facts.items():
        wanted = (int, float) if known[name] is float else int
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ConfigError(f"{name} must be of type {known[name].__name__}, got {value!r:.200}")
    return kind(**facts)


def _check_lengths(lengths: tuple[int, ...] | None) -> None:
    if lengths is not None and (not lengths or min(lengths) < 1):
        raise ConfigError(f"lengths must be one or more whole numbers of at least 1, got {lengths}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the decoder."""

    layers: int = 3
    """Blocks of attention and feed-forward."""
    width: int = 128
    """Numbers that describe a byte between blocks; the feed-forward is four times as wide."""
    heads: int = 8
    """Attention heads; width / heads must be an even whole number."""

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers, width=self.width, heads=self.heads)
        at_most(_MOST_LAYERS, layers=self.layers)
        parameters = 12 * self.layers * self.width**2
        if parameters > MOST_PARAMETERS:
            widest = math.isqrt(MOST_PARAMETERS // (12 * self.layers))
            raise ConfigError(
                f"width must be at most {widest:,} with {self.layers:,} layers, so that a model has at most "
                f"{MOST_PARAMETERS:,} parameters, got {self.width:,}"
            )
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width must be a multiple of twice the heads, got width {self.width} with {self.heads} heads; "
                f"try width {2 * self.heads * max(1, round(self.width / (2 * self.heads)))}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained: AdamW, warm-up, then a learning rate that falls linearly to zero."""

    length: int = 128
    """Bytes in a training passage: the L that test lengths are multiples of."""
    steps: int = 500
    """Updates of the weights."""
    passages: int = 8
    """Passages in one update."""
    learning_rate: float = 3e-3
    """Largest learning rate, reached after warm-up."""
    warmup: int = 20
    """Updates during which the learning rate rises from zero."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors are not decayed."""
    clip: float = 1.0
    """Longest gradient, as a Euclidean norm, that an update may follow."""
    seed: int = 1
    """Of the first weights and of the choice of passages, the same for every scheme."""

    def __post_init__(self) -> None:
        at_least(1, length=self.length, steps=self.steps, passages=self.passages)
        at_least(0, warmup=self.warmup, weight_decay=self.weight_decay, seed=self.seed)
        at_most(_INT64, length=self.length, steps=self.steps, warmup=self.warmup, seed=self.seed)
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be greater than 0 and finite, got {self.clip}; 1e30 clips no gradient")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate must be greater than 0 and finite, got {self.learning_rate}")
        if self.weight_decay == math.inf:
            raise ConfigError(f"weight_decay must be finite, got {self.weight_decay}")
        if self.passages * self.length > _MOST_TOKENS:
            raise ConfigError(
                f"passages times length must be at most {_MOST_TOKENS:,} bytes in one update, got {self.passages:,} "
                f"passages of {self.length:,}"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How a model is tested."""

    lengths: tuple[int, ...] | None = None
    """Test lengths in bytes; 1, 2, 4, 8 and 16 times the training length if not given."""
    test_bytes: int = 65_536
    """At most how many bytes are scored: the same bytes for every scheme and length, each once."""
    stride: int | None = None
    """Bytes by which the window moves on. Not given: its whole length, and bytes at its start are guessed from little
    context. 1: every byte is guessed from a full window (the paper's sliding evaluation), at length times the cost."""

    def __post_init__(self) -> None:
        at_least(1, test_bytes=self.test_bytes, stride=self.stride)
        at_most(_INT64, test_bytes=self.test_bytes, stride=self.stride)
        _check_lengths(self.lengths)
        if self.lengths is not None and self.stride is not None and self.stride > min(self.lengths):
            raise ConfigError(
                f"stride must not exceed the shortest length, {min(self.lengths)}, got {self.stride}; "
                "bytes between two windows would go unscored"
            )

    def lengths_for(self, trained: int) -> tuple[int, ...]:
        """Return the test lengths, ascending, for a model trained at `trained` bytes.

        Raises: ConfigError if the stride exceeds the shortest of them.
        """
        if self.lengths is not None:
            return tuple(sorted(set(self.lengths)))
        if self.stride is not None and self.stride > trained:
            raise ConfigError(f"stride must not exceed the shortest length, {trained}, got {self.stride}")
        return tuple(trained * factor for factor in (1, 2, 4, 8, 16))


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """What every command that trains can be told."""

    data: Path | None = None
    """Text file or folder to train and test on; the embedded novels if not given. A folder whose file or folder names
    say train, validation (valid, val, dev) and test is split that way, anything else 80 / 10 / 10 in order."""
    device: str = "auto"
    """Where to compute: cpu, cuda, mps ...; auto takes CUDA if there is one."""
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True, kw_only=True)
class TrainCommand(TrainingCommand):
    """Train one model with one positional scheme and keep it as a checkpoint.

    Interrupt it whenever you like (Ctrl-C): the same command goes on where it stopped, and ends with the weights it
    would have had without the interruption, bit for bit on the same machine. If nothing changed since a finished run,
    its checkpoint is reused.
    """

    scheme: TrainedScheme = "alibi"
    """How the model knows where a byte stands."""
    out: Path = Path("linbias-runs")
    """Folder for checkpoints."""


@dataclass(frozen=True, kw_only=True)
class CompareCommand(TrainingCommand):
    """Train a model with each positional scheme on short passages, test all of them on texts up to 16 times longer.

    Everything but the scheme is the same: data, order of passages, first weights, budget, bytes scored. Writes a table,
    results.json, results.csv, plot.png and one self-contained report.html. Interrupt it whenever you like (Ctrl-C): the
    same command goes on where it stopped. What has not changed since an earlier run is reused.
    """

    schemes: tuple[TrainedScheme, ...] = USUAL_SCHEMES
    """Which schemes to compare."""
    test_schemes: tuple[TestScheme, ...] = USUAL_TESTS
    """What else to run the trained weights with beyond the training length. Each changes a checkpoint's rule, and the
    report says how; those whose scheme is not compared are left out."""
    out: Path = Path("linbias-compare")
    """Folder for the report, checkpoints and scores."""
    seeds: tuple[int, ...] | None = None
    """Train each scheme once with each of these; with train's seed alone if not given. Intervals over seeds and over
    text stand apart."""
    workers: int | None = None
    """Processes that work side by side; one per core, but no more than trainings, if not given. 1: all in this one."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        at_least(1, workers=self.workers)
        at_most(_MOST_WORKERS, workers=self.workers)
        if not self.schemes:
            raise ConfigError(f"schemes must name at least one of {', '.join(ALL_SCHEMES)}")
        if self.seeds is not None and (not self.seeds or min(self.seeds) < 0):
            raise ConfigError(f"seeds must be one or more whole numbers of at least 0, got {self.seeds}")
        lists = {"schemes": self.schemes, "test_schemes": self.test_schemes, "seeds": self.seeds or ()}
        for name, given in lists.items():
            if len(set(given)) < len(given):
                raise ConfigError(f"{name} must not repeat, got {' '.join(map(str, given))}")


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Show what a bias does: the slope of each head, how far it reaches, where its probabilities vanish.

    A key at distance d, whose content score exceeds that of the query's own key by at most `content`, weighs at most
    e^(content - slope * d) times as much as that key.
    """

    model: Path | None = None
    """A trained model instead of a number of heads: a checkpoint of train or compare, a folder of theirs, or a folder
    of a published model (config.json, safetensors, tokenizer). The norms of its queries and keys are measured."""
    data: Path | None = None
    """Text file or folder to measure a model on; the embedded novels if not given."""
    heads: int | None = None
    """Number of query heads; 8 if neither they nor a model are given."""
    rule: Literal["press", "geometric"] | None = None
    """press: the authors' code, used by BLOOM, MPT, Falcon and others, if nothing is given. geometric: the paper's
    text."""
    max_bias: float | None = None
    """Exponent of the last slope, 8 if not given; MPT calls it alibi_bias_max."""
    length: int | None = None
    """Length of the text, in tokens; 8,192 if not given, 1,024 for a model, which reads them."""
    dtype: DtypeName = "float32"
    """Type that the probabilities are kept in."""
    content: float | None = None
    """Bound on how far a key's content score can exceed that of the query's own key; 0 if not given, measured for a
    model."""
    tolerance: float | None = None
    """Weight, relative to the row's, that may be neglected; a quarter of the accumulating type's epsilon if not
    given."""
    plot: Path | None = None
    """Draw it to this file, which ends in .png, .svg or .pdf."""

    def __post_init__(self) -> None:
        at_least(1, heads=self.heads, length=self.length)
        at_most(_MOST_HEADS, heads=self.heads)
        at_most(_INT64, length=self.length)
        if self.max_bias is not None and not 0 < self.max_bias < math.inf:
            raise ConfigError(f"max_bias must be greater than 0 and finite, got {self.max_bias}; the paper uses 8")
        if self.content is not None and not math.isfinite(self.content):
            raise ConfigError(f"content must be finite, got {self.content}; 0 asks about the bias alone")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ConfigError(f"tolerance must lie between 0 and 1, got {self.tolerance}")
        if self.plot is not None and self.plot.suffix.lower() not in {".png", ".svg", ".pdf"}:
            raise ConfigError(f"plot must end in .png, .svg or .pdf, got {str(self.plot)!r}")
        self._check_model()

    def _check_model(self) -> None:
        if self.model is None:
            if self.data is not None:
                raise ConfigError("data must be left out where no model is given to be measured on it")
            return
        for name in ("heads", "rule", "max_bias", "content"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} must be left out where a model is given, which has its own")


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Say what is installed, what this machine offers, and which backends can run here, or why not."""

    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Time attention on this machine, beside torch's own causal attention without any bias, by length.

    Prints the ratios, and writes results.json and plot.png: time per token against length. What gives wrong results is
    not timed. Interrupt it whenever you like (Ctrl-C): the same command goes on where it
    stopped. A run that was finished is measured anew.
    """

    quick: bool = False
    """Few repetitions, and two short lengths if none are given."""
    lengths: tuple[int, ...] | None = None
    """Tokens; 512 to 131,072 if not given. Each implementation leaves out what would take it minutes."""
    parts: tuple[BenchPart, ...] = ALL_PARTS
    """forward: without gradients. training: forward and backward, up to 8,192 tokens."""
    backends: tuple[Literal["native", "tiled", "reference"], ...] | None = None
    """Which of linbias's backends to time; native and tiled, where they can run, if not given."""
    threads: int = 1
    """Of torch. 1: CPU time on one core. More: time on the wall, which needs an idle machine."""
    out: Path = Path("linbias-bench")
    """Folder for the results."""

    def __post_init__(self) -> None:
        at_least(1, threads=self.threads)
        at_most(2**16, threads=self.threads)
        _check_lengths(self.lengths)
        if not self.parts:
            raise ConfigError(f"parts must name at least one of {', '.join(ALL_PARTS)}")
