# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from linbias.lab import progress
from linbias.lab import train as training
from linbias.lab.config import TrainConfig
from linbias.lab.data import Corpus, DataError, Text
from linbias.lab.progress import Interrupted
from linbias.lab.storage import CheckpointError, load_tensors
from linbias.lab.train import Trainer, learning_rate, load_checkpoint, passages, train
from tests.lab.small import MODEL, TRAIN, StopAfter


def weights_of(path):
    return load_checkpoint(path).weights


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("scheme", ["alibi", "learned"])
def test_a_run_interrupted_twice_ends_with_the_bits_of_one_that_was_not(run, tmp_path, scheme):
    run = replace(run, scheme=scheme)
    whole = train(run, tmp_path / "whole")
    broken = tmp_path / "broken"
    for updates in (3, 1):
        with pytest.raises(Interrupted, match=f"{scheme}: stopped after"):
            train(run, broken, StopAfter(updates))
    watched = StopAfter(100)
    path = train(run, broken, watched)
    assert watched.fractions == [4 / 7, 5 / 7, 6 / 7, 1.0]
    assert_same_bits(weights_of(path), weights_of(whole))
    assert load_checkpoint(path).about["curve"] == load_checkpoint(whole).about["curve"]
    assert list(broken.iterdir()) == [path]


def test_a_run_killed_outright_goes_on_from_its_last_save(run, tmp_path, monkeypatch):
    whole = train(run, tmp_path / "whole")
    monkeypatch.setattr(progress, "SAVE_SECONDS", 0.0)

    class Kill(StopAfter):
        def __call__(self, fraction, note):
            super().__call__(fraction, note)
            if fraction == 5 / 7:
                raise MemoryError

    with pytest.raises(MemoryError):
        train(run, tmp_path / "killed", Kill(100))
    watched = StopAfter(100)
    path = train(run, tmp_path / "killed", watched)
    assert watched.fractions[0] == 4 / 7
    assert_same_bits(weights_of(path), weights_of(whole))


def test_a_finished_run_is_not_trained_again(run, tmp_path, monkeypatch):
    path = train(run, tmp_path)
    monkeypatch.setattr(training, "Trainer", None)
    watched = StopAfter(100)
    assert train(run, tmp_path, watched) == path
    assert watched.fractions == [1.0]


def test_whatever_could_change_the_weights_changes_the_checkpoint_s_name(run, corpus):
    other_text = Text(name="other", content=corpus.train.content + b"!")
    variants = [
        run,
        replace(run, scheme="rope"),
        replace(run, model=replace(MODEL, layers=3)),
        replace(run, train=replace(TRAIN, seed=2)),
        replace(run, corpus=replace(corpus, train=other_text)),
        replace(run, device="cuda"),
    ]
    assert len({variant.identity for variant in variants}) == len(variants)
    renamed = replace(corpus, name="elsewhere", source=None, test=other_text)
    assert replace(run, corpus=renamed).identity == run.identity


def test_the_state_of_another_run_is_refused(run, tmp_path):
    path = tmp_path / "state.safetensors"
    Trainer(run).save_partial(path)
    with pytest.raises(CheckpointError, match="belongs to another run; delete it"):
        Trainer(replace(run, scheme="rope")).restore(path)


def test_an_unfinished_state_is_no_checkpoint(run, tmp_path):
    path = tmp_path / "state.safetensors"
    Trainer(run).save_partial(path)
    with pytest.raises(CheckpointError, match="training is complete"):
        load_checkpoint(path)


def test_learning_rate_rises_and_falls_linearly():
    config = TrainConfig(steps=10, warmup=3, learning_rate=8.0)
    rates = [learning_rate(config, step) for step in range(10)]
    assert rates == pytest.approx([2.0, 3.6, 4.8, 5.6, 4.8, 4.0, 3.2, 2.4, 1.6, 0.8])


def test_passages_follow_from_seed_and_step_alone():
    text = torch.arange(256, dtype=torch.uint8)
    config = TrainConfig(length=5, passages=3, seed=7)
    first = passages(text, config, step=4)
    assert torch.equal(first, passages(text, config, step=4))
    assert not torch.equal(first, passages(text, config, step=5))
    assert not torch.equal(first, passages(text, replace(config, seed=8), step=4))
    assert first.shape == (3, 6)
    assert (first.diff(dim=1) == 1).all()


def test_passages_reach_both_ends_of_the_text_and_no_farther():
    text = torch.arange(8, dtype=torch.uint8)
    config = TrainConfig(length=5, passages=100)
    starts = passages(text, config, step=0)[:, 0]
    assert starts.unique().tolist() == [0, 1, 2]


def test_a_text_of_one_passage_is_enough_and_one_byte_less_is_not(run):
    def corpus_of(size):
        text = Text(name="tiny", content=b"x" * size)
        return Corpus(name="tiny", source=None, train=text, validation=text, test=text)

    Trainer(replace(run, corpus=corpus_of(9))).update()
    with pytest.raises(DataError, match="at least 9 bytes to train on passages of 8, got 8"):
        Trainer(replace(run, corpus=corpus_of(8)))


def test_training_learns(run):
    """Bytes of this text are predictable from the one before: the loss must fall from 8 bits to below 1."""
    text = Text(name="alphabet", content=b"abcdefghijklmnopqrstuvwxyz" * 40)
    corpus = Corpus(name="alphabet", source=None, train=text, validation=text, test=text)
    trainer = Trainer(replace(run, corpus=corpus, train=replace(TRAIN, steps=60)))
    losses = [trainer.update() for _ in range(60)]
    assert losses[0] > 7
    assert losses[-1] < 1
    step, training_loss, validation_loss = trainer.curve[-1]
    assert step == 60
    assert training_loss == pytest.approx(sum(losses[-6:]) / 6)
    assert validation_loss < 1


def test_a_checkpoint_says_how_it_came_about(run, tmp_path):
    path = train(run, tmp_path)
    trained = load_checkpoint(path)
    assert (trained.scheme, trained.model, trained.length) == ("alibi", MODEL, 8)
    assert TrainConfig(**trained.about["train"]) == TRAIN
    assert trained.about["data"]["source"] == str(run.corpus.source)
    assert trained.about["seconds"] > 0
    assert path.name == f"alibi-{run.identity}.safetensors"
    assert set(load_tensors(path)[0]) == set(trained.decoder().state_dict())
