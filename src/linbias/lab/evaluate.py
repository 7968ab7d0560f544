# SPDX-License-Identifier: Apache-2.0
"""How well a model guesses text: every byte scored once, whatever the length of the window or its stride.

Bytes 1 .. N of a text are scored. A window of T bytes guesses the byte after each of its own, so it spans T + 1. The
context of a guess is the number of bytes before the window's current one: 0 at its start, T - 1 at its end. With stride
T windows do not overlap and the mean context is (T - 1) / 2; with stride 1 every byte but the first T is guessed from
context T - 1, the sliding evaluation of the ALiBi paper.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import AnyScheme, ConfigError, EvaluateConfig, ModelConfig
from .data import Text, require_bytes
from .model import ByteDecoder, cost_per_token
from .positions import SCHEMES
from .progress import Interrupted, SaveClock, Tell, silent
from .storage import CheckpointError, digest_of_facts, load_tensors, save_tensors
from .train import ANEW, Trained

_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Where windows start and which of their guesses count, so that each of `scored` bytes is scored once."""

    starts: Tensor
    """(W,) int64, ascending."""
    firsts: Tensor
    """(W,) int64: the first guess of each window that no earlier window made."""
    length: int
    scored: int

    def scored_after(self, windows: int) -> int:
        """Return how many bytes the first `windows` score."""
        return int((self.length - self.firsts[: max(0, windows)]).sum())

    def context(self) -> Tensor:
        """Return the context of each scored byte, (scored,) int64."""
        counts = self.length - self.firsts
        ends = counts.cumsum(0)
        within = torch.arange(self.scored) - torch.repeat_interleave(ends - counts, counts)
        return within + torch.repeat_interleave(self.firsts, counts)


def plan_windows(scored: int, length: int, stride: int | None = None) -> Windows:
    """Return windows of `length` that advance by `stride` (default: by their length); the last one may advance by less.

    Raises: ConfigError unless 1 <= stride <= length <= scored.
    """
    stride = length if stride is None else stride
    if not 1 <= stride <= length <= scored:
        raise ConfigError(
            f"windows need 1 <= stride <= length <= bytes to score, got stride {stride:,}, length {length:,}, "
            f"{scored:,} bytes"
        )
    starts = torch.arange(0, scored - length + 1, stride)
    if starts[-1] + length < scored:
        starts = torch.cat((starts, torch.tensor([scored - length])))
    firsts = torch.zeros_like(starts)
    firsts[1:] = starts[:-1] + length - starts[1:]
    return Windows(starts=starts, firsts=firsts, length=length, scored=scored)


