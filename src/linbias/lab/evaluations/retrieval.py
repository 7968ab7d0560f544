# SPDX-License-Identifier: Apache-2.0
"""Retrieval: can a model that learned to look up a value do so at greater lengths, and from which depth?"""

import json
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import AnyScheme, TrainedScheme
from ..data import Corpus, Text, load_corpus, require_bytes
from ..environment import machine, versions
from ..model import ByteDecoder, cost_per_token
from ..positions import SCHEMES, why_not
from ..progress import Interrupted, SaveClock, Tell
from ..storage import digest_of_facts, load_tensors, save_tensors
from ..tasks import Task, run_tasks, usable_cores
from ..train import Diverged, load_checkpoint, resolve_device, train, training_cost
from .config import RetrieveCommand
from .needles import NeedleRun, answered, plant

_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked at once: one number of needles, one length, one depth."""

    pairs: int
    length: int
    depth: float


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One scheme, one question."""

    scheme: AnyScheme
    question: Question
    hits: tuple[int, ...] = ()
    """Texts answered, for each seed."""
    trials: int
    """Texts asked, for each seed."""
    why_not: str | None = None
    """Why the scheme cannot be asked; then there are no hits."""

    @property
    def accuracy(self) -> float | None:
        """Share of the texts of all seeds that were answered."""
        return sum(self.hits) / (self.trials * len(self.hits)) if self.hits else None


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """All that was found."""

    answers: tuple[Answers, ...]
    trained_length: int
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    environment: dict[str, Any]
    corpus: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a command will do."""

    command: RetrieveCommand

    @cached_property
    def corpus(self) -> Corpus:
        """The text, read once per process."""
        return _corpus(self.command.data)

    @cached_property
    def device(self) -> str:
        """Where it computes."""
        return resolve_device(self.command.device)

    @cached_property
    def questions(self) -> list[Question]:
        """All questions, the shortest texts first."""
        command = self.command
        return [
            Question(pairs=pairs, length=length, depth=index / (command.depths - 1))
            for length in command.lengths_asked()
            for pairs in command.pairs
            for index in range(command.depths)
        ]

    def run(self, scheme: TrainedScheme, seed: int) -> NeedleRun:
        """What is trained."""
        command = self.command
        return NeedleRun(
            scheme=scheme,
            model=command.model,
            train=replace(command.train, seed=seed),
            corpus=self.corpus,
            device=self.device,
            pairs=command.pairs,
        )

    def schemes(self, trained: TrainedScheme) -> list[AnyScheme]:
        """Return what runs with the weights of a scheme: itself first."""
        return [trained, *(name for name in self.command.test_schemes if SCHEMES[name].trained_as == trained)]

    def tasks(self) -> list[Task]:
        """Return all tasks."""
        command = self.command
        pairs = [(scheme, seed) for scheme in command.schemes for seed in command.seeds]
        asked = sum(question.length * cost_per_token(command.model, question.length) for question in self.questions)
        trainings = [
            Task(
                name=f"train {scheme}, seed {seed}",
                cost=training_cost(command.model, command.train),
                work=partial(_train, command, scheme, seed),
            )
            for scheme, seed in pairs
        ]
        tests = [
            Task(
                name=f"ask {name}, seed {seed}",
                cost=command.trials * asked,
                after=f"train {scheme}, seed {seed}",
                work=partial(_ask, command, scheme, name, seed),
            )
            for scheme, seed in pairs
            for name in self.schemes(scheme)
        ]
        return trainings + tests

    def file(self, scheme: AnyScheme, trained: TrainedScheme, seed: int) -> Path:
        """Return where the hits of a scheme are kept."""
        command, run = self.command, self.run(trained, seed)
        identity = digest_of_facts(
            run=run.identity,
            scheme=scheme,
            trials=command.trials,
            questions=self.questions,
            test=self.corpus.test.digest,
        )
        return command.out / "answers" / f"{scheme}-{seed}-{identity}.safetensors"


@cache
def _corpus(source: Path | None) -> Corpus:
    return load_corpus(source)


def _train(command: RetrieveCommand, scheme: TrainedScheme, seed: int, tell: Tell) -> str | None:
    plan = Plan(command)
    try:
        train(plan.run(scheme, seed), command.out / "checkpoints", tell)
    except Diverged as how:
        tell(1.0, "diverged")
        return f"{scheme}, seed {seed}: {how}"
    return None


def _ask(command: RetrieveCommand, trained: TrainedScheme, scheme: AnyScheme, seed: int, tell: Tell) -> None:
    plan = Plan(command)
    folder, run = command.out / "checkpoints", plan.run(trained, seed)
    if run.divergence(folder) is not None:
        tell(1.0, "")
        return
    decoder = load_checkpoint(run.checkpoint(folder)).decoder(scheme).to(plan.device)
    ask(decoder, plan, plan.file(scheme, trained, seed), tell)


def ask(decoder: ByteDecoder, plan: Plan, file: Path, tell: Tell) -> None:
    """Ask every question that the decoder can take, and keep the hits in `file`; what an earlier call asked is kept.

    Raises: Interrupted: `tell` raised it; what is done is saved.
    """
    hits: list[int] = load_tensors(file)[0]["hits"].tolist() if file.exists() else []
    questions = [each for each in plan.questions if decoder.longest is None or each.length <= decoder.longest]
    clock = SaveClock()
    try:
        tell(len(hits) / len(questions), "")
        while len(hits) < len(questions):
            question = questions[len(hits)]
            hits.append(_count_hits(decoder, plan, question))
            tell(len(hits) / len(questions), f"{question.length:,}, {hits[-1]} of {plan.command.trials}")
            if clock.due():
                _save(file, hits)
    except Interrupted:
        _save(file, hits)
        raise
    _save(file, hits)


def _save(file: Path, hits: list[int]) -> None:
    save_tensors(file, {"hits": torch.tensor(hits, dtype=torch.int64)}, {"kind": "linbias answers"})


def _count_hits(decoder: ByteDecoder, plan: Plan, question: Question) -> int:
    texts = question_texts(plan.corpus.test, question, plan.command.trials).to(plan.device)
    batch = max(1, _TOKENS_AT_ONCE // question.length)
    with torch.no_grad():
        return sum(int(answered(decoder, part).sum()) for part in texts.split(batch))


def question_texts(text: Text, question: Question, trials: int) -> Tensor:
    """Return the texts of a question, (trials, length + 1) int64: the same for every scheme and seed."""
    random = np.random.default_rng((question.pairs, question.length, round(question.depth * 10**6)))
    starts = torch.from_numpy(random.integers(0, len(text.content) - question.length, size=trials))
    places = starts[:, None] + torch.arange(question.length + 1)
    return plant(text.tensor()[places].long(), random, question.pairs, question.depth)


def retrieve(command: RetrieveCommand) -> Retrieval:
    """Train and ask what a command says, or what is missing of it.

    Raises:
        Interrupted: stopped on request; calling again goes on.
        DataError, ConfigError: it cannot be carried out; nothing has run.
    """
    plan = Plan(command)
    longest = plan.questions[-1].length
    require_bytes(plan.corpus.train, command.train.length + 1, f"to train on passages of {command.train.length:,}")
    require_bytes(plan.corpus.test, longest + 1, f"to hide needles in texts of {longest:,}")
    most = len(command.schemes) * len(command.seeds)
    workers = command.workers or (min(usable_cores(), most) if plan.device == "cpu" else 1)
    run_tasks("retrieve", plan.tasks(), workers)
    return Retrieval(
        answers=tuple(
            each for trained in command.schemes for name in plan.schemes(trained) for each in _read(plan, trained, name)
        ),
        trained_length=command.train.length,
        seeds=command.seeds,
        settings=json.loads(json.dumps(asdict(command), default=str)),
        environment={"versions": versions(), "machine": machine(), "device": plan.device, "workers": workers},
        corpus=plan.corpus.describe(),
    )


def _read(plan: Plan, trained: TrainedScheme, scheme: AnyScheme) -> list[Answers]:
    command = plan.command
    folder = command.out / "checkpoints"
    converged = [seed for seed in command.seeds if plan.run(trained, seed).divergence(folder) is None]
    files = [plan.file(scheme, trained, seed) for seed in converged]
    hits = [load_tensors(file)[0]["hits"].tolist() for file in files]
    diverged = None if converged else "every training diverged"
    answers: list[Answers] = []
    for index, question in enumerate(plan.questions):
        reason = why_not(scheme, command.model, command.train.length, question.length) or diverged
        got = () if reason else tuple(each[index] for each in hits)
        answers.append(Answers(scheme=scheme, question=question, hits=got, trials=command.trials, why_not=reason))
    return answers
