# SPDX-License-Identifier: Apache-2.0
"""An engine that shares nothing with this library or with transformers agrees: CTranslate2 on the same checkpoints.

It has its own kernels and its own slopes; only the file format goes through transformers.

With 4 and 6 heads every slope is a power of two, so that Falcon's are exact in bfloat16, which CTranslate2 does not
round to.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

import linbias
from linbias.testing import largest_error
from tests.hf.tiny import VOCABULARY, base, generate, make, tokens, transformers

ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is missing: pip install ctranslate2")

every_convertible = pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon", "falcon-multi-query"])


def convert(model: Any, path: Path) -> Any:
    """The model, saved and read by CTranslate2."""
    words = {f"w{n}": n for n in range(VOCABULARY)}
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers comes with transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path / "model")
    model.save_pretrained(path / "model")
    loaders = ctranslate2.converters.transformers._MODEL_LOADERS
    # Its MPT loader is filed under the name of llm-foundry's configuration.
    with mock.patch.dict(loaders, {"MptConfig": loaders["MPTConfig"]}):
        ctranslate2.converters.TransformersConverter(str(path / "model")).convert(str(path / "converted"))
    return ctranslate2.Generator(str(path / "converted"), compute_type="float32", intra_threads=1)


@pytest.mark.parametrize("heads", [4, 6])
@every_convertible
def test_log_probabilities(kind: str, heads: int, tmp_path: Path):
    model, ids = make(kind, heads=heads), tokens(2, 37)
    engine = convert(model, tmp_path)
    view = engine.forward_batch([[f"w{n}" for n in row] for row in ids.tolist()], return_log_probs=True)
    theirs = torch.from_numpy(numpy.array(view))
    linbias.patch(model)
    torch.testing.assert_close(log_probabilities(model, ids), theirs, atol=2e-5, rtol=0)
    decoder = type(base(model))
    slopes = decoder.alibi_slopes
    with mock.patch.object(decoder, "alibi_slopes", lambda self: slopes(self) * 1.001):
        wrong = largest_error(log_probabilities(model, ids), theirs)
    assert wrong > 1e-3, "a slope 0.1 % too steep must show"


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)


@every_convertible
def test_greedy_text(kind: str, tmp_path: Path):
    model, ids = make(kind, heads=4), tokens(1, 11)
    engine = convert(model, tmp_path)
    options = {"max_length": 20, "sampling_topk": 1, "include_prompt_in_result": False, "end_token": []}
    (result,) = engine.generate_batch([[f"w{n}" for n in ids[0].tolist()]], **options)
    linbias.patch(model)
    ours = generate(model, ids, max_new_tokens=20, do_sample=False)[0, 11:]
    assert result.sequences_ids[0] == ours.tolist()
