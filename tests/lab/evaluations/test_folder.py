# SPDX-License-Identifier: Apache-2.0
"""`linbias evaluate --model`, on a model of the lab exported as MPT, and on one that linbias does not know."""

import json
import math
from dataclasses import replace

import pytest
import torch

from linbias.lab.config import ConfigError, EvaluateConfig
from linbias.lab.data import load_corpus
from linbias.lab.evaluate import Trial, score
from linbias.lab.evaluations.config import EvaluateCommand, ExportCommand, FolderConfig, StreamCommand
from linbias.lab.evaluations.folder import open_folder_model, plant_tokens
from linbias.lab.evaluations.of_folder import evaluate_folder
from linbias.lab.evaluations.streaming import stream
from linbias.lab.mpt import export_mpt
from linbias.lab.statistics import Estimate
from linbias.lab.train import load_checkpoint, train

pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")


@pytest.fixture
def checkpoint(run, tmp_path):
    return train(run, tmp_path)


@pytest.fixture
def command(checkpoint, text_file, tmp_path):
    export_mpt(ExportCommand(checkpoint=checkpoint, out=tmp_path / "mpt", length=200))
    return EvaluateCommand(
        model=tmp_path / "mpt",
        data=text_file,
        evaluate=EvaluateConfig(lengths=(24, 48), test_bytes=400),
        folder=FolderConfig(depths=2, trials=3, tokens=90, texts=3, window=8, sinks=2, out=tmp_path / "out"),
    )


def test_a_model_of_the_lab_does_in_its_folder_what_it_does_in_the_lab(command, checkpoint, text_file):
    said, files = evaluate_folder(command)
    found = json.loads((command.folder.out / "evaluation.json").read_text())
    assert sorted(path.name for path in files) == ["evaluation.json", "retrieval.png", "streaming.png"]
    trained, text = load_checkpoint(checkpoint), load_corpus(text_file).test
    assert found["loss"]["scored"] == 384 and found["loss"]["bytes_per_token"] == 1
    for cell in found["loss"]["cells"]:
        trial = Trial(
            trained=trained, scheme="alibi", text=text, length=cell["length"], scored=384, stride=None, device="cpu"
        )
        expected = score(trial).mean().item() / math.log(2)
        assert cell["bits_per_token"]["mean"] == pytest.approx(expected, rel=1e-5)
    streamed = stream(StreamCommand(checkpoint=checkpoint, data=text_file, tokens=90, texts=3, window=8, sinks=2))
    for mine, other in zip(found["streaming"]["curves"], streamed.curves, strict=True):
        assert mine["mode"] == other.mode
        assert [bin["bits"] for bin in mine["bins"]] == pytest.approx([bin["bits"] for bin in other.bins], rel=1e-4)
    assert [row["trials"] for row in found["retrieval"]] == [3] * 4
    assert found["numerics"][0]["limit"] == "below the smallest normal"
    assert str(Estimate(**found["loss"]["cells"][0]["bits_per_token"])) in said


def test_a_model_that_knows_the_answer_is_counted(command, monkeypatch):
    """Of which every answer is made the likeliest, and then every second one."""
    calls = []

    def logits(self, tokens):
        calls.append(tokens)
        text = bytes(tokens[0].tolist()).decode()
        key = text[-6:-3]  # after <ab= and three digits of the answer
        value = text.split(f"<{text[-6:-4]}=")[1][:4]
        assert key.endswith("=")
        right = torch.nn.functional.one_hot(torch.tensor([list(value.encode())]), 256).float()
        return torch.cat((torch.zeros(1, tokens.shape[1] - 4, 256), right), dim=1) * (1 if len(calls) % 2 else -1)

    monkeypatch.setattr("linbias.lab.evaluations.folder.FolderModel.logits", logits)
    evaluate_folder(replace(command, folder=replace(command.folder, tests=("retrieval",))))
    rows = json.loads((command.folder.out / "evaluation.json").read_text())["retrieval"]
    assert [row["hits"] for row in rows] == [2, 1, 2, 1]
    assert {tokens.shape[1] for tokens in calls} == {24, 48}


def test_needles_lie_where_their_depth_says():
    assert plant_tokens([1, 2, 3, 4], [8, 8], [9], 0.0) == [8, 8, 1, 2, 3, 4, 9]
    assert plant_tokens([1, 2, 3, 4], [8, 8], [9], 0.5) == [1, 2, 8, 8, 3, 4, 9]
    assert plant_tokens([1, 2, 3, 4], [8, 8], [9], 1.0) == [1, 2, 3, 4, 8, 8, 9]


def test_a_family_that_linbias_does_not_know_runs_as_transformers_does(command, tmp_path):
    import transformers

    config = transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    folder = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((command.model / name).read_bytes())
    opened = open_folder_model(folder, "cpu")
    assert not opened.patched and "no family that linbias knows" in opened.how
    said, _ = evaluate_folder(
        replace(command, model=folder, folder=replace(command.folder, tests=("loss", "streaming", "numerics")))
    )
    found = json.loads((command.folder.out / "evaluation.json").read_text())
    assert "bits_per_token" in found["loss"]["cells"][0]
    assert found["loss"]["cells"][1]["why_not"].startswith("its positions end at 32")
    assert "why_not" in found["streaming"] and "why_not" in found["numerics"]
    assert "cannot run" in said


def test_what_is_no_causal_model_is_refused(command, tmp_path):
    with pytest.raises(ConfigError, match="model must be a folder with a config.json"):
        evaluate_folder(replace(command, model=tmp_path))
    with pytest.raises(ConfigError, match="either a checkpoint or a model"):
        EvaluateCommand()
    with pytest.raises(ConfigError, match="scheme must not be given with model"):
        evaluate_folder(replace(command, scheme="alibi"))
