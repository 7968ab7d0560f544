# SPDX-License-Identifier: Apache-2.0
import csv
import json
import math
from dataclasses import replace

import pytest
import torch

from linbias import alibi_attention_weights, alibi_slopes
from linbias.lab.config import ConfigError
from linbias.lab.evaluations.attention import Watched, attention_text, look, write_attention
from linbias.lab.evaluations.config import AttentionCommand
from linbias.lab.schemes.alibi import Alibi
from linbias.lab.schemes.base import Positions
from linbias.lab.schemes.relative import Kerple
from linbias.lab.schemes.rotary import Rotary
from linbias.lab.train import train

HEADS, LENGTH = 3, 141  # more than one slice of keys


@pytest.fixture
def command(run, text_file, tmp_path):
    return AttentionCommand(checkpoint=train(run, tmp_path), data=text_file, length=37, texts=2)


def test_mass_and_counts_are_those_of_the_weights():
    query, key, value = torch.randn(3, 2, HEADS, LENGTH, 6).unbind()
    watched = Watched(Alibi(HEADS), [math.log(1e-3), math.log(1e-9)])
    torch.testing.assert_close(watched.attend(query, key, value), Alibi(HEADS).attend(query, key, value))
    weights = alibi_attention_weights(query.double(), key.double(), alibi_slopes(HEADS).double(), causal=True)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    (layer,) = watched.layers
    for d in (0, 1, 17, 140):
        torch.testing.assert_close(layer.mass[:, d], weights[:, :, distance == d].sum(dim=(0, 2)))
    torch.testing.assert_close(layer.first, weights[:, :, 1:, 0].sum(dim=(0, 2)))
    causal = weights[:, :, distance >= 0]
    assert torch.equal(layer.below, torch.stack([(causal <= limit).sum(dim=(0, 2)) for limit in (1e-3, 1e-9)], dim=1))
    assert layer.below[:, 1].min() < layer.below[:, 0].min()


@pytest.mark.parametrize("base", [Rotary(), Positions(), Kerple(HEADS)], ids=["rope", "none", "kerple"])
def test_every_scheme_can_be_watched(base):
    query, key, value = torch.randn(3, 2, HEADS, LENGTH, 6).unbind()
    watched = Watched(base, [-80.0])
    with torch.no_grad():
        out = watched.attend(query, key, value)
        torch.testing.assert_close(out, base.attend(query, key, value))
        # One row of ones as values: the mass of all keys.
        torch.testing.assert_close(watched.layers[0].mass.sum(1), torch.full((HEADS,), 2.0 * LENGTH).double())
    assert watched.layers[0].skipped is None


def test_a_head_of_equal_scores_sees_half_of_what_there_is():
    """Query i gives 1 / (i + 1) to each key, so the first byte's share is the mean of that."""
    query, key = torch.zeros(2, 1, 1, 64, 4).unbind()
    watched = Watched(Positions(), [0.0])
    watched.attend(query, key, key)
    expected = sum(1 / (i + 1) for i in range(1, 64))
    assert watched.layers[0].first.item() == pytest.approx(expected)
    assert watched.layers[0].below.item() == 64 * 65 // 2


def test_numbers_are_the_same_in_every_form(command, tmp_path):
    found = look(command)
    assert [(head.layer, head.head) for head in found.heads] == [(n, h) for n in range(2) for h in range(3)]
    for head in found.heads:
        assert sum(octave["share"] for octave in head.mass) == pytest.approx(1)
        assert head.mass[0]["first"] == 0 and head.mass[-1]["last"] == 36
        assert 0 <= head.half <= head.most < 37 and 0 <= head.skipped < 1
    plot, table, data = write_attention(found, tmp_path)
    plain = json.loads(data.read_text())
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(line["share"]) for line in lines] == [
        octave["share"] for head in plain["heads"] for octave in head["mass"]
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"{found.heads[4].first:.1%}" in attention_text(found)


def test_steep_slopes_leave_the_type_and_are_skipped(command):
    """A window hides pairs, which are not skipped; a head of slope 1/4 is blind in float16 from distance 39 on."""
    long = look(replace(command, length=420, dtype="float16", texts=1))
    gone = [head.below["below the smallest normal"] for head in long.heads if head.layer == 0]
    assert gone[2] > 0.7 and gone[1] < gone[0] < gone[2]
    assert [head.skipped for head in long.heads][2] > 0.2
    windowed = look(replace(command, scheme="alibi-window", length=420, texts=1))
    assert all(0 <= head.skipped < 0.2 for head in windowed.heads)
    assert windowed.notes


def test_a_length_that_a_scheme_cannot_take_is_refused(command, run, tmp_path):
    other = train(replace(run, scheme="learned"), tmp_path)
    with pytest.raises(ConfigError, match="length must be one that 'learned' can run at, got 37: its table ends"):
        look(replace(command, checkpoint=other))
