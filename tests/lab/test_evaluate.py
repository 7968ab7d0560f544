# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linbias.lab.config import ConfigError, EvaluateConfig
from linbias.lab.data import DataError, Text
from linbias.lab.evaluate import Trial, check_scheme, plan_windows, position_curve, score, scored_bytes
from linbias.lab.progress import Interrupted
from linbias.lab.train import load_checkpoint, train
from tests.lab.small import StopAfter


@pytest.fixture
def trial(run, tmp_path):
    trained = load_checkpoint(train(run, tmp_path))
    return Trial(trained=trained, scheme="alibi", text=run.corpus.test, length=8, scored=96, stride=None, device="cpu")


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 100))
def test_case_k1_every_stride_scores_every_byte_once(length, stride, more):
    stride, scored = min(stride, length), length + more
    windows = plan_windows(scored, length, stride)
    guesses = [
        start + place
        for start, first in zip(windows.starts.tolist(), windows.firsts.tolist(), strict=True)
        for place in range(first, length)
    ]
    assert guesses == list(range(scored))
    context = windows.context().tolist()
    assert all(0 <= one < length for one in context)
    assert context[:length] == list(range(length))
    assert all(one >= length - stride for one in context[length:])


def test_case_k1_contexts_of_the_two_tables():
    apart = plan_windows(16 * 1024, 1024).context()
    assert apart.double().mean().item() == 511.5
    sliding = plan_windows(16 * 1024, 1024, stride=1).context()
    assert sliding[:1024].tolist() == list(range(1024))
    assert (sliding[1024:] == 1023).all()


@pytest.mark.parametrize(("scored", "length", "stride"), [(8, 9, 9), (8, 4, 5), (8, 4, 0)])
def test_impossible_windows_are_refused(scored, length, stride):
    with pytest.raises(ConfigError, match=f"stride {stride}, length {length}, {scored} bytes"):
        plan_windows(scored, length, stride)


@pytest.mark.parametrize("stride", [None, 1, 3])
def test_score_is_the_loss_of_each_byte_after_its_window(trial, stride):
    found = score(replace(trial, stride=stride))
    decoder = trial.trained.decoder()
    text = list(trial.text.content)
    context = plan_windows(96, 8, stride).context().tolist()
    for byte in (0, 1, 7, 8, 13, 50, 95):
        seen = torch.tensor([text[byte - context[byte] : byte + 1]])
        expected = -decoder(seen)[0, -1].log_softmax(-1)[text[byte + 1]]
        torch.testing.assert_close(found[byte], expected)


def test_all_lengths_score_the_same_bytes(trial):
    """A model that ignores all but the last byte must get the same losses whatever the window."""
    weights = {
        name: torch.zeros_like(value) if name.endswith("out_proj.weight") else value
        for name, value in trial.trained.weights.items()
    }
    blind = replace(trial, trained=replace(trial.trained, weights=weights))
    expected = score(blind)
    for length, stride in [(96, None), (32, None), (12, 5), (7, 7)]:
        torch.testing.assert_close(score(replace(blind, length=length, stride=stride)), expected)


def test_limited_alibi_equals_alibi_up_to_the_training_length_only(trial):
    limited = replace(trial, scheme="alibi-window")
    torch.testing.assert_close(score(limited), score(trial))
    full = score(replace(trial, length=48))
    window = score(replace(limited, length=48))
    context = plan_windows(96, 48).context()
    torch.testing.assert_close(window[context < 8], full[context < 8])
    assert (window - full)[context >= 8].abs().max() > 1e-4


def test_interrupted_scores_go_on_and_finished_ones_are_kept(trial, tmp_path, monkeypatch):
    monkeypatch.setattr("linbias.lab.evaluate._TOKENS_AT_ONCE", 24)
    file = tmp_path / "scores" / "alibi.safetensors"
    with pytest.raises(Interrupted, match="alibi at 8: stopped after 6 windows"):
        score(trial, StopAfter(2), file)
    watched = StopAfter(100)
    found = score(trial, watched, file)
    assert watched.fractions == [0.5, 0.75, 1.0]
    assert torch.equal(found, score(trial))
    again = StopAfter(100)
    assert torch.equal(score(trial, again, file), found)
    assert again.fractions == [1.0]


def test_an_interrupt_before_the_first_window_is_no_loss(trial, tmp_path):
    file = tmp_path / "alibi.safetensors"
    with pytest.raises(Interrupted):
        score(trial, StopAfter(0), file)
    assert torch.equal(score(trial, file=file), score(trial))


def test_case_l4_a_last_smaller_batch_changes_nothing(trial, monkeypatch):
    whole = score(trial)
    monkeypatch.setattr("linbias.lab.evaluate._TOKENS_AT_ONCE", 40)  # 5 windows at once: 5, 5, 2
    torch.testing.assert_close(score(trial), whole)


def test_whatever_could_change_the_scores_changes_their_name(trial):
    about = {**trial.trained.about, "fingerprint": "another"}
    variants = [
        trial,
        replace(trial, scheme="alibi-window"),
        replace(trial, length=9),
        replace(trial, scored=88),
        replace(trial, stride=1),
        replace(trial, text=replace(trial.text, content=trial.text.content + b"!")),
        replace(trial, trained=replace(trial.trained, about=about)),
    ]
    assert len({variant.identity for variant in variants}) == len(variants)


def test_scored_bytes_are_whole_segments_of_the_longest_length():
    text = Text(name="text", content=b"x" * 1000)
    config = EvaluateConfig(lengths=(7, 100), test_bytes=500)
    assert scored_bytes(text, config, (7, 100)) == 500
    assert scored_bytes(text, replace(config, test_bytes=10**6), (7, 100)) == 900
    assert scored_bytes(text, replace(config, test_bytes=10**6), (999,)) == 999
    with pytest.raises(DataError, match="at least 1,001 bytes to score a window of 1,000, got 1,000"):
        scored_bytes(text, replace(config, test_bytes=10**6), (1000,))
    with pytest.raises(ConfigError, match="test_bytes must be at least the longest length, 600, got 500"):
        scored_bytes(text, config, (600,))


def test_a_scheme_needs_the_weights_it_was_trained_with(trial):
    check_scheme(trial.trained, "alibi")
    check_scheme(trial.trained, "alibi-window")
    with pytest.raises(ConfigError, match="scheme must be 'alibi' .* got 'rope'"):
        check_scheme(trial.trained, "rope")


def test_position_curve_averages_in_bins_that_double():
    context = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 1])
    nats = torch.tensor([8.0, 4, 2, 2, 1, 1, 1, 5, 6, 2]) * torch.log(torch.tensor(2.0))
    curve = position_curve(nats, context, per_octave=1)
    assert [(one["first"], one["last"], one["bytes"]) for one in curve] == [(0, 0, 2), (1, 1, 2), (2, 3, 2), (4, 7, 4)]
    assert [one["bits"] for one in curve] == pytest.approx([7.0, 3.0, 2.0, 2.0])


@given(st.integers(1, 700), st.integers(1, 4))
def test_position_curve_bins_hold_what_they_say(longest, per_octave):
    context = torch.arange(longest)
    curve = position_curve(torch.ones(longest), context, per_octave)
    assert [one["bytes"] for one in curve] == [one["last"] - one["first"] + 1 for one in curve]
    assert sum(one["bytes"] for one in curve) == longest
