# SPDX-License-Identifier: Apache-2.0
"""Where tokens stand: given to the call or held by a context, on a line and on a plane."""

import pytest
import torch
from torch import nn

import linbias
from linbias import alibi_attention, grid_positions
from linbias.nn import MultiheadAttention
from tests.nn.small import HEADS, TOKENS, WIDTH, attention, inputs

GRID = grid_positions(1, 7) + torch.tensor([0.5, 2.0])


def formula(module: MultiheadAttention, x: torch.Tensor, **options: object) -> torch.Tensor:
    """The module's output by its projections and `alibi_attention`."""
    parts = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    out = alibi_attention(query, key, value, module.slopes(), **options)
    return module.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("metric", [None, "euclidean", "manhattan"])
@pytest.mark.parametrize("by", ["call", "at", "model"])
def test_places(by: str, metric: str | None):
    torch.manual_seed(0)
    module, x = attention(metric=metric), inputs()
    places = torch.tensor([0, 9, 4, 30, 31, 2, 5]) if metric is None else torch.rand(TOKENS, 2) * 9
    wanted = formula(module, x, causal=False, metric=metric, query_positions=places, key_positions=places)
    if by == "call":
        found, weights = module(x, x, x, query_positions=places)
    elif by == "at":
        with module.at(places):
            found, weights = module(x, x, x)
    else:
        with linbias.nn.at(nn.Sequential(module), places):
            found, weights = module(x, x, x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, TOKENS))


def test_an_encoder_on_a_grid():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True, dropout=0.0)
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, metric="euclidean")
    encoder, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), inputs()
    with linbias.nn.at(encoder, GRID):
        found = encoder(x)
        turned = torch.randperm(TOKENS)
        with linbias.nn.at(encoder, GRID[turned]):  # the inner one counts while it lasts
            same = encoder(x[:, turned])
        assert encoder(x).equal(found)
    torch.testing.assert_close(same, found[:, turned])
    with pytest.raises(ValueError, match="positions must be given under metric"):
        encoder(x)


def test_queries_elsewhere_than_keys():
    torch.manual_seed(0)
    module, query, key = attention(), inputs(2, 3, WIDTH), inputs(2, 5, WIDTH)
    places = dict(query_positions=torch.tensor([4, 0, 9]), key_positions=torch.tensor([1, 3, 3, 8, 2]))
    found, _ = module(query, key, key, **places)
    rows = ({"query_positions": place[None]} for place in places["query_positions"])
    parts = [module(query[:, n : n + 1], key, key, **places | row)[0] for n, row in enumerate(rows)]
    alone = torch.cat(parts, 1)
    torch.testing.assert_close(found, alone)
    with module.at(**places):
        assert module(query, key, key)[0].equal(found)
    assert not module(query, key, key)[0].equal(found)


def test_compiled_within_a_context():
    torch.manual_seed(0)
    module, x = attention(metric="euclidean"), inputs()
    compiled = torch.compile(lambda x: module(x, x, x, need_weights=False)[0], fullgraph=True)
    for places in (GRID, 3 * GRID):
        with module.at(places):
            torch.testing.assert_close(compiled(x), module(x, x, x, need_weights=False)[0])


def test_what_is_wrong_is_named():
    module, x = attention(metric="euclidean"), inputs()
    with pytest.raises(ValueError, match="module must hold a linbias.nn.MultiheadAttention, got a Linear"):
        with linbias.nn.at(nn.Linear(2, 2), GRID):
            pass
    with pytest.raises(TypeError, match="query_positions must be a"):
        with module.at([0, 1]):
            pass
    with module.at(GRID), pytest.raises(ValueError, match="positions, metric must be off beside nested tensors"):
        nested = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
        module(nested, nested, nested, need_weights=False)
    with pytest.raises(ValueError, match="metric must be None, 'euclidean' or 'manhattan'"):
        attention(metric="cosine")
