# SPDX-License-Identifier: Apache-2.0
import csv
import json
import math
from dataclasses import replace

import pytest
import torch

from linbias import alibi_slopes
from linbias.lab.config import ConfigError
from linbias.lab.evaluations.config import StreamCommand
from linbias.lab.evaluations.streaming import stream, streaming_text, write_streaming
from linbias.lab.schemes.alibi import Alibi
from linbias.lab.schemes.base import Learned, Positions, Sinusoidal
from linbias.lab.schemes.relative import T5Bias
from linbias.lab.schemes.rotary import Rotary
from linbias.lab.schemes.streamed import Streamed, streams
from linbias.lab.train import load_checkpoint, train

HEADS, WINDOW, SINKS, LENGTH = 3, 5, 2, 19


def kept_one_by_one(base, query, key, value, cached):
    """A cache that holds the sinks and the last keys, told the position of each, one query after the other."""
    out = torch.zeros_like(value)
    for i in range(LENGTH):
        kept = [j for j in range(i + 1) if j < SINKS or i - j < WINDOW]
        places = list(range(len(kept))) if cached else kept
        places = torch.tensor(places)
        own = places[-1:]
        q, k = query[:, :, i : i + 1], key[:, :, kept]
        bias = 0.0
        if isinstance(base, Rotary):
            q, k = base.turned(q, own, LENGTH), base.turned(k, places, LENGTH)
        if isinstance(base, Alibi):
            bias = -alibi_slopes(HEADS)[:, None, None] * (own[:, None] - places)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        out[:, :, i : i + 1] = scores.softmax(-1) @ value[:, :, kept]
    return out


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("base", [Alibi(HEADS), Rotary(), Positions()], ids=["alibi", "rope", "none"])
def test_one_pass_is_a_cache_that_forgets(base, cached):
    query, key, value = torch.randn(3, 2, HEADS, LENGTH, 6).unbind()
    found = Streamed(base, WINDOW, SINKS, cached=cached).attend(query, key, value)
    torch.testing.assert_close(found, kept_one_by_one(base, query, key, value, cached), rtol=1e-5, atol=1e-5)


def test_what_cannot_forget_says_so():
    assert streams(Alibi(2)) is None and streams(Sinusoidal()) is None
    assert "a window of its own" in streams(Alibi(2, window=3))
    assert "only ALiBi" in streams(T5Bias(2)) and "only ALiBi" in streams(Learned(8, 4))


@pytest.fixture
def command(run, text_file, tmp_path):
    return StreamCommand(checkpoint=train(run, tmp_path), data=text_file, tokens=90, texts=3, sinks=2)


def test_numbers_are_the_same_in_every_form(command, tmp_path):
    found = stream(command)
    full, window, text, cache = found.curves
    assert (found.window, found.texts) == (8, 3)
    assert [bin["last"] for bin in full.bins][-1] == 89
    # Up to the window nothing is left out.
    for curve in (window, text, cache):
        assert [bin["bits"] for bin in curve.bins[:4]] == pytest.approx(
            [bin["bits"] for bin in full.bins[:4]], rel=1e-5
        )
        assert curve.bins[-1]["bits"] != full.bins[-1]["bits"]
    assert full.farther.mean == pytest.approx(full.beyond.mean - window.beyond.mean)
    plot, table, data = write_streaming(found, tmp_path)
    plain = json.loads(data.read_text())
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(line["bits"]) for line in lines] == [
        bin["bits"] for curve in plain["curves"] for bin in curve["bins"]
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert str(full.beyond) in streaming_text(found)


def test_loss_is_that_of_the_whole_text_read_at_once(command, run):
    found = stream(replace(command, texts=1))
    decoder = load_checkpoint(command.checkpoint).decoder()
    tokens = torch.tensor(list(run.corpus.test.content[:91]))[None]
    nats = decoder.nats(tokens[:, :-1], tokens[:, 1:])[0, 8:]
    assert found.curves[0].beyond.mean == pytest.approx(nats.mean().item() / math.log(2))


def test_what_leaves_nothing_out_or_cannot_stream_is_refused(command, run, tmp_path):
    with pytest.raises(ConfigError, match="tokens must be more than window and sinks, 92, got 90"):
        stream(replace(command, window=90))
    other = train(replace(run, scheme="kerple"), tmp_path)
    with pytest.raises(ConfigError, match="scheme must be one that can keep a part of its keys, got 'kerple'"):
        stream(replace(command, checkpoint=other))
