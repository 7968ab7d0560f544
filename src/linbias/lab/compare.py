# SPDX-License-Identifier: Apache-2.0
"""The first experiment: train each positional scheme on short passages, test all of them on longer texts."""

import json
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import AnyScheme, CompareCommand, TrainedScheme, command_line
from .data import Corpus, DataError, load_corpus, printable, require_bytes
from .environment import machine, versions
from .evaluate import Trial, load_scores, score, scored_bytes, testing_cost
from .model import build_decoder, count_parameters
from .positions import SCHEMES, why_not
from .progress import Tell, notice
from .results import Results, Row, make_cells
from .tasks import Task, run_tasks, usable_cores
from .train import ANEW, Diverged, Run, load_checkpoint, resolve_device, train, training_cost


@dataclass(frozen=True)
class Comparison:
    """What a comparison will do, worked out and checked before anything runs."""

    command: CompareCommand

    @cached_property
    def corpus(self) -> Corpus:
        """The text, read once per process."""
        return _corpus(self.command.data)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The test lengths, ascending."""
        return self.command.evaluate.lengths_for(self.command.train.length)

    @cached_property
    def scored(self) -> int:
        """How many bytes of the test text are scored."""
        return scored_bytes(self.corpus.test, self.command.evaluate, self.lengths)

    @cached_property
    def device(self) -> str:
        """Where it computes."""
        return resolve_device(self.command.device)

    @property
    def workers(self) -> int:
        """How many processes; accelerators and their memory are not shared unless asked."""
        if self.command.workers is not None:
            return self.command.workers
        return min(usable_cores(), len(self.command.schemes) * len(self.seeds)) if self.device == "cpu" else 1

    @property
    def checkpoints(self) -> Path:
        """Folder of trained models."""
        return self.command.out / "checkpoints"

    @property
    def scores(self) -> Path:
        """Folder of losses per byte."""
        return self.command.out / "scores"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that each scheme is trained with."""
        return self.command.seeds or (self.command.train.seed,)

    def run(self, scheme: TrainedScheme, seed: int) -> Run:
        """What is trained for `scheme` with `seed`."""
        return Run(
            scheme=scheme,
            model=self.command.model,
            train=replace(self.command.train, seed=seed),
            corpus=self.corpus,
            device=self.device,
        )

    def trials(self, scheme: TrainedScheme) -> list[tuple[AnyScheme, int]]:
        """Return the tests of a trained scheme: itself at every length it can run at, and what explains it."""
        tests: list[tuple[AnyScheme, int]] = [
            (scheme, length) for length in self.lengths if self.why_not(scheme, length) is None
        ]
        beyond = [length for length in self.lengths if length > self.command.train.length]
        stretched = self.stretched(scheme)
        tests += [(name, length) for name in stretched for length in beyond]
        if scheme == "alibi" and beyond and "alibi-window" not in stretched:
            tests.append(("alibi-window", beyond[-1]))
        return tests

    def stretched(self, scheme: TrainedScheme) -> list[AnyScheme]:
        """Return the test-time schemes that the command names and that run with the weights of `scheme`."""
        return [name for name in self.command.test_schemes if SCHEMES[name].trained_as == scheme]

    def why_not(self, scheme: TrainedScheme, length: int) -> str | None:
        """Return why `scheme` cannot be tested at `length`, None if it can."""
        return why_not(scheme, self.command.model, self.command.train.length, length)

    def check(self) -> None:
        """Raise DataError or ConfigError if the plan cannot be carried out."""
        length = self.command.train.length
        require_bytes(self.corpus.train, length + 1, f"to train on passages of {length:,}")
        require_bytes(self.corpus.validation, length + 1, f"to validate on passages of {length:,}")
        assert self.scored > 0 and self.device

    def tasks(self) -> list[Task]:
        """Return all tasks: training first, then tests, the longest first, so that no core idles at the end."""
        several = len(self.seeds) > 1
        named = {seed: f", seed {seed}" if several else "" for seed in self.seeds}
        trainings = [
            Task(
                name=f"train {scheme}{named[seed]}",
                cost=training_cost(self.command.model, self.command.train),
                work=partial(_train, self.command, self.corpus.digest, scheme, seed),
            )
            for scheme in self.command.schemes
            for seed in self.seeds
        ]
        tests = [
            Task(
                name=f"test {name} at {length:,}{named[seed]}",
                cost=testing_cost(self.command.model, length, self.scored, self.command.evaluate.stride),
                after=f"train {scheme}{named[seed]}",
                work=partial(_test, self.command, self.corpus.digest, (scheme, seed), name, length),
            )
            for scheme in self.command.schemes
            for seed in self.seeds
            for name, length in reversed(self.trials(scheme))
        ]
        return trainings + tests


