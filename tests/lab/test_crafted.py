# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that someone made up, or that a disk damaged: an error with advice, and nothing large is made."""

import json

import pytest
import torch
from safetensors.torch import save_file

from linbias.cli import main
from linbias.lab.data import load_corpus
from linbias.lab.evaluate import Trial, score
from linbias.lab.storage import CheckpointError, load_tensors, save_tensors
from linbias.lab.train import Run, load_checkpoint, train
from tests.lab.small import MODEL, TRAIN, StopAfter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    (folder / "story.txt").write_text("".join(f"In year {year} the fox met {year * 37} hens. " for year in range(99)))
    corpus = load_corpus(folder / "story.txt")
    return train(Run(scheme="alibi", model=MODEL, train=TRAIN, corpus=corpus, device="cpu"), folder)


@pytest.fixture
def honest(checkpoint):
    """What an honest checkpoint holds, and what it says of itself."""
    return load_tensors(checkpoint)


def changed(about, where, value):
    """`about` with another value at a path of keys, or without it where the value is `...`."""
    about = json.loads(json.dumps(about))
    *parents, last = where
    inner = about
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return about


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *[((key,), ...) for key in ("kind", "scheme", "model", "train", "curve", "seconds", "fingerprint")],
        *[(("model",), value) for value in ([1, 2], {}, None, "wide", {"layers": 2})],
        *[(("model", "width"), value) for value in (2**40, -24, 0, "24", 24.0, True, None, [24], 48, 10**400)],
        *[(("model", "layers"), value) for value in (2**40, 1, 3, 2.5)],
        *[(("model", "heads"), value) for value in (2**40, "3", 3.0)],
        *[(("train", "length"), value) for value in (2**70, -1, "8", None)],
        *[(("train", "learning_rate"), value) for value in ("1e-2", float("inf"))],
        *[(("scheme",), value) for value in ("rope2", "alibi-window", 3, None, ["alibi"], {})],
        *[(("curve",), value) for value in ([], 3, [[1, 2]], [["a", "b", "c"]], None)],
        (("curve",), [[1, 2.0, float("nan")]]),
        *[(("seconds",), value) for value in ("long", float("inf"))],
        *[(("fingerprint",), value) for value in (None, 3, {})],
        (("step",), 3),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_what_does_not_fit_is_refused_by_name(honest, tmp_path, where, value, capsys):
    tensors, about = honest
    path = tmp_path / "crafted.safetensors"
    save_tensors(path, tensors, changed(about, where, value))
    with pytest.raises(CheckpointError, match=r"checkpoint must .*crafted\.safetensors"):
        load_checkpoint(path)
    assert main(["evaluate", "--checkpoint", str(path)]) == 1
    assert "linbias: error: checkpoint must" in capsys.readouterr().err


@pytest.mark.parametrize("metadata", ["[1,2]", "3", "null", '"text"', "{", "", "[" * 100_000, "9" * 10_000, "{}"])
def test_metadata_of_any_kind_is_refused(tmp_path, metadata):
    path = tmp_path / "crafted.safetensors"
    save_file({"a": torch.zeros(2)}, path, metadata={"linbias": metadata})
    with pytest.raises(CheckpointError, match=r"crafted\.safetensors"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("transformer.wte.weight"), "must have shape .*, got None"),
        (lambda tensors: tensors.update(more=torch.zeros(3)), "'more' must have shape None"),
        (lambda tensors: tensors.update({"transformer.wte.weight": torch.zeros(3)}), r"shape \(256, 24\), got \(3,\)"),
        (
            lambda tensors: tensors.update({"transformer.wte.weight": torch.zeros(256, 24, dtype=torch.int8)}),
            "must hold floats, got torch.int8",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(honest, tmp_path, change, message):
    tensors, about = honest
    change(tensors)
    path = tmp_path / "crafted.safetensors"
    save_tensors(path, tensors, about)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("data", [..., None, [], {}, {"source": 3, "splits": {}}, {"source": None, "splits": "all"}])
def test_data_without_hashes_are_not_read(honest, tmp_path, data, capsys):
    tensors, about = honest
    path = tmp_path / "crafted.safetensors"
    save_tensors(path, tensors, changed(about, ("data",), data))
    assert main(["evaluate", "--checkpoint", str(path)]) == 1
    told = capsys.readouterr().err
    assert "which keeps no hash of it; give the text to score with --data" in told
    assert "reading" not in told


@pytest.mark.parametrize("splits", [{}, {"train": 3}, {"test": {"sha256": ["a"]}}])
def test_a_path_named_by_a_stranger_is_told_and_its_hash_must_fit(honest, tmp_path, splits, capsys):
    tensors, about = honest
    secret = tmp_path / "secret\x1b[2J.txt"
    secret.write_text("do not tell " * 50)
    path = tmp_path / "crafted.safetensors"
    save_tensors(path, tensors, changed(about, ("data",), {"source": str(secret), "splits": splits}))
    assert main(["evaluate", "--checkpoint", str(path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("reading '")
    assert "\x1b" not in told
    assert "train, validation, test changed since" in told


def test_damaged_files_of_our_own_come_with_advice(run, corpus, tmp_path):
    with pytest.raises(Exception, match="stopped after"):
        train(run, tmp_path, StopAfter(2))
    (partial,) = tmp_path.glob("*.partial.safetensors")
    tensors, about = load_tensors(partial)
    save_tensors(partial, {"losses": tensors["losses"]}, about)
    with pytest.raises(CheckpointError, match=r"does not hold what a training saves; delete it to start over"):
        train(run, tmp_path)
    partial.unlink()
    path = train(run, tmp_path)
    trial = Trial(
        trained=load_checkpoint(path), scheme="alibi", text=corpus.test, length=8, scored=64, stride=None, device="cpu"
    )
    file = tmp_path / "scores.safetensors"
    for tensors, about in (({"nats": torch.zeros(3)}, {"windows": 8}), ({}, {"windows": 8}), ({}, {})):
        save_tensors(file, tensors, about)
        with pytest.raises(CheckpointError, match=r"scores\.safetensors.*; delete it to start over"):
            score(trial, file=file)
    for damaged in (path, file):
        damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="delete it to start over"):
        train(run, tmp_path)
    with pytest.raises(CheckpointError, match="delete it to start over"):
        score(trial, file=file)
