# SPDX-License-Identifier: Apache-2.0
import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from linbias.lab.config import ConfigError
from linbias.lab.evaluations import retrieval
from linbias.lab.evaluations.config import RetrieveCommand
from linbias.lab.evaluations.needles import NeedleRun, answered, most_pairs, plant
from linbias.lab.evaluations.retrieval import Plan, Question, question_texts, retrieve
from linbias.lab.evaluations.retrieval_show import answer_rows, retrieval_text, wilson, write_retrieval
from linbias.lab.model import build_decoder
from linbias.lab.progress import Interrupted
from linbias.lab.storage import load_tensors
from linbias.lab.train import Trainer
from tests.lab.small import MODEL, StopAfter


@pytest.fixture
def command(text_file, tmp_path):
    return RetrieveCommand(
        data=text_file,
        out=tmp_path / "out",
        workers=1,
        model=MODEL,
        train=replace(RetrieveCommand().train, length=40, steps=3, passages=2),
        schemes=("alibi", "learned", "rope"),
        lengths=(40, 90),
        depths=3,
        trials=5,
        pairs=(1, 2),
        seeds=(1, 4),
    )


@pytest.mark.parametrize("depth", [None, 0.0, 0.37, 1.0])
@pytest.mark.parametrize("length", [35, 36, 90])
def test_needles_are_whole_and_the_question_is_for_the_one_at_its_depth(length, depth):
    random = np.random.default_rng(5)
    for pairs in range(1, most_pairs(length) + 1):
        texts = torch.full((7, length + 1), ord("."))
        for row in plant(texts, random, pairs, depth):
            text = bytes(row.tolist()).decode()
            body, question = text[:-8], text[-8:]
            needles = [part.split(">")[0] for part in body.split("<")[1:]]
            assert len(needles) == pairs and all(len(needle) == 7 for needle in needles)
            assert len({needle[:2] for needle in needles}) == pairs
            assert body.count(".") == length + 1 - 8 - 9 * pairs
            assert question[0] == "<" and question[1:] in needles
            place = body.index(question + ">")
            assert depth is None or place == round(depth * (length + 1 - 17))


def test_an_answer_counts_if_every_digit_is_the_likeliest():
    """A decoder that knows the answers to all but the second text, where it misses one digit."""
    tokens = plant(torch.full((3, 41), ord(".")), np.random.default_rng(2), 1)

    def decoder(seen):
        logits = torch.nn.functional.one_hot(tokens[:, 1:], 256).float()
        logits[1, -2] = logits[1, -2].roll(1)
        logits[:, :-4] = 0
        return logits

    assert answered(decoder, tokens).tolist() == [True, False, True]


def test_every_scheme_and_seed_is_asked_the_same():
    command = RetrieveCommand()
    text = Plan(command).corpus.test
    question = Question(pairs=2, length=150, depth=0.25)
    one, other = (question_texts(text, question, 6) for _ in range(2))
    assert torch.equal(one, other) and one.shape == (6, 151)
    assert not torch.equal(one, question_texts(text, replace(question, depth=0.5), 6))


def test_the_answers_weigh_as_much_as_the_text(run):
    needles = NeedleRun(**{**vars(run), "train": replace(run.train, length=40)}, pairs=(1, 2))
    model, text = build_decoder(MODEL, "alibi", 40, seed=1), run.corpus.train.tensor()
    assert needles.identity != run.identity != replace(needles, pairs=(1,)).identity
    assert needles.loss(model, text, 0) == needles.loss(model, text, 0)
    # An untrained model guesses nothing: both means are near those of the passages.
    assert needles.loss(model, text, 0).item() == pytest.approx(2 * run.loss(model, text, 0).item(), rel=0.2)
    losses = [needles.loss(model, text, step).item() for step in range(4)]
    assert len(set(losses)) == 4


def test_what_was_found_is_the_same_in_every_form(command, tmp_path):
    found = retrieve(command)
    assert len(found.answers) == 5 * 2 * 2 * 3
    assert {each.scheme for each in found.answers} == {"alibi", "alibi-interpolated", "learned", "rope", "rope-yarn"}
    refused = {(each.scheme, each.question.length) for each in found.answers if each.why_not}
    assert refused == {("learned", 90)}
    assert all(len(each.hits) == 2 for each in found.answers if not each.why_not)
    plot, table, data = write_retrieval(found, tmp_path)
    plain = json.loads(data.read_text())["answers"]
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["scheme"], row["hits"], row["trials"]) for row in plain] == [
        (row["scheme"], int(row["hits"]), int(row["trials"])) for row in lines
    ]
    assert plain == answer_rows(found.answers)
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = retrieval_text(found)
    assert "cannot run" in said
    assert "RoPE, YaRN: not trained; the weights of RoPE, and beyond 40 bytes" in said.replace("\n", " ")


def test_a_second_run_asks_and_trains_nothing(command, monkeypatch):
    first = retrieve(command)
    monkeypatch.setattr(Trainer, "update", None)
    monkeypatch.setattr(retrieval, "answered", None)
    assert retrieve(command).answers == first.answers


def test_interrupted_questions_go_on(command):
    plan = Plan(command)
    decoder = build_decoder(MODEL, "rope", 40, seed=1)
    whole, file = command.out / "whole.safetensors", command.out / "stopped.safetensors"
    retrieval.ask(decoder, plan, whole, StopAfter(100))
    with pytest.raises(Interrupted):
        retrieval.ask(decoder, plan, file, StopAfter(4))
    watched = StopAfter(100)
    retrieval.ask(decoder, plan, file, watched)
    assert watched.fractions[0] == pytest.approx(4 / 12)
    assert torch.equal(*(load_tensors(each)[0]["hits"] for each in (file, whole)))


def test_lengths_that_cannot_hold_the_needles_are_refused(command):
    with pytest.raises(ConfigError, match="lengths must be at least .* to hold 9 needles and a question, got 40"):
        replace(command, pairs=(9,))
    with pytest.raises(ConfigError, match="seeds must be one or more, all different"):
        replace(command, seeds=(1, 1))
    with pytest.raises(ConfigError, match="pairs must be at least 1, got 0"):
        replace(command, pairs=(0,))


def test_wilson_s_interval():
    """Literal values of the textbook formula: 8 of 10, none of 64, all of 64."""
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 64) == pytest.approx((0.0, 0.0566238), abs=1e-6)
    assert wilson(64, 64) == pytest.approx((0.9433762, 1.0), abs=1e-6)


@pytest.mark.slow
def test_a_small_model_learns_to_look_up(text_file, tmp_path):
    command = RetrieveCommand(
        data=text_file,
        out=tmp_path,
        workers=1,
        train=replace(RetrieveCommand().train, length=40, steps=900),
        schemes=("alibi",),
        lengths=(40,),
        depths=2,
        trials=32,
    )
    found = retrieve(command)
    assert all(each.accuracy >= 0.5 for each in found.answers if each.question.depth == 1.0)
