# SPDX-License-Identifier: Apache-2.0
"""Calls that are put in another order inside: the same results in the caller's order, with less to compute."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from linbias import alibi_attention, alibi_slopes, grid_positions, key_bounds
from linbias.backends import ordered
from linbias.testing import PROBLEMS, Case, evaluate, make_inputs
from tests.every import every_kernel, skip_unless_it_can
from tests.judged import judged

SPATIAL = [case for case in PROBLEMS if case.metric is not None]


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every call that may be ordered is, however small; holds the orders that were made."""
    made: list[Tensor] = []
    curve = ordered.curve_order

    def noted(tokens: ordered.Tokens) -> Tensor:
        made.append(curve(tokens))
        return made[-1]

    monkeypatch.setattr(ordered, "_PAIRS", 0)
    monkeypatch.setattr(ordered, "curve_order", noted)
    return made


@every_kernel
@pytest.mark.parametrize("case", SPATIAL, ids=str)
def test_output_and_gradients(case: Case, backend: str, orders: list[Tensor]):
    inputs = make_inputs(case)
    skip_unless_it_can(backend, inputs)
    judged(inputs).assert_conforms(backend)
    refused = case.dropout_p > 0 or case.mask is not None or case.tolerance == 0
    assert bool(orders) is not refused


@every_kernel
@pytest.mark.parametrize("padding", [None, "holes"])
@pytest.mark.parametrize("segments", [None, "mixed"])
def test_many_tiles(padding: str | None, segments: str | None, backend: str, orders: list[Tensor]):
    """Queries and keys of different places, in no order, with everything that goes by token."""
    case = Case(
        batch=2, heads=2, kv_heads=1, queries=211, keys=197, positions="points", metric="manhattan", unbiased=3,
        padding=padding, segments=segments, bounds=32, dtype=torch.float64,
    )  # fmt: skip
    inputs = make_inputs(case)
    skip_unless_it_can(backend, inputs)
    judged(inputs).assert_conforms(backend)
    assert orders


@every_kernel
def test_less_is_computed_along_the_curve(backend: str, monkeypatch: pytest.MonkeyPatch):
    query, key, value = torch.randn(3, 1, 2, 48 * 50, 16, generator=torch.Generator().manual_seed(0))
    computed: list[Tensor] = []
    for pairs in (2**62, 0):
        monkeypatch.setattr(ordered, "_PAIRS", pairs)
        _, aux = alibi_attention(
            query, key, value, torch.tensor([4.0, 2.0]), causal=False, metric="euclidean",
            key_positions=grid_positions(48, 50), unbiased=1, key_bounds=key_bounds(key), backend=backend,
            return_aux=True,
        )  # fmt: skip
        computed.append(aux.computed / (48 * 50) ** 2)
    rows, curve = computed
    assert (curve < rows).all(), f"rows {rows.tolist()}, curve {curve.tolist()}"


@every_kernel
def test_dropout_keeps_the_pairs_of_the_caller(backend: str, monkeypatch: pytest.MonkeyPatch):
    inputs = make_inputs(Case(dropout_p=0.3, positions="points", metric="euclidean", queries=131, keys=137))
    skip_unless_it_can(backend, inputs)
    before, _ = evaluate(inputs, backend)
    monkeypatch.setattr(ordered, "_PAIRS", 0)
    after, _ = evaluate(inputs, backend)
    assert all(before[name].equal(after[name]) for name in before)


def attend(query: Tensor, key: Tensor, value: Tensor, points: Tensor) -> Tensor:
    return alibi_attention(
        query, key, value, alibi_slopes(3).double(), causal=False, metric="euclidean", key_positions=points,
        unbiased=1, backend="tiled",
    )  # fmt: skip


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_compiled_and_mapped_as_called(orders: list[Tensor]):
    qkv, points = drawn(3, 5, 2, 3, 150, 7), drawn(5, 150, 2) * 30
    plain = torch.stack([attend(*item, where) for item, where in zip(qkv.unbind(1), points, strict=True)])
    mapped = torch.vmap(attend)(*qkv, points[:, None].expand(5, 2, 150, 2))
    torch.testing.assert_close(mapped, plain, rtol=0, atol=1e-13)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(*qkv[:, 0], points[0])
    torch.testing.assert_close(compiled, plain[0], rtol=0, atol=1e-13)
    assert len({len(order) for order in orders}) == 2, "one order for all items, and one for each"


def test_the_operator_knows_nothing_of_it(orders: list[Tensor]):
    query, key, value = (each.requires_grad_() for each in drawn(3, 1, 3, 70, 8).unbind(0))
    torch.autograd.gradcheck(attend, (query, key, value, drawn(70, 2)), fast_mode=True)
    assert orders


PEAK = """
import torch
from linbias import alibi_attention, grid_positions

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

def grown(side):
    query, key, value = torch.randn(3, 1, 1, side * side, 32)
    before = peak()
    where = grid_positions(side, side)
    alibi_attention(query, key, value, torch.tensor([2.0]), causal=False, metric="euclidean", key_positions=where)
    return peak() - before

grown(8)
print(grown(256))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read in /proc")
def test_memory_of_65_536_tiles_is_linear():
    """A few tensors like query, key and value of 8 MiB; a bias would be 16 GiB."""
    done = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 128 * 1024
