# SPDX-License-Identifier: Apache-2.0
"""One model at a time: what `linbias train` and `linbias evaluate` do."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from .config import AnyScheme, TrainCommand
from .data import SPLITS, Corpus, DataError, Text, load_corpus
from .evaluate import Trial, check_scheme, score, scored_bytes, testing_cost
from .evaluations.config import EvaluateCommand
from .model import count_parameters
from .positions import SCHEMES, rule_change, why_not
from .progress import Tell, notice
from .remarks import interval, perplexity_text
from .results import make_cells
from .statistics import METHOD, Estimate
from .storage import CheckpointError
from .tables import align, wrap
from .tasks import Task, run_tasks
from .train import Run, Trained, load_checkpoint, resolve_device, train


def train_one(command: TrainCommand) -> Path:
    """Train what `command` says, or what is missing of it, and return the checkpoint.

    Raises:
        Interrupted: stopped on request; calling again goes on.
        DataError: too little text.
        Diverged: it ended in no model.
    """
    run = Run(
        scheme=command.scheme,
        model=command.model,
        train=command.train,
        corpus=load_corpus(command.data),
        device=resolve_device(command.device),
    )

    if (odd := run.corpus.remark()) is not None:
        notice(odd)
    run_tasks("linbias", [Task(name=f"train {run.scheme}", work=partial(_train, run, command.out))])
    return run.checkpoint(command.out)


def _train(run: Run, folder: Path, tell: Tell) -> None:
    train(run, folder, tell)


def describe_training(path: Path) -> str:
    """Return what `linbias train` prints about a finished checkpoint."""
    trained = load_checkpoint(path)
    lines = [(f"{step:,}", f"{loss:.3f}", f"{validation:.3f}") for step, loss, validation in trained.about["curve"]]
    return "\n".join(
        (
            f"{SCHEMES[trained.scheme].label}: {count_parameters(trained.decoder()):,} parameters, "
            f"trained on passages of {trained.length:,} bytes in {trained.about['seconds']:.0f} s",
            "",
            align(("updates", "training, bits per byte", "validation"), lines),
            "",
            f"checkpoint: {path}",
        )
    )


def evaluate_checkpoint(command: EvaluateCommand) -> dict[str, Any]:
    """Test a checkpoint as `command` says, and return what was found, in types that JSON knows.

    Raises:
        Interrupted: stopped on request.
        CheckpointError, ConfigError, DataError: it cannot be done.
    """
    assert command.checkpoint is not None
    trained = load_checkpoint(command.checkpoint)
    scheme: AnyScheme = command.scheme or trained.scheme
    check_scheme(trained, scheme)
    corpus = load_corpus(command.data) if command.data is not None else data_of(trained, command.checkpoint)
    text = corpus.split(command.split)
    lengths = command.evaluate.lengths_for(trained.length)
    trial = Trial(
        trained=trained,
        scheme=scheme,
        text=text,
        length=lengths[0],
        scored=scored_bytes(text, command.evaluate, lengths),
        stride=command.evaluate.stride,
        device=resolve_device(command.device),
    )
    scores: dict[int, Tensor | str] = {}
    tasks: list[Task] = []
    for length in lengths:
        reason = why_not(scheme, trained.model, trained.length, length)
        if reason is not None:
            scores[length] = reason
            continue
        cost = testing_cost(trained.model, length, trial.scored, trial.stride)
        work = partial(_keep_score, scores, replace(trial, length=length))
        tasks.append(Task(name=f"test at {length:,}", cost=cost, work=work))
    run_tasks("linbias", tasks)
    return _found(trained, trial, scores) | {"seen": _acquaintance(trained, command, text)}


def data_of(trained: Trained, path: Path) -> Corpus:
    """Read the data that a checkpoint names, after saying so: whoever made the checkpoint chose the path.

    Raises: CheckpointError, DataError unless it is what the model was trained on, byte by byte.
    """
    kept = trained.about.get("data")
    hashes = kept.get("splits") if isinstance(kept, dict) else None
    source = kept.get("source") if isinstance(kept, dict) else None
    if not isinstance(hashes, dict) or not isinstance(source, str | None):
        raise CheckpointError(
            f"checkpoint must say which text it was trained on, got {str(path)!r}, which keeps no hash of it; give the "
            "text to score with --data"
        )
    if source is not None:
        notice(f"reading {source!r}, the data that the checkpoint names")
    corpus = load_corpus(None if source is None else Path(source))
    found = corpus.describe()["splits"]
    changed = [split for split in SPLITS if found[split]["sha256"] != _hash_of(hashes, split)]
    if changed:
        raise DataError(
            f"data must be what the checkpoint was trained on, got {source or corpus.name!r}, whose "
            f"{', '.join(changed)} changed since (by SHA-256), so that it may be tested on bytes it was trained on; "
            "restore it, or give the text to score with --data"
        )
    return corpus


def _hash_of(splits: dict[str, Any], split: str) -> Any:
    facts = splits.get(split)
    return facts.get("sha256") if isinstance(facts, dict) else None


def _acquaintance(trained: Trained, command: EvaluateCommand, text: Text) -> str | None:
    """What is known of the model having seen the text before, None if it is the data of the checkpoint, unchanged."""
    kept = trained.about.get("data")
    splits = kept.get("splits") if isinstance(kept, dict) else None
    known = {split: _hash_of(splits, split) for split in SPLITS} if isinstance(splits, dict) else {}
    if text.digest == known.get("train"):
        return "the model was trained on this text"
    if command.data is None or text.digest in known.values():
        return None
    return "given with --data: nothing here tells whether the model was trained on some of it"


def _keep_score(scores: dict[int, Tensor | str], trial: Trial, tell: Tell) -> None:
    scores[trial.length] = score(trial, tell)


def _found(trained: Trained, trial: Trial, scores: dict[int, Tensor | str]) -> dict[str, Any]:
    cells = make_cells(scores, trial.scored // max(scores), trial.stride)
    return {
        "checkpoint": trained.about["fingerprint"],
        "scheme": trial.scheme,
        "rule_change": rule_change(trial.scheme, trained.length),
        "trained_length": trained.length,
        "text": trial.text.name,
        "text_sha256": trial.text.digest,
        "scored": trial.scored,
        "stride": trial.stride,
        "interval": METHOD,
        "cells": [{**asdict(cell), "perplexity": cell.perplexity} for cell in cells],
    }


def describe_evaluation(found: dict[str, Any]) -> str:
    """Return the text that `linbias evaluate` prints."""
    header = ("window", "bits per byte", "95 % interval", "perplexity", "mean context")
    stride = "windows do not overlap" if found["stride"] is None else f"windows move on by {found['stride']:,}"
    label = SCHEMES[found["scheme"]].label
    absent = {cell["length"]: cell["why_not"] for cell in found["cells"] if cell["why_not"] is not None}
    return "\n".join(
        (
            wrap(
                f"{label}, trained on passages of {found['trained_length']:,} bytes, "
                f"tested on {found['scored']:,} bytes of {found['text']}; {stride}"
            ),
            "",
            align(header, [_line(cell) for cell in found["cells"]]),
            "",
            *(wrap(f"{label}: cannot run at {length:,} bytes, because {reason}.") for length, reason in absent.items()),
            *([wrap(found["rule_change"])] if found["rule_change"] else []),
            *([wrap(f"text: {found['seen']}")] if found["seen"] else []),
            wrap(f"interval: {found['interval']}"),
        )
    )


def _line(cell: dict[str, Any]) -> tuple[str, ...]:
    window = f"{cell['length']:,}"
    if cell["why_not"] is not None:
        return window, "cannot run", "", "", ""
    bits = Estimate(**cell["bits"])
    perplexity = perplexity_text(cell["perplexity"], 3)
    return window, f"{bits.mean:.4f}", interval(bits), perplexity, f"{cell['mean_context']:,.1f}"
