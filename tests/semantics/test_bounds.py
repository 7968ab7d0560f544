# SPDX-License-Identifier: Apache-2.0
"""Numbers that bound a head's sight: norms, key bounds, reach. docs/proof.md names these tests."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linbias import alibi_bias, alibi_slopes, key_bounds, reach
from linbias.semantics.bounds import upper_norms
from tests.flat import assert_close
from tests.ledger_calls import CONTENTS, contents


@settings(max_examples=100)
@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(1, 130),
    st.floats(-45, 38),
    st.integers(0, 10**6),
)
def test_norms_are_never_too_small(dtype: torch.dtype, dim: int, power: float, seed: int):
    torch.manual_seed(seed)
    vectors = (torch.randn(5, dim, dtype=torch.float64) * 10**power).to(dtype)
    vectors = vectors.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    norms = upper_norms(vectors)
    # Scaled, so that the check itself cannot underflow.
    peak = vectors.double().abs().amax(-1).clamp_min(1e-300)
    exact = peak * (vectors.double() / peak[:, None]).norm(dim=-1)
    assert (norms.double() >= exact).all()
    close = exact * (1 + (dim + 20) * torch.finfo(norms.dtype).eps) + 2 * torch.finfo(norms.dtype).tiny * math.sqrt(dim)
    assert ((norms.double() <= close) | (exact > torch.finfo(norms.dtype).max / 2)).all()


def test_norms_of_subnormal_keys_do_not_vanish():
    norms = upper_norms(torch.tensor([[1e-45, 0.0], [3e-30, 4e-30], [3e30, 4e30], [0.0, math.nan], [math.inf, 0.0]]))
    assert norms[0] >= 1e-45 and 5e-30 <= norms[1] < 5.01e-30 and 5e30 <= norms[2] < 5.01e30
    assert norms[3].isnan() and norms[4] == math.inf


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 90), st.sampled_from(CONTENTS), st.integers(0, 10**6))
def test_key_bounds_hold(keys: int, block: int, kind: str, seed: int):
    torch.manual_seed(seed)
    query, key = contents(kind, 2, 4, 2, keys, keys, 8)
    bounds = key_bounds(key, block)
    blocks = torch.arange(keys) // block
    product = query.double() @ key.double().repeat_interleave(2, 1).mT
    norms = bounds.norms.double().repeat_interleave(2, 1)[:, :, None, blocks]
    length = query.double().norm(dim=-1, keepdim=True)
    assert (product <= length * norms * (1 + 1e-15)).all()
    assert bounds.norms.shape == (2, 2, -(-keys // block)) and bounds.block == block


@pytest.mark.parametrize(
    ("key", "block", "message"),
    [(torch.zeros(2, 3, 4), 64, "four|shape"), (torch.zeros(1, 1, 2, 2).int(), 64, "floating"),
     (torch.zeros(1, 1, 2, 2), 0, "at least 1")],
)  # fmt: skip
def test_key_bounds_say_what_is_wrong(key: Tensor, block: int, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        key_bounds(key, block)


@settings(max_examples=200)
@given(st.floats(1e-4, 4.0), st.floats(1e-12, 0.5), st.floats(-3.0, 30.0))
def test_reach_is_the_smallest(slope: float, tolerance: float, content: float):
    found = reach(torch.tensor(slope, dtype=torch.float64), tolerance=tolerance, content=content).item()

    def tail(distance: float) -> float:
        return content - slope * (distance + 1) - math.log(-math.expm1(-slope)) - math.log(tolerance)

    assert found == int(found) and found >= 0
    assert tail(found) <= 1e-9 * (1 + found * slope)
    assert found == 0 or tail(found - 1) > -1e-9 * (1 + found * slope)


def test_reach_is_infinite_where_nothing_bounds_it():
    found = reach(torch.tensor([[0.0, -0.5, math.inf, 0.5]]), tolerance=0.0)
    assert found.tolist() == [[math.inf, math.inf, 0.0, math.inf]]
    content = torch.tensor([[0.0], [math.inf]])
    assert reach(torch.tensor([0.5]), tolerance=0.1, content=content).tolist() == [[6.0], [math.inf]]
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        reach(torch.tensor([0.5]), tolerance=-0.1)
    with pytest.raises(TypeError, match="floating"):
        reach(torch.tensor([1]), tolerance=0.1)


def test_bounds_where_no_value_can_be_read():
    key = torch.randn(3, 2, 5, 7, 4)
    norms = torch.vmap(lambda item: key_bounds(item, 4).norms)(key)
    torch.testing.assert_close(norms, torch.stack([key_bounds(item, 4).norms for item in key]))
    each_key = key[0]
    with FakeTensorMode() as mode:
        found = key_bounds(mode.from_tensor(each_key), 4)
    assert found.norms.shape == (2, 5, 2)


@pytest.mark.parametrize(
    "numbers", [{"tolerance": "a"}, {"tolerance": None}, {"tolerance": 0.1, "content": "a"}], ids=str
)
def test_reach_takes_numbers(numbers: dict):
    with pytest.raises(TypeError, match=f"{list(numbers)[-1]} must be a Python number"):
        reach(torch.tensor([0.5]), **numbers)


def test_how_far_a_head_looks():
    slopes = alibi_slopes(8)
    assert (1 / slopes).tolist() == [2, 4, 8, 16, 32, 64, 128, 256]
    # exp(-m * 1024): little is left at slope 2**-8, nearly everything at 2**-16.
    assert_close(torch.exp(alibi_bias(slopes[-1:], torch.tensor([1024]), torch.tensor([0])))[0, 0, 0], [0.0183156])
    assert_close(torch.exp(-1024 * alibi_slopes(32, max_bias=16.0)[-1]), 0.984496)
    # Beyond its reach a flat head has no more than the tolerance left.
    for slope, distance in zip(slopes.tolist(), reach(slopes, tolerance=1e-6).tolist(), strict=True):
        tail = math.exp(-slope * (distance + 1)) / (1 - math.exp(-slope))
        assert tail <= 1e-6 < tail * math.exp(slope)
