# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linbias.lab.schemes.relative import BLOCK, Kerple, T5Bias

HEADS = 3


def schemes():
    torch.manual_seed(3)
    t5 = T5Bias(HEADS)
    torch.nn.init.normal_(t5.table)
    kerple = Kerple(HEADS)
    kerple.reset_parameters()
    return [t5, kerple]


def dense(scheme, query, key, value):
    """The same attention with its bias as one matrix, in fp64."""
    length = query.shape[-2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    if isinstance(scheme, T5Bias):
        bias = scheme.table.double()[scheme.bucket(distance.clamp(min=0))].movedim(-1, 0)
    else:
        r, a = scheme.log_r.double().exp(), scheme.log_a.double().exp()
        bias = -r[:, None, None] * torch.log(1 + a[:, None, None] * distance.clamp(min=0))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
    return scores.masked_fill(distance < 0, -math.inf).softmax(-1) @ value


@pytest.mark.parametrize("index", [0, 1], ids=["t5", "kerple"])
@pytest.mark.parametrize("length", [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 13])
def test_blocks_give_what_one_matrix_gives(index, length):
    scheme = schemes()[index]
    given = [torch.randn(2, HEADS, length, 6, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, HEADS, length, 6)
    found = scheme.attend(*given)
    expected = dense(scheme, *(tensor.double() for tensor in given))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(scheme.attend(*given), found)
    wanted = [*given, *scheme.parameters()]
    grads = torch.autograd.grad((found * weight).sum(), wanted)
    exact = torch.autograd.grad((expected * weight).sum(), wanted)
    for one, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_t5_s_buckets_are_transformers():
    pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(2000)
    expected = T5Attention._relative_position_bucket(-distance, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(T5Bias(2).bucket(distance), expected)


def test_kerple_falls_and_stays_positive():
    scheme = Kerple(5)
    scheme.reset_parameters()
    curve = scheme.curve(300, torch.device("cpu"))
    assert (curve[:, 0] == 0).all() and (curve.diff(dim=1) < 0).all()
    with torch.no_grad():
        scheme.log_r -= 50.0
    assert (scheme.curve(2, torch.device("cpu"))[:, 1] < 0).all()


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation returned."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.most = max(self.most, *sizes, 0)
        return result


@pytest.mark.parametrize("index", [0, 1], ids=["t5", "kerple"])
def test_no_more_than_a_block_of_queries_times_the_keys_is_held(index):
    """Neither in one tensor, forward or backward, nor in what is kept for backward."""
    scheme, length = schemes()[index], 9 * BLOCK + 5
    given = [torch.randn(1, HEADS, length, 6, requires_grad=True) for _ in range(3)]
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = scheme.attend(*given)
        out.sum().backward()
    # The table from which a block's bias is read is one block wider than the keys.
    assert largest.most <= HEADS * BLOCK * (length + BLOCK)
    assert sum(kept.values()) <= HEADS * BLOCK * length