@cache
def _corpus(source: Path | None) -> Corpus:
    return load_corpus(source)


def _plan(command: CompareCommand, digest: str) -> Comparison:
    """The plan of a comparison in another process, which reads the text itself.

    Raises: DataError if it is no longer the text of the comparison.
    """
    plan = Comparison(command)
    if plan.corpus.digest != digest:
        raise DataError(f"data must not change during a comparison, as {str(command.data)!r} did; start it again")
    return plan


def _train(command: CompareCommand, digest: str, scheme: TrainedScheme, seed: int, tell: Tell) -> str | None:
    plan = _plan(command, digest)
    try:
        train(plan.run(scheme, seed), plan.checkpoints, tell)
    except Diverged as how:
        tell(1.0, "diverged")
        return f"{scheme}: {how}"
    return None


def _test(
    command: CompareCommand, digest: str, trained: tuple[TrainedScheme, int], scheme: AnyScheme, length: int, tell: Tell
) -> None:
    plan = _plan(command, digest)
    run = plan.run(*trained)
    if run.divergence(plan.checkpoints) is not None:
        tell(1.0, "")
        return
    trial = _trial(plan, run, scheme, length)
    score(trial, tell, trial.file(plan.scores))


def _trial(plan: Comparison, run: Run, scheme: AnyScheme, length: int) -> Trial:
    return Trial(
        trained=load_checkpoint(run.checkpoint(plan.checkpoints), ANEW),
        scheme=scheme,
        text=plan.corpus.test,
        length=length,
        scored=plan.scored,
        stride=plan.command.evaluate.stride,
        device=plan.device,
    )


def collect(plan: Comparison) -> Results:
    """Read the checkpoints and scores of a plan that was carried out."""
    scored, command = plan.scored, plan.command
    segments = scored // plan.lengths[-1]
    return Results(
        text=plan.corpus.test.name,
        trained_length=command.train.length,
        lengths=plan.lengths,
        scored=scored,
        stride=command.evaluate.stride,
        segments=segments,
        rows=tuple(row for scheme in command.schemes for row in _rows(plan, scheme, segments)),
        command=printable(command_line("compare", command)),
        settings=json.loads(json.dumps(asdict(command), default=printable)),
        corpus={**plan.corpus.describe(), "remark": plan.corpus.remark()},
        environment={"versions": versions(), "machine": machine(), "device": plan.device, "workers": plan.workers},
    )


def _rows(plan: Comparison, trained: TrainedScheme, segments: int) -> list[Row]:
    """The row of a trained scheme, and one for each scheme that was run with its weights."""
    runs = {seed: plan.run(trained, seed) for seed in plan.seeds}
    ends = {seed: run.divergence(plan.checkpoints) for seed, run in runs.items()}
    alive = [runs[seed] for seed in plan.seeds if ends[seed] is None]
    diverged = None if alive else ends[plan.seeds[0]]
    paths = [run.checkpoint(plan.checkpoints) for run in alive]
    about: dict[str, Any] = load_checkpoint(paths[0], ANEW).about if alive else {"seconds": 0.0, "curve": []}
    scores: dict[AnyScheme, dict[int, Tensor | str]] = {
        trained: {length: reason for length in plan.lengths if (reason := plan.why_not(trained, length))}
    }
    for scheme, length in plan.trials(trained):
        files = [_trial(plan, run, scheme, length).file(plan.scores) for run in alive]
        found = diverged or torch.stack([load_scores(file)[0] for file in files])
        scores.setdefault(scheme, {})[length] = found
    for scheme in plan.stretched(trained):
        # Up to the training length they are the scheme itself.
        scores[scheme] = {length: found for length, found in scores[trained].items()} | scores.get(scheme, {})
    return [
        Row(
            scheme=scheme,
            parameters=count_parameters(build_decoder(plan.command.model, scheme, plan.command.train.length, seed=0)),
            seconds=about["seconds"],
            curve=about["curve"],
            checkpoint=paths[0].name if alive else None,
            diverged=diverged,
            seeds=tuple(run.train.seed for run in alive),
            lost={seed: how for seed, how in ends.items() if how is not None and alive},
            cells=make_cells(found, segments, plan.command.evaluate.stride),
        )
        for scheme, found in scores.items()
    ]


def compare(command: CompareCommand) -> Results:
    """Run a comparison, or what is missing of it, and return what it found.

    A scheme whose training diverges is told of where its figures would stand.

    Raises:
        Interrupted: stopped on request; calling again goes on.
        DataError, ConfigError: it cannot be carried out; nothing has run.
    """
    plan = Comparison(command)
    plan.check()
    if (odd := plan.corpus.remark()) is not None:
        notice(odd)
    run_tasks("compare", plan.tasks(), plan.workers)
    return collect(plan)
