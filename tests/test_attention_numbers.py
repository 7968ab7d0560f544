# SPDX-License-Identifier: Apache-2.0
"""Precision and memory: no bias is rounded, and none is made."""

import math
import subprocess
import sys

import pytest
import torch

from linbias import alibi_attention, alibi_slopes, merge
from tests.every import every_backend, every_kernel
from tests.flat import HALF, assert_close, flat


def total_variation(found: torch.Tensor, exact: torch.Tensor) -> float:
    return 0.5 * (found.double() - exact).abs().sum().item()


def last_row(slope: float, keys: int) -> torch.Tensor:
    """Flat scores: exp(-slope * distance), normalised, in float64."""
    return (-slope * torch.arange(keys - 1, -1, -1, dtype=torch.float64)).softmax(-1)


def test_what_half_positions_would_do():
    assert torch.arange(4096).bfloat16().unique().numel() == 769
    assert torch.arange(4096).half().unique().numel() == 3073
    tied = (0.5 * torch.arange(4096).bfloat16()).float().softmax(-1)
    assert_close(tied[-8:], [0.125] * 8, atol=2e-4)
    assert total_variation(tied, last_row(0.5, 4096)) == pytest.approx(0.42, abs=0.01)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_of_any_dtype_see_exact_distances(backend: str, dtype: torch.dtype):
    # One value column a key from the far end, and one for the rest, so that no T x T value is needed.
    keys = 65536
    slopes = alibi_slopes(8)
    value = torch.zeros(1, 1, keys, 9, dtype=dtype)
    value[0, 0, torch.arange(keys - 8, keys), torch.arange(8)] = 1.0
    value[0, 0, : keys - 8, 8] = 1.0
    query, key = torch.zeros(1, 8, 1, 4, dtype=dtype), torch.zeros(1, 1, keys, 4, dtype=dtype)
    found = alibi_attention(query, key, value, slopes, causal=True, backend=backend)
    rounding = torch.finfo(dtype).eps / 2
    for head, slope in enumerate(slopes.tolist()):
        exact = last_row(slope, keys)
        exact = torch.cat((exact[-8:], exact[:-8].sum(0, keepdim=True)))
        assert total_variation(found[0, head, 0], exact) < 1e-6 + rounding
        assert found[0, head, 0, :8].unique().numel() == 8 or slope < torch.finfo(dtype).eps


def test_slopes_that_were_rounded_are_refused():
    # What rounding would cost: 0.31 logits at distance 4096 for 16 heads, 4.3 for 32.
    for heads, error in ((16, 0.31), (32, 4.3)):
        lost = (alibi_slopes(heads).bfloat16().double() - alibi_slopes(heads).double()).abs().max().item() * 4096
        assert lost == pytest.approx(error, rel=0.6)
    query = torch.zeros(1, 16, 2, 4).bfloat16()
    with pytest.raises(TypeError, match="slopes must be float32 or float64, got torch.bfloat16"):
        alibi_attention(query, query, query, alibi_slopes(16).bfloat16(), causal=True)


@every_backend
def test_autocast_does_not_lower_the_bias(backend: str):
    # Zero queries and values that bfloat16 holds exactly: all that could differ is the bias.
    query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 600, 8)
    value = (torch.arange(600) % 7).float().reshape(1, 1, 600, 1).expand(1, 4, 600, 1)
    plain, aux = alibi_attention(query, key, value, alibi_slopes(4), causal=True, backend=backend, return_aux=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast, cast_aux = alibi_attention(
            query, key, value, alibi_slopes(4), causal=True, backend=backend, return_aux=True
        )
    assert_close(cast_aux.lse, aux.lse.double())
    assert_close(cast, plain.bfloat16().double(), atol=2**-8 * 7)


@every_backend
def test_one_convention_for_the_lse(backend: str):
    flat_scores = torch.zeros(1, 1, 4, 4)
    out, aux = alibi_attention(
        flat_scores, flat_scores, torch.eye(4)[None, None], HALF, causal=True, backend=backend, return_aux=True
    )
    assert aux.lse[0, 0, 3].item() == pytest.approx(0.7873387, abs=1e-6)
    by_index = math.log(sum(math.exp(0.5 * j) for j in range(4)))
    assert by_index == pytest.approx(2.2873387, abs=1e-6)
    halves = []
    for part in (slice(0, 2), slice(2, 4)):
        at = {"query_positions": torch.arange(4), "key_positions": torch.arange(4)[part]}
        half, half_aux = alibi_attention(
            flat_scores, flat_scores[:, :, part], torch.eye(4)[None, None, part], HALF, causal=True, **at,
            backend=backend, return_aux=True,
        )  # fmt: skip
        halves += [half, half_aux.lse]
    merged, lse = merge(*halves)
    assert_close(merged, out.double())
    assert_close(lse, aux.lse.double())


PEAK = """
import resource, sys, torch
from linbias import alibi_attention, alibi_slopes
torch.set_num_threads(1)
batch, tokens, heads, backend = *map(int, sys.argv[1:4]), sys.argv[4]
query, key, value = (torch.randn(batch, heads, tokens, 16) for _ in range(3))
slopes = alibi_slopes(heads)
alibi_attention(query[:, :, :64], key[:, :, :64], value[:, :, :64], slopes, causal=True, backend=backend)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = alibi_attention(query, key, value, slopes, causal=True, backend=backend)
used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
print(used - out.numel() * 4)
"""


def extra_memory(batch: int, tokens: int, heads: int, backend: str) -> float:
    """MiB that a call takes beyond its inputs and output, at its peak, in a process of its own."""
    call = [sys.executable, "-c", PEAK, str(batch), str(tokens), str(heads), backend]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 2**20


@pytest.mark.slow
@every_kernel
def test_no_bias_matrix_is_made(backend: str):
    # One matrix of 8192 x 8192 alone would be 256 MiB in float32, the 32 of the call 8 GiB.
    assert extra_memory(1, 8192, 32, backend) < 64


@pytest.mark.slow
@every_kernel
def test_memory_does_not_grow_with_the_batch(backend: str):
    assert extra_memory(16, 1024, 8, backend) - extra_memory(1, 1024, 8, backend) < 16


@every_kernel
def test_nothing_of_the_size_of_the_matrix_is_kept(backend: str):
    query = torch.randn(1, 4, 300, 8, requires_grad=True)
    slopes = alibi_slopes(4).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda kept: kept
    ):
        alibi_attention(query, query, query, slopes, causal=True, backend=backend)
    assert kept and max(kept) <= query.numel() < 300 * 300


@every_backend
def test_no_length_is_fixed_beforehand(backend: str):
    for keys in (512, 16384, 3):
        found = flat_last(keys, backend)
        assert_close(found, last_row(0.5, keys)[-3:], atol=1e-6)


def flat_last(keys: int, backend: str) -> torch.Tensor:
    value = torch.zeros(1, 1, keys, 3)
    value[0, 0, torch.arange(keys - 3, keys), torch.arange(3)] = 1.0
    return alibi_attention(
        torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, keys, 4), value, HALF, causal=True, backend=backend
    )[0, 0, 0]


def test_flat_rows_to_know():
    assert_close(flat(HALF, 4, 4, causal=True)[0, 0, 3], last_row(0.5, 4))
