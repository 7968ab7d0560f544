# SPDX-License-Identifier: Apache-2.0
"""Training one model, so that stopping and going on leaves no trace in the result.

The passages of update n follow from the seed and n alone and the model has no dropout, so no random generator carries
state from one update to the next: weights, the moments of AdamW, and n are all there is. A run that was stopped ends
with the bits of one that was not, given the same machine and number of threads.
"""

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import ConfigError, ModelConfig, TrainConfig, TrainedScheme, config_from
from .data import Corpus, Text, require_bytes
from .model import ByteDecoder, build_decoder, cost_per_token, count_parameters
from .positions import SCHEMES
from .progress import Interrupted, SaveClock, Tell, silent
from .storage import CheckpointError, digest_of_facts, load_tensors, save_tensors, write_text

KIND = "linbias decoder"
ANEW = "; delete it to start over"
"""What to do about a damaged file of our own making."""
_BYTES_A_PARAMETER = 20
"""Weight, gradient, two moments, and what the update of them takes."""
_ABSURD = 1000.0
"""Bits per byte, of 8 that even guessing costs, from which a loss is called divergence."""
_CURVE_POINTS = 10
_VALIDATION_PASSAGES = 32


class Diverged(ArithmeticError):
    """A training whose loss left the range of numbers that mean something."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides the weights of a trained model."""

    scheme: TrainedScheme
    model: ModelConfig
    train: TrainConfig
    corpus: Corpus
    device: str
    """A device as torch names it, not "auto"."""

    @property
    def identity(self) -> str:
        """12 hexadecimal digits that change when the weights could."""
        return digest_of_facts(
            scheme=self.scheme,
            model=self.model,
            train=self.train,
            text=[self.corpus.train.digest, self.corpus.validation.digest],
            device=torch.device(self.device).type,
        )

    def loss(self, model: ByteDecoder, text: Tensor, step: int) -> Tensor:
        """Return what update `step` makes smaller, in nats: the mean loss of its passages' bytes."""
        tokens = passages(text, self.train, step)
        return model.nats(tokens[:, :-1], tokens[:, 1:]).mean()

    def checkpoint(self, folder: Path) -> Path:
        """Return where the trained model is kept below `folder`."""
        return folder / f"{self.scheme}-{self.identity}.safetensors"

    def divergence(self, folder: Path) -> str | None:
        """Return how an earlier training of this very run diverged, None if none did."""
        try:
            return str(json.loads(self._divergence_file(folder).read_text(encoding="utf-8"))["diverged"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def keep_divergence(self, folder: Path, how: Diverged) -> None:
        """Write down how it diverged: the same run would again."""
        write_text(self._divergence_file(folder), json.dumps({"diverged": str(how)}))

    def _divergence_file(self, folder: Path) -> Path:
        return folder / f"{self.scheme}-{self.identity}.diverged.json"


def resolve_device(name: str) -> str:
    """Return a torch device name for `name`, which may be "auto": CUDA if there is one, else the CPU.

    Raises: ConfigError if torch does not know the device or cannot use it.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device must be auto or one that torch can use here, got {name!r}: {reason}") from error
    return str(torch.device(name))


def train(run: Run, folder: Path, tell: Tell = silent) -> Path:
    """Train to the end, from the start or from where an earlier call stopped, and return the checkpoint.

    A finished checkpoint of the same run is returned as it is.

    Raises:
        Interrupted: `tell` raised it; the state is saved.
        Diverged: the loss is no finite number, or absurdly high; no checkpoint is written.
        DataError: too little text for one passage.
        CheckpointError: what an earlier call wrote is damaged.
    """
    path = run.checkpoint(folder)
    if path.exists():
        load_checkpoint(path, remedy=ANEW)
        tell(1.0, "")
        return path
    if (known := run.divergence(folder)) is not None:
        raise Diverged(known)
    partial = path.with_suffix(".partial.safetensors")
    trainer = Trainer(run)
    if partial.exists():
        trainer.restore(partial)
    clock = SaveClock()
    try:
        tell(trainer.step / run.train.steps, "")
        while trainer.step < run.train.steps:
            bits = trainer.update()
            tell(trainer.step / run.train.steps, f"{bits:.2f} bits")
            if clock.due():
                trainer.save_partial(partial)
    except Interrupted:
        trainer.save_partial(partial)
        raise Interrupted(f"{run.scheme}: stopped after {trainer.step} of {run.train.steps} updates, saved") from None
    except Diverged as how:
        run.keep_divergence(folder, how)
        partial.unlink(missing_ok=True)
        raise
    trainer.save_final(path)
    partial.unlink(missing_ok=True)
    return path


def training_cost(model: ModelConfig, config: TrainConfig) -> float:
    """Return about how many multiplications a training takes; a backward pass costs two forward passes."""
    return 3 * config.steps * config.passages * config.length * cost_per_token(model, config.length)


class Trainer:
    """A model in training: `update` takes it one step further."""

    def __init__(self, run: Run) -> None:
        length = run.train.length
        require_bytes(run.corpus.train, length + 1, f"to train on passages of {length:,}")
        require_bytes(run.corpus.validation, length + 1, f"to validate on passages of {length:,}")
        self.run = run
        self.step = 0
        self.seconds = 0.0
        self.losses: list[float] = []
        self.curve: list[tuple[int, float, float]] = []
        self._text = run.corpus.train.tensor(run.device)
        _require_memory(run)
        self._model = build_decoder(run.model, run.scheme, length, run.train.seed).to(run.device)
        self._optimizer = _adamw(self._model, run.train)
        self._held_out = _spread_passages(run.corpus.validation, length, run.device)

    @property
    def decoder(self) -> ByteDecoder:
        """The model, as far as it is trained."""
        return self._model

    def update(self) -> float:
        """Follow the gradient of one batch, and return the batch's loss in bits per byte.

        Raises: Diverged.
        """
        began = time.perf_counter()
        config = self.run.train
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        loss = self.run.loss(self._model, self._text, self.step)
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.clip)
        self._optimizer.step()
        self.step += 1
        self._require_sense("loss", loss.item() / math.log(2))
        # A gradient that is no number has just been followed; the next loss would show it.
        self._require_sense("gradient's length", norm.item(), math.inf)
        self.losses.append(loss.item() / math.log(2))
        self._extend_curve()
        self.seconds += time.perf_counter() - began
        return self.losses[-1]

    def _extend_curve(self) -> None:
        every = max(1, self.run.train.steps // _CURVE_POINTS)
        if self.step % every and self.step != self.run.train.steps:
            return
        with torch.no_grad():
            nats = self._model.nats(self._held_out[:, :-1], self._held_out[:, 1:]).mean().item()
        self._require_sense("validation loss", nats / math.log(2))
        recent = self.losses[-every:]
        self.curve.append((self.step, sum(recent) / len(recent), nats / math.log(2)))

    def _require_sense(self, what: str, value: float, absurd: float = _ABSURD) -> None:
        if value < absurd:
            return
        config = self.run.train
        before = f", {self.losses[-1]:.2f} bits per byte in the update before" if self.losses else ""
        raise Diverged(
            f"training diverged at update {self.step:,} of {config.steps:,}: the {what} is {value:.4g}{before}; "
            f"try a learning rate below {config.learning_rate:g}"
        )

    def save_partial(self, path: Path) -> None:
        """Write everything needed to go on."""
        tensors = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        save_tensors(path, tensors, self._about(step=self.step))

    def restore(self, path: Path) -> None:
        """Go on from what `save_partial` wrote.

        Raises: CheckpointError if the file is damaged or belongs to another run.
        """
        tensors, about = load_tensors(path, ANEW)
        if about.get("fingerprint") != self.run.identity:
            raise CheckpointError(f"{str(path)!r} belongs to another run{ANEW}")
        try:
            self._take(tensors, about)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{str(path)!r} does not hold what a training saves{ANEW}") from error

    def _take(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        self._model.load_state_dict(weights)
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.losses = tensors["losses"].tolist()
        self.step, self.seconds = int(about["step"]), float(about["seconds"])
        self.curve = _curve(about)

    def save_final(self, path: Path) -> None:
        """Write the trained weights, under the names of a transformers MPT checkpoint, and how they came about."""
        save_tensors(path, self._model.state_dict(), self._about())

    def _about(self, **more: object) -> dict[str, Any]:
        run = self.run
        return {
            "kind": KIND,
            "fingerprint": run.identity,
            "scheme": run.scheme,
            "model": asdict(run.model),
            "train": asdict(run.train),
            "data": run.corpus.describe(),
            "device": run.device,
            "threads": torch.get_num_threads(),
            "seconds": self.seconds,
            "curve": self.curve,
            **more,
        }


def _require_memory(run: Run) -> None:
    """Raise ConfigError if weights, gradients and moments leave less than half of the free memory to all the rest."""
    free = _free_memory()
    if free is None or torch.device(run.device).type != "cpu":
        return
    with torch.device("meta"):
        needed = _BYTES_A_PARAMETER * count_parameters(
            build_decoder(run.model, run.scheme, run.train.length, run.train.seed)
        )
    if needed > free / 2:
        raise ConfigError(
            f"width and layers must leave room in memory: training needs {needed / 2**30:,.1f} GiB beside what a "
            f"batch takes, which may be as much, and {free / 2**30:,.1f} are free"
        )


def _free_memory() -> int | None:
    """Bytes that a process can have without another losing its own, None where the system does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate for update `step` (from 0): linear up over the warm-up, and linear down to zero at the end."""
    rise = min(1.0, (step + 1) / (config.warmup + 1))
    return config.learning_rate * rise * (1 - step / config.steps)


def passages(text: Tensor, config: TrainConfig, step: int) -> Tensor:
    """Return the passages of update `step`, (passages, length + 1) int64: a function of the seed and `step` alone."""
    generator = np.random.default_rng((config.seed, step))
    starts = torch.from_numpy(generator.integers(0, len(text) - config.length, size=config.passages))
    places = starts[:, None] + torch.arange(config.length + 1)
    return text[places.to(text.device)].long()


def _spread_passages(text: Text, length: int, device: str) -> Tensor:
    """Passages at even distances over the text, (passages, length + 1) int64: its start may be unlike the rest."""
    count = min(_VALIDATION_PASSAGES, (len(text.content) - 1) // length)
    starts = torch.linspace(0, len(text.content) - length - 1, count, dtype=torch.float64).long()
    return text.tensor(device)[(starts[:, None] + torch.arange(length + 1)).to(device)].long()


def _adamw(model: ByteDecoder, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=config.weight_decay, fused=True
    )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A checkpoint, opened."""

    scheme: TrainedScheme
    model: ModelConfig
    length: int
    """The training length."""
    weights: dict[str, Tensor]
    about: dict[str, Any]
    """Everything the checkpoint says of itself."""

    def decoder(self, scheme: str | None = None) -> ByteDecoder:
        """Return the model, with the positional scheme it was trained with or another that takes the same weights."""
        decoder = build_decoder(self.model, scheme or self.scheme, self.length, seed=0)
        decoder.load_state_dict(self.weights)
        return decoder.eval().requires_grad_(False)


def load_checkpoint(path: Path, remedy: str = "") -> Trained:
    """Open a checkpoint that `train` returned.

    Raises: CheckpointError, with `remedy`, if it is missing, damaged, unfinished or of another kind, or if what it says
        of itself does not fit what it holds; nothing larger than the file is made to find out.
    """
    weights, about = load_tensors(path, remedy)
    if about.get("kind") != KIND or "step" in about:
        raise CheckpointError(f"checkpoint must hold a model whose training is complete, got {str(path)!r}{remedy}")
    try:
        trained = Trained(
            scheme=about["scheme"],
            model=config_from(ModelConfig, about["model"]),
            length=config_from(TrainConfig, about["train"]).length,
            weights=weights,
            about={**about, "curve": _curve(about), "seconds": float(about["seconds"])},
        )
        _require_fit(trained)
    except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"it names no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"checkpoint must be one that train wrote, got {str(path)!r}: {reason}{remedy}"
        ) from error
    return trained


def _curve(about: dict[str, Any]) -> list[tuple[int, float, float]]:
    return [(int(step), float(loss), float(validation)) for step, loss, validation in about["curve"]]


def _require_fit(trained: Trained) -> None:
    """Raise ValueError unless names and shapes of the weights are those of the model that the checkpoint describes."""
    if trained.scheme not in SCHEMES or SCHEMES[trained.scheme].trained_as is not None:
        raise ValueError(f"scheme must be one that is trained, got {trained.scheme!r:.200}")
    numbers = [trained.about["seconds"], *(number for point in trained.about["curve"] for number in point)]
    if not trained.about["curve"] or not all(map(math.isfinite, numbers)):
        raise ValueError("curve and seconds must be finite numbers, one point or more")
    if not isinstance(trained.about["fingerprint"], str):
        raise ValueError(f"fingerprint must be text, got {trained.about['fingerprint']!r:.200}")
    with torch.device("meta"):
        decoder = build_decoder(trained.model, trained.scheme, trained.length, seed=0)
    wanted = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in trained.weights.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(f"{name!r:.200} must have shape {wanted.get(name)}, got {found.get(name)}")
        if not trained.weights[name].is_floating_point():
            raise ValueError(f"{name!r:.200} must hold floats, got {trained.weights[name].dtype}")