def scored_bytes(text: Text, config: EvaluateConfig, lengths: tuple[int, ...]) -> int:
    """Return how many bytes to score: at most `config.test_bytes`, in whole segments of the longest length.

    Raises: DataError if the text is too short for one window of the longest length.
    """
    longest = max(lengths)
    require_bytes(text, longest + 1, f"to score a window of {longest:,}")
    if config.test_bytes < longest:
        raise ConfigError(f"test_bytes must be at least the longest length, {longest:,}, got {config.test_bytes:,}")
    return min(config.test_bytes, len(text.content) - 1) // longest * longest


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One test: a trained model, run with one scheme at one length."""

    trained: Trained
    scheme: AnyScheme
    text: Text
    length: int
    scored: int
    stride: int | None
    device: str

    @property
    def identity(self) -> str:
        """12 hexadecimal digits that change when the scores could."""
        return digest_of_facts(
            checkpoint=self.trained.about["fingerprint"],
            scheme=self.scheme,
            text=self.text.digest,
            length=self.length,
            scored=self.scored,
            stride=self.stride,
            device=torch.device(self.device).type,
        )

    def file(self, folder: Path) -> Path:
        """Return where the scores are kept below `folder`."""
        return folder / f"{self.scheme}-{self.length}-{self.identity}.safetensors"


def testing_cost(model: ModelConfig, length: int, scored: int, stride: int | None) -> float:
    """Return about how many multiplications it takes to score `scored` bytes."""
    tokens = len(plan_windows(scored, length, stride).starts) * length
    return tokens * cost_per_token(model, length)


def score(trial: Trial, tell: Tell = silent, file: Path | None = None) -> Tensor:
    """Return the loss of each scored byte in nats, (scored,) fp32, on the CPU.

    With `file`, scores are kept there; what an earlier call left is not computed again.

    Raises:
        Interrupted: `tell` raised it; what is done is saved.
    """
    windows = plan_windows(trial.scored, trial.length, trial.stride)
    pieces: list[Tensor] = []
    done = 0
    if file is not None and file.exists():
        nats, done = load_scores(file)
        pieces = [nats]
        if len(nats) != windows.scored_after(done):
            raise CheckpointError(f"{str(file)!r} holds {len(nats):,} scores for {done:,} windows{ANEW}")
    if done == len(windows.starts):
        tell(1.0, "")
        return pieces[0]
    model = trial.trained.decoder(trial.scheme).to(trial.device)
    text = trial.text.tensor(trial.device)[: trial.scored + 1].long()
    clock = SaveClock()
    batch = max(1, _TOKENS_AT_ONCE // trial.length)
    try:
        tell(done / len(windows.starts), "")
        while done < len(windows.starts):
            pieces.append(_score_windows(model, text, windows, slice(done, done + batch)))
            done = min(done + batch, len(windows.starts))
            tell(done / len(windows.starts), "")
            if clock.due():
                _save(file, pieces, done)
    except Interrupted:
        _save(file, pieces, done)
        raise Interrupted(f"{trial.scheme} at {trial.length:,}: stopped after {done:,} windows, saved") from None
    _save(file, pieces, done)
    return torch.cat(pieces)


def load_scores(file: Path) -> tuple[Tensor, int]:
    """Read what `score` left in a file: the losses, and how many windows they come from.

    Raises: CheckpointError if it is damaged.
    """
    tensors, about = load_tensors(file, ANEW)
    nats, windows = tensors.get("nats"), about.get("windows")
    if nats is None or nats.ndim != 1 or not isinstance(windows, int):
        raise CheckpointError(f"{str(file)!r} does not hold scores{ANEW}")
    return nats, windows


def _save(file: Path | None, pieces: list[Tensor], windows: int) -> None:
    if file is None:
        return
    save_tensors(file, {"nats": torch.cat([torch.empty(0), *pieces])}, {"kind": "linbias scores", "windows": windows})


def _score_windows(model: ByteDecoder, text: Tensor, windows: Windows, which: slice) -> Tensor:
    starts, firsts = windows.starts[which], windows.firsts[which]
    tokens = text[(starts[:, None] + torch.arange(windows.length + 1)).to(text.device)]
    with torch.no_grad():
        nats = model.nats(tokens[:, :-1], tokens[:, 1:]).cpu()
    return nats[torch.arange(windows.length) >= firsts[:, None]]


def check_scheme(trained: Trained, scheme: AnyScheme) -> None:
    """Raise ConfigError unless the weights of `trained` can run with `scheme`."""
    base = SCHEMES[scheme].trained_as or scheme
    if base != trained.scheme:
        raise ConfigError(
            f"scheme must be {trained.scheme!r} or one that runs with its weights, got {scheme!r}; "
            f"{scheme!r} needs a model trained with {base!r}"
        )


def position_curve(nats: Tensor, context: Tensor, per_octave: int = 2) -> list[dict[str, Any]]:
    """Return mean bits per byte by context, in bins whose width grows with it: keys first, last, bits, bytes.

    Bins start at 0, 1, 2 and every power of 2, and between two of these as often as `per_octave` says.
    """
    last = int(context.max())
    steps = range(per_octave * last.bit_length() + 1)
    edges = sorted({0, *(math.ceil(2 ** (step / per_octave)) for step in steps)})
    bins = torch.bucketize(context, torch.tensor(edges), right=True) - 1
    bits = torch.bincount(bins, weights=nats.double(), minlength=len(edges)) / math.log(2)
    counts = torch.bincount(bins, minlength=len(edges)).tolist()
    return [
        {"first": first, "last": min(after - 1, last), "bits": bits[i].item() / counts[i], "bytes": counts[i]}
        for i, (first, after) in enumerate(pairwise([*edges, last + 1]))
        if counts[i]
    ]
