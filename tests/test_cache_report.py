# SPDX-License-Identifier: Apache-2.0
"""The report of what each head can still see."""

import torch

from linbias import alibi_attention_weights
from linbias.cache import KVCache
from tests.caching import make, one_hot


def test_report_counts_what_each_head_can_see():
    """Slope 0.5 reaches 36 keys back at this tolerance (linbias.reach), slope 0 all the way."""
    cache = one_hot(100)
    report = cache.report(torch.tensor([0.5, 0.0]), tolerance=2**-25)
    assert report.reach.tolist() == [[36.0, torch.inf]]
    assert (report.visible.tolist(), report.kept.tolist(), report.sinks) == ([[37, 100]], [100], 1)
    lines = str(report).splitlines()
    assert "of the 100 kept" in lines[0] and lines[2].split()[3:5] == ["37", "37.0%"]
    assert lines[3].split()[2:5] == ["inf", "100", "100.0%"]


def test_the_weight_of_a_sink_fades_with_its_distance():
    """e^(-m T), for a steep head over the normaliser 1 / (1 - e^-m) of the keys before it."""
    report = one_hot(41).report(torch.tensor([0.5, 0.25]))
    expected = [torch.tensor(-m * 40.0).exp() * (1 - torch.tensor(-m).exp()) for m in (0.5, 0.25)]
    torch.testing.assert_close(report.sink_weight[0].float(), torch.stack(expected), atol=0, rtol=1e-4)


def test_report_of_queries_allows_for_their_content():
    """The reach found holds back no key that matters: what lies beyond weighs less than the tolerance."""
    query, key, value = make(300, batch=2)
    cache = KVCache()
    cache.append(3 * key, value)
    slopes = torch.tensor([0.5, 0.7, 0.9, 1.1, 0.3, 0.2])
    report = cache.report(slopes, query=query[:, :, -1:], tolerance=1e-3)
    shares = alibi_attention_weights(query[:, :, -1:].double(), 3 * key.double(), slopes, causal=True)[:, :, 0]
    distance = torch.arange(299, -1, -1)
    beyond = torch.where(distance > report.reach[..., None], shares, 0.0).sum(-1)
    assert (report.visible < 300).all() and (beyond <= 1e-3).all() and beyond.max() > 0
