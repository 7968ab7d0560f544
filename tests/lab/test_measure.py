# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from linbias import alibi_slopes
from linbias.lab.config import ConfigError, InspectCommand
from linbias.lab.data import DataError
from linbias.lab.heads import farthest, layers_of, measured_table
from linbias.lab.measure import measure
from linbias.lab.storage import CheckpointError
from linbias.lab.train import load_checkpoint, train

LENGTH = 37


@pytest.fixture
def checkpoint(run, tmp_path):
    return train(run, tmp_path / "runs")


def scores_of(path, text, monkeypatch):
    """Query norms, key norms and content scores (H, T, T) of each layer, from the model's own projections."""
    decoder, found = load_checkpoint(path).decoder(), []
    original = decoder.transformer.positions.attend

    def attend(query, key, value):
        query_HTD, key_HTD = query[0].double(), key[0].double()
        scores = query_HTD @ key_HTD.mT * query.shape[-1] ** -0.5
        found.append((query_HTD.norm(dim=-1), key_HTD.norm(dim=-1), scores))
        return original(query, key, value)

    monkeypatch.setattr(decoder.transformer.positions, "attend", attend)
    with torch.no_grad():
        decoder(text.tensor()[None, :LENGTH].long())
    return found


def test_the_content_bound_holds_for_every_pair_and_comes_from_the_norms(run, checkpoint, text_file, monkeypatch):
    measured = measure(checkpoint, text_file, LENGTH)
    assert (measured.length, measured.text, len(measured.layers)) == (LENGTH, "story.txt, last 10 %", 2)
    for layer, (queries, keys, scores) in zip(
        measured.layers, scores_of(checkpoint, run.corpus.test, monkeypatch), strict=True
    ):
        assert layer.causal
        assert torch.equal(layer.slopes, alibi_slopes(3).double())
        torch.testing.assert_close(layer.query_norms, queries.amax(-1))
        torch.testing.assert_close(layer.key_norms, keys.amax(-1))
        own = scores.diagonal(dim1=1, dim2=2)
        excess = (scores - own[..., None]).tril()
        assert (excess.amax((1, 2)) <= layer.content).all()
        bounds = [
            max(queries[h, i] * keys[h, : i + 1].max() * 8**-0.5 - own[h, i] for i in range(LENGTH)) for h in range(3)
        ]
        torch.testing.assert_close(layer.content, torch.stack(bounds))


def test_each_head_is_shown_where_it_reaches_farthest(checkpoint, text_file):
    command = InspectCommand(model=checkpoint, dtype="float64")
    measured = measure(checkpoint, text_file, LENGTH)
    layers = layers_of(command, measured)
    for head, (layer, fact) in enumerate(farthest(layers)):
        assert fact.reach == max(facts[head].reach for facts in layers)
        assert fact is layers[layer][head]
        assert fact.content == measured.layers[layer].content[head]
    shown = measured_table(command, measured, layers)
    assert max(map(len, shown.splitlines())) <= 80 + len(measured.name)
    assert all(f"{fact.content:.3g}" in shown for _, fact in farthest(layers))


def test_what_has_no_biases_is_refused(run, tmp_path, text_file):
    path = train(replace(run, scheme="rope"), tmp_path)
    with pytest.raises(ConfigError, match=r"model must attend with ALiBi, got .*rope-.*which has no biases"):
        measure(path, text_file, LENGTH)


def test_a_folder_must_leave_no_choice(run, checkpoint, text_file):
    with pytest.raises(ConfigError, match="which holds none; name one"):
        measure(checkpoint.parent.parent, text_file, LENGTH)
    train(replace(run, train=replace(run.train, seed=5)), checkpoint.parent)
    with pytest.raises(ConfigError, match=r"holds alibi-\w+\.safetensors, alibi-\w+\.safetensors; name one"):
        measure(checkpoint.parent, text_file, LENGTH)
    with pytest.raises(CheckpointError, match="existing file"):
        measure(checkpoint.parent / "absent", text_file, LENGTH)
    with pytest.raises(DataError, match="at least 10,000 bytes to read 10,000"):
        measure(checkpoint, text_file, 10_000)


@pytest.fixture
def published(tmp_path):
    """A folder with a tiny BLOOM and a tokenizer of single words."""
    transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers comes with transformers")
    words = {word: n for n, word in enumerate(("nothing", "the", "fox", "met", "year", "In", "hens"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="nothing"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "published"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="nothing").save_pretrained(folder)
    config = transformers.BloomConfig(vocab_size=len(words), hidden_size=24, n_layer=2, n_head=3)
    transformers.BloomForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_published_model_is_measured_by_its_own_tokens(published, text_file):
    measured = measure(published, text_file, LENGTH)
    assert (measured.length, len(measured.layers)) == (LENGTH, 2)
    for layer in measured.layers:
        assert torch.equal(layer.slopes.float(), alibi_slopes(3))
        assert layer.causal
        assert (layer.content >= 0).all()
    (published / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"model must be one that linbias\.hf\.load reads"):
        measure(published, text_file, LENGTH)
