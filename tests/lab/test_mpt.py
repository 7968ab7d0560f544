# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace

import pytest
import torch

from linbias.lab.config import ALL_SCHEMES, ConfigError
from linbias.lab.evaluations.config import ExportCommand
from linbias.lab.mpt import export_mpt
from linbias.lab.train import load_checkpoint, train


def test_transformers_reads_the_folder_with_the_same_logits(run, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    path = train(run, tmp_path)
    export_mpt(ExportCommand(checkpoint=path, out=tmp_path / "mpt"))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mpt", output_loading_info=True)
    assert type(model).__name__ == "MptForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(256, (2, 57))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, load_checkpoint(path).decoder()(tokens))


def test_the_folder_s_tokens_are_bytes(run, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    export_mpt(ExportCommand(checkpoint=train(run, tmp_path), out=tmp_path / "mpt"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "mpt")
    text = "a \n~¡é\x00\x7f 漢字 €"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.parametrize("scheme", [name for name in ALL_SCHEMES if name != "alibi"])
def test_what_mpt_has_no_place_for_is_refused_by_name(run, tmp_path, scheme):
    path = train(replace(run, scheme=scheme, train=replace(run.train, steps=1)), tmp_path)
    with pytest.raises(ConfigError, match=f"must be trained with 'alibi' to be exported as MPT, got '{scheme}': MPT"):
        export_mpt(ExportCommand(checkpoint=path, out=tmp_path / "mpt"))
    assert not (tmp_path / "mpt").exists()


def test_the_folder_says_how_long_a_text_it_takes(run, tmp_path):
    path = train(run, tmp_path)
    for given, expected in ((None, 16 * run.train.length), (77, 77)):
        config, *_ = export_mpt(ExportCommand(checkpoint=path, out=tmp_path / "mpt", length=given))
        assert json.loads(config.read_text())["max_seq_len"] == expected
