# SPDX-License-Identifier: Apache-2.0
"""Sentence embeddings and late chunks are means over what the dense formula gives."""

from pathlib import Path

import pytest
import torch

from linbias.hf import late_chunks, load_tokenizer, sentence_transformer, token_spans
from tests.hf.models import encoder
from tests.hf.models.encoder import TinyConfig, TinyModel, publish


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    encoder.teach(monkeypatch)
    encoder.tokenize(publish(tmp_path, TinyModel(TinyConfig())))
    return tmp_path


def test_late_chunks_are_means_of_one_pass(folder: Path):
    model, text = encoder.load_base(folder), "the sun rose. every dog began to bark."
    ids, spans = token_spans(load_tokenizer(folder), text, ["the sun rose.", "every dog began to bark."])
    with torch.no_grad():
        found = late_chunks(model, ids, spans)
    states = encoder.dense(model, ids)
    exact = torch.stack([states[start:end].mean(0) for start, end in spans])
    assert spans == [(1, 5), (5, 11)]
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("span", [(0, 0), (3, 2), (-1, 2), (2, 8)])
def test_spans_outside_the_text_are_refused(folder: Path, span: tuple[int, int]):
    with pytest.raises(ValueError, match=r"spans\[0\] must be \(start, end\)"):
        late_chunks(encoder.load_base(folder), [1] * 7, [span])


def test_sentences_are_means(folder: Path):
    pytest.importorskip("sentence_transformers", reason="the extra embeddings is not installed")
    with pytest.raises(ValueError, match="no modules.json that says how to pool"):
        sentence_transformer(folder)
    model = sentence_transformer(folder, pooling="mean", device="cpu")
    texts = ["the sun rose over a quiet town", "bark", "every dog in it began"]
    found = torch.as_tensor(model.encode(texts, show_progress_bar=False))
    base, tokenizer = encoder.load_base(folder), load_tokenizer(folder)
    exact = torch.stack([encoder.dense(base, torch.tensor(tokenizer(text)["input_ids"])).mean(0) for text in texts])
    torch.testing.assert_close(found.double(), exact.detach(), atol=1e-5, rtol=1e-5)
