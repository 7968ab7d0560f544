# SPDX-License-Identifier: Apache-2.0
"""The measurement of published encoders: contenders compute the same, and what cannot run is named."""

import importlib.util

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")

from benchmarks import encoder_contenders, encoders
from benchmarks.encoder_contenders import DENSE, ONNX, OURS, PRODUCTS, SDPA, pass_of
from linbias.hf import mlp
from linbias.hf.models import encoder
from linbias.lab.bench.record import Record


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """What a contender changes in its own process."""
    monkeypatch.setattr(encoder, "attend_in_layer", encoder.attend_in_layer)
    monkeypatch.setattr(mlp, "_BLOCK", mlp._BLOCK)


@pytest.mark.parametrize("name", [DENSE, SDPA, ONNX])
def test_every_contender_computes_the_model(name):
    if name == ONNX:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"{package} is missing, which only this measurement uses")
    ids = torch.randint(1, 4000, (1, 41))
    with torch.inference_mode():
        ours = pass_of(OURS, "DNABERT-2", 1, 1)(ids)
        theirs = torch.as_tensor(pass_of(name, "DNABERT-2", 1, 1)(ids))
    # Of norms near 1, summed in other orders over 3,072 elements at most.
    assert (ours - theirs).abs().max() < 2**-16


def test_what_does_not_fit_is_named_with_its_size(monkeypatch):
    monkeypatch.setattr(encoders, "available_gb", lambda: 21.0)
    assert encoders.missing(OURS, 65536) is None
    assert encoders.missing(DENSE, 8192) is None
    assert "4 tensors of 12 x 26,421^2 in float32 are 134 GB" in encoders.missing(DENSE, 26421)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert encoders.missing(ONNX, 512) == "onnx and onnxruntime not installed"


def test_figures_are_of_the_best_times():
    def row(name, shape, length, *times, peak=0.5):
        return {"encoder": name, "shape": shape, "layers": 1, "length": length, "times": list(times), "peak": peak}

    rows = [row(OURS, "JinaBERT", 8192, 2.0, 1.0), row(DENSE, "JinaBERT", 8192, 6.0, 4.0)]
    (found,) = encoders.figures_of(rows)
    assert (found["reached"], found["relation"], found["goal"]) == (4.0, ">=", 3.0)
    rows = [row(OURS, "DNABERT-2", 4096, 1.5, 1.3, peak=0.6), row(PRODUCTS, "DNABERT-2", 4096, 1.0, 1.0)]
    products, memory = encoders.figures_of(rows)
    assert (products["reached"], products["goal"]) == (1.3, 1.3)
    assert (memory["reached"], memory["goal"]) == (0.6, 0.7)
    assert encoders.figures_of(rows[1:]) == []
    record = Record({}, {"one": rows, "two": [{"not_run": "ONNX Runtime", "why": "not installed"}, products, memory]})
    text = encoders.show(record)
    assert "DNABERT-2, 1 layers: seconds" in text
    assert "not run: ONNX Runtime: not installed" in text


def test_a_turn_is_one_pass_in_a_process_of_its_own():
    run = encoders.Contender(OURS, "DNABERT-2", 1, 33, 1)
    try:
        told = [run.turn(), run.turn()]
    finally:
        run.end()
    assert all(turn["seconds"] > 0 and 0.1 < turn["peak_gb"] < 4 for turn in told)


def test_the_shapes_are_the_published_ones():
    model = encoder_contenders.build("DNABERT-2", 1)
    assert (
        sum(part.numel() for part in model.encoder.parameters()) == 9_444_096
    )  # 1,771,776 + 590,592 + 1,536 + 4,718,592 + 2,360,064 + 1,536
