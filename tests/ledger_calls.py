# SPDX-License-Identifier: Apache-2.0
"""Calls that a bound could get wrong, and the truth about them, for the tests of the ledgers that keep bounds."""

import math

import hypothesis.strategies as st
import torch
from torch import Tensor

import linbias
from linbias import alibi_slopes, key_bounds
from linbias.backends import reference, tiled
from linbias.backends.tiled.ledger import Visits
from linbias.backends.tiled.pieces import Call
from linbias.prepare import prepare
from linbias.semantics.blocks import dense
from linbias.semantics.problem import Operands, Problem


def contents(kind: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, T, D), (B, G, S, D) by the trouble they make."""
    batch, heads, kv_heads, queries, keys, dim = shape
    query, key = torch.randn(batch, heads, queries, dim), torch.randn(batch, kv_heads, keys, dim)
    if kind == "sink":
        key[:, :, 0] *= 1000
    elif kind == "spread":
        key *= 10 ** (torch.rand(batch, kv_heads, keys, 1) * 6 - 5)
        query *= 10 ** (torch.rand(batch, heads, queries, 1) * 3 - 2)
    elif kind == "tiny":
        key *= 1e-22
        query *= 1e-18
    elif kind == "subnormal":
        key *= 1e-42
        query *= 1e3
    elif kind == "aligned":
        # Every score reaches its bound: the dot product is the product of the norms.
        direction = torch.nn.functional.normalize(torch.randn(dim), dim=0)
        query, key = query.norm(dim=-1, keepdim=True) * direction, key.norm(dim=-1, keepdim=True) * direction
    elif kind == "far ahead":
        # The nearest keys count for nothing, the far ones for much.
        direction = torch.nn.functional.normalize(torch.randn(dim), dim=0)
        query = 3 * direction.expand_as(query)
        key = -6 * direction + 12 * direction * (torch.arange(keys) < keys // 3)[:, None] + 0.1 * key
    return query, key


CONTENTS = ("normal", "sink", "spread", "tiny", "subnormal", "aligned", "far ahead")
SLOPES = ("press", "zero", "negative", "infinite", "mixed", "items", "steep")


def slope_values(kind: str, batch: int, heads: int) -> Tensor:
    slopes = alibi_slopes(heads)
    if kind == "zero":
        slopes[0] = 0.0
    elif kind == "negative":
        slopes[-1] = -0.01
    elif kind == "infinite":
        slopes[0] = math.inf
    elif kind == "mixed":
        slopes[: min(heads, 3)] = torch.tensor([0.0, math.inf, -0.02])[:heads]
    elif kind == "items":
        slopes = slopes * (1 + torch.arange(batch)[:, None])
    elif kind == "steep":
        slopes = slopes * 8
    return slopes


MASKS = (
    "causal", "both sides", "window and sinks", "prefix", "padding", "segments", "dense mask", "positions", "shuffled",
    "euclidean grid", "manhattan points", "unbiased", "soft cap", "future slopes", "given bounds",
)  # fmt: skip


def options_of(kind: str, batch: int, heads: int, queries: int, keys: int, key: Tensor) -> dict:
    jump = torch.randint(0, 4, (batch, keys)).cumsum(1)
    made = {
        "causal": {"causal": True},
        "both sides": {},
        "window and sinks": {"causal": True, "window": (90, 0), "sinks": 3},
        "prefix": {"causal": True, "prefix": 7},
        "padding": {"key_mask": torch.rand(batch, keys) > 0.3},
        "segments": {
            "query_segments": torch.randint(0, 3, (batch, queries)).sort(1).values,
            "key_segments": torch.randint(0, 3, (batch, keys)).sort(1).values,
        },
        "dense mask": {"attn_mask": torch.rand(1, heads, queries, keys) > 0.4},
        "positions": {"causal": True, "key_positions": jump, "query_positions": jump[:, -queries:]},
        "shuffled": {
            "causal": True,
            "key_positions": torch.randint(-50, 400, (keys,)),
            "query_positions": torch.randint(-50, 400, (queries,)),
        },
        "euclidean grid": {
            "metric": "euclidean",
            "key_positions": linbias.grid_positions(keys, 7)[:keys],
            "query_positions": linbias.grid_positions(queries, 7)[:queries],
        },
        "manhattan points": {
            "metric": "manhattan",
            "key_positions": torch.randn(keys, 3).cumsum(0) * 5,
            "query_positions": torch.randn(queries, 3).cumsum(0) * 5,
        },
        "unbiased": {"unbiased": 3},
        "soft cap": {"causal": True, "softcap": 5.0},
        "future slopes": {"future_slopes": alibi_slopes(heads).flip(0)},
        "given bounds": {"causal": True, "key_bounds": key_bounds(key, 16)},
    }[kind]
    return {"causal": False} | made


@st.composite
def calls(draw) -> tuple[Problem, Operands]:
    torch.manual_seed(draw(st.integers(0, 10**6)))
    batch, kv_heads, group = draw(st.sampled_from([(1, 1, 1), (2, 2, 3), (1, 3, 2)]))
    heads = kv_heads * group
    keys = draw(st.integers(65, 330))
    queries = draw(st.integers(17, keys))
    query, key = contents(draw(st.sampled_from(CONTENTS)), batch, heads, kv_heads, queries, keys, 8)
    slopes = slope_values(draw(st.sampled_from(SLOPES)), batch, heads)
    options = options_of(draw(st.sampled_from(MASKS)), batch, heads, queries, keys, key)
    # A coarse tolerance makes the ledger spend what a bound too low would overdraw visibly.
    tolerance = draw(st.sampled_from([None, 1e-3, 0.05, 0.4]))
    scale = draw(st.sampled_from([None, -0.5, 0.0]))
    options |= {"tolerance": tolerance, "scale": scale}
    return prepare(query, key, torch.randn(*key.shape[:3], 8), slopes, options)


def exactly(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """The same call in float64."""
    # All that is floating, bounds included: a backend reads what it is given as the accumulating type.
    given = operands._asdict()
    wide = {name: each.double() for name, each in given.items() if each is not None and each.is_floating_point()}
    exact = operands._replace(**wide)
    return Problem.of(exact, problem.options), exact


def exact_weights(problem: Problem, operands: Operands) -> Tensor:
    """(B, H, T, S) in float64, from the dense definitions."""
    return reference.weights(*exactly(problem, operands))


def forward_visits(problem: Problem, operands: Operands) -> Visits:
    """What a forward of this call would visit."""
    return tiled.visits_of(Call.of(problem, operands))


def distances(problem: Problem, operands: Operands) -> Tensor:
    """(b, 1, T, S) float64: how far, 0 for pairs without bias."""
    one = torch.ones((1, 1), dtype=torch.float64)
    return dense(operands._replace(slopes=one, future_slopes=None), problem.options)[0]
