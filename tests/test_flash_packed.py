# SPDX-License-Identifier: Apache-2.0
"""The packed forms: their parts' results, gradients in the packed tensor, flash-attn's order of arguments."""

import inspect

import pytest
import torch

from linbias import flash

BOUNDS, LONGEST = torch.tensor([0, 5, 5, 13]), 8
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.0])
OPTIONS = dict(softmax_scale=0.3, causal=True, window_size=(6, -1), softcap=4.0, alibi_slopes=SLOPES)


def packed_calls():
    torch.manual_seed(0)
    q, qkv, kv = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 3, 4, 16), torch.randn(2, 11, 2, 2, 16)
    flat, three, two = torch.randn(13, 4, 16), torch.randn(13, 3, 4, 16), torch.randn(13, 2, 2, 16)
    ends = (BOUNDS, BOUNDS, LONGEST, LONGEST)
    return {
        "qkv": (flash.flash_attn_qkvpacked_func, (qkv,), flash.flash_attn_func, lambda x: x.unbind(2), ()),
        "kv": (flash.flash_attn_kvpacked_func, (q, kv), flash.flash_attn_func, lambda q, x: (q, *x.unbind(2)), ()),
        "varlen qkv": (
            *(flash.flash_attn_varlen_qkvpacked_func, (three,), flash.flash_attn_varlen_func),
            *(lambda x: x.unbind(1), (BOUNDS, LONGEST)),
        ),
        "varlen kv": (
            *(flash.flash_attn_varlen_kvpacked_func, (flat, two), flash.flash_attn_varlen_func),
            *(lambda q, x: (q, *x.unbind(1)), ends),
        ),
    }


@pytest.mark.parametrize("name", ["qkv", "kv", "varlen qkv", "varlen kv"])
def test_packed_is_unpacked(name: str):
    function, given, plain, parts, places = packed_calls()[name]
    ends = (BOUNDS, BOUNDS, LONGEST, LONGEST) if places else ()
    leaves = [each.clone().requires_grad_() for each in given]
    found, wanted = function(*leaves, *places, **OPTIONS), plain(*parts(*leaves), *ends, **OPTIONS)
    assert found.equal(wanted)
    weights = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), leaves), torch.autograd.grad((wanted * weights).sum(), leaves),
        strict=True,
    ):  # fmt: skip
        assert one.equal(other)
    with_lse, wanted_too = (
        call(*tensors, *end, **OPTIONS, return_attn_probs=True)
        for call, tensors, end in ((function, given, places), (plain, parts(*given), ends))
    )
    assert all(one.equal(other) for one, other in zip(with_lse, wanted_too, strict=True))


@pytest.mark.parametrize("name", ["qkv", "kv", "varlen qkv", "varlen kv"])
def test_options_stand_where_flash_attn_has_them(name: str):
    function, given, _, _, places = packed_calls()[name]
    options = list(inspect.signature(function).parameters)[len(given) + len(places) :]
    assert options == [
        "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
        "return_attn_probs",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["qkv", "kv", "varlen qkv", "varlen kv"])
def test_other_shapes_are_refused_by_name(name: str):
    function, given, _, _, places = packed_calls()[name]
    packed = given[-1]
    for wrong in (packed[0], packed[..., :1, :, :]):
        with pytest.raises(ValueError, match=r"kv must have shape \(.*, heads, head dim\), got"):
            function(*given[:-1], wrong, *places)
