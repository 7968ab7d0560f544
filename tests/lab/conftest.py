# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch

from linbias.lab.config import AnyScheme
from linbias.lab.data import Corpus, load_corpus
from linbias.lab.results import Results, Row, make_cells
from linbias.lab.train import Run
from tests.lab.small import MODEL, TRAIN


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """Some 7,000 bytes of prose-like text in which no two sentences are the same."""
    path = tmp_path / "story.txt"
    path.write_text("".join(f"In year {year} the fox met {year * 37 % 101} hens. " for year in range(200)))
    return path


@pytest.fixture
def corpus(text_file: Path) -> Corpus:
    return load_corpus(text_file)


@pytest.fixture
def run(corpus: Corpus) -> Run:
    return Run(scheme="alibi", model=MODEL, train=TRAIN, corpus=corpus, device="cpu")


@pytest.fixture
def results() -> Results:
    """Made-up results: ALiBi improves with length, RoPE breaks, the learned table ends."""
    generator = torch.Generator().manual_seed(11)
    nats = 1.5 + torch.rand(256, generator=generator)
    refusals: dict[int, torch.Tensor | str] = {32: "its table ends at the training length, 16", 64: "the same"}
    scores: dict[AnyScheme, dict[int, torch.Tensor | str]] = {
        "alibi": {16: nats, 32: nats - 0.05, 64: nats - 0.07},
        "rope": {16: nats - 0.1, 32: nats + 0.2, 64: nats + 1.0},
        "learned": {16: nats, **refusals},
        "alibi-window": {64: nats - 0.06},
    }
    return Results(
        text="a <b>bold</b> & nameless text",
        trained_length=16,
        lengths=(16, 32, 64),
        scored=256,
        stride=None,
        segments=4,
        rows=tuple(_row(scheme, found) for scheme, found in scores.items()),
        command="linbias compare --data 'a <b>bold</b> name' --steps 7",
        settings={
            "model": {"layers": 2, "width": 24, "heads": 3},
            "train": {"steps": 7, "passages": 3, "length": 16, "learning_rate": 0.01, "seed": 1},
        },
        corpus={
            "name": "made up",
            "source": "/far/a <i>way</i>.txt",
            "remark": None,
            "splits": {"test": {"text": "<none>", "bytes": 1234567, "sha256": "ab" * 32}},
        },
        environment={
            "versions": {"linbias": "0.0", "torch": "2", "matplotlib": None},
            "machine": {"processor": "abacus", "cores": 1},
            "device": "cpu",
            "workers": 1,
        },
    )


def _row(scheme: AnyScheme, scores: dict[int, torch.Tensor | str]) -> Row:
    return Row(
        scheme=scheme,
        parameters=12345,
        seconds=6.5,
        curve=[(3, 4.0, 4.25), (7, 3.0, 3.125)],
        checkpoint=f"{scheme}-0123456789ab.safetensors",
        cells=make_cells(scores, segments=4, stride=None),
    )
