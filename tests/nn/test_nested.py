# SPDX-License-Identifier: Apache-2.0
"""Nested tensors through `nn.MultiheadAttention`: each sequence as if it were alone."""

import pytest
import torch

from tests.nn.small import WIDTH, attention, close, inputs, padding

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_each_sequence_is_as_if_alone(layout: torch.layout):
    parts = [inputs(n, WIDTH) for n in (3, 7, 1)]
    module = attention(causal=True)
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    out, weights = module(nested, nested, nested, need_weights=False)
    assert weights is None and out.layout == layout
    (nested + out).sum() if layout == torch.jagged else (nested + out)  # same raggedness
    for part, found in zip(parts, out.unbind(), strict=True):
        close(found, module(part, part, part)[0])
    sum(found.square().sum() for found in out.unbind()).backward()
    leaves = [part.requires_grad_() for part in parts]
    sum(module(part, part, part)[0].square().sum() for part in leaves).backward()
    for leaf, found in zip(leaves, nested.grad.unbind(), strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_cross_attention(layout: torch.layout):
    queries, keys = [inputs(n, WIDTH) for n in (3, 2)], [inputs(n, WIDTH) for n in (5, 4)]
    module = attention()
    query, key = (torch.nested.nested_tensor(parts, layout=layout) for parts in (queries, keys))
    out = module(query, key, key, need_weights=False)[0]
    for i, found in enumerate(out.unbind()):
        close(found, module(queries[i], keys[i], keys[i])[0])
    with pytest.raises(ValueError, match="value must have the key's lengths"):
        module(query, key, torch.nested.nested_tensor(keys[::-1], layout=layout), need_weights=False)


def test_what_has_no_meaning_beside_nested_tensors_is_refused():
    nested = torch.nested.nested_tensor([inputs(n, WIDTH) for n in (3, 7)])
    with pytest.raises(ValueError, match="need_weights must be off beside nested tensors"):
        attention()(nested, nested, nested)
    with pytest.raises(ValueError, match="key_padding_mask, add_zero_attn must be off"):
        attention(add_zero_attn=True)(nested, nested, nested, padding(), need_weights=False)
    with pytest.raises(ValueError, match="query, key and value must all be nested"):
        attention()(nested, inputs(), inputs(), need_weights=False)
