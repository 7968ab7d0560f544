# SPDX-License-Identifier: Apache-2.0
"""The flash-attn door: its signatures, its layouts, and its formulas written out densely."""

import inspect

import pytest
import torch
from torch import Tensor

from linbias import alibi_attention, alibi_slopes, flash, merge
from tests.flash_kernel import CALLS, assert_is_kernels, kernel, make

# Name and default in order, read in flash-attn 2.8's flash_attn_interface.py; ... stands for none.
SIGNATURES = {
    "flash_attn_func": {
        "q": ...,
        "k": ...,
        "v": ...,
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
    },
    "flash_attn_varlen_func": {
        "q": ...,
        "k": ...,
        "v": ...,
        "cu_seqlens_q": ...,
        "cu_seqlens_k": ...,
        "max_seqlen_q": ...,
        "max_seqlen_k": ...,
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
        "block_table": None,
    },
    "flash_attn_with_kvcache": {
        "q": ...,
        "k_cache": ...,
        "v_cache": ...,
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns(name):
    found = inspect.signature(getattr(flash, name)).parameters
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in found.values())
    defaults = {key: ... if one.default is one.empty else one.default for key, one in found.items()}
    assert list(defaults.items()) == list(SIGNATURES[name].items())


@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (3, 11), (11, 3)])
def test_output_and_lse_mean_what_flash_attns_do(queries, keys, options):
    """The key form where the kernel has it, the relative form elsewhere, +inf in rows that see nothing."""
    q, k, v = make(queries, keys)
    slopes = torch.stack([alibi_slopes(6), alibi_slopes(6, rule="geometric")])
    out, lse, dmask = flash.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **options)
    assert (out.shape, lse.shape, dmask.shape) == ((2, queries, 6, 5), (2, 6, queries), (0,))
    assert out.is_contiguous()
    assert_is_kernels((out, lse), q, k, v, slopes, **options)
    assert torch.equal(flash.flash_attn_func(q, k, v, alibi_slopes=slopes, **options), out)


def test_the_key_form_is_slope_times_row_above_the_relative_one():
    """Flat scores, slope 0.5, row 3: 2.2873387 with flash-attn's causal kernel, 0.7873387 with its windowed one."""
    q = torch.zeros(1, 4, 1, 8)
    half = torch.tensor([0.5])
    for window, expected in (((-1, -1), 2.2873387), ((3, 0), 0.7873387)):
        _, lse, _ = flash.flash_attn_func(
            q, q, q, causal=True, window_size=window, alibi_slopes=half, return_attn_probs=True
        )
        assert abs(lse[0, 0, 3].item() - expected) < 1e-6


def test_without_slopes_it_is_plain_attention():
    q, k, v = make(5, 5, heads=3)
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    torch.testing.assert_close(flash.flash_attn_func(q, k, v, causal=True).transpose(1, 2), expected)


def test_the_same_with_and_without_the_flash_door_in_fp16():
    q, k, v = (torch.randn(2, 55, 4, 32).half() for _ in range(3))
    by_flash = flash.flash_attn_func(q, k, v, causal=True, alibi_slopes=alibi_slopes(4))
    direct = alibi_attention(*(t.transpose(1, 2) for t in (q, k, v)), alibi_slopes(4), causal=True)
    assert (by_flash.transpose(1, 2) - direct).abs().max() < 2e-3
    none = flash.flash_attn_func(q, k, v, causal=True)
    assert (by_flash - none).abs().max() > 1e-2


def test_slopes_of_wrong_shape_or_dtype_are_refused():
    q, k, v = make(4, 4)
    for wrong in (torch.ones(3), torch.ones(6, 1), torch.ones(3, 6), torch.ones(2)):
        with pytest.raises(ValueError, match=r"alibi_slopes must have shape \(6,\), \(1, 6\) or \(2, 6\)"):
            flash.flash_attn_func(q, k, v, alibi_slopes=wrong)
    with pytest.raises(TypeError, match="alibi_slopes must be float32 or float64"):
        flash.flash_attn_func(q, k, v, alibi_slopes=torch.ones(6, dtype=torch.float16))


def test_heads_and_tokens_swapped_are_refused():
    """The other layout: H = 8 heads before T = 77 tokens."""
    q, k = torch.zeros(1, 8, 77, 16), torch.zeros(1, 8, 78, 16)
    with pytest.raises(ValueError, match=r"q must have a positive multiple of k's heads.*\(batch, tokens, heads"):
        flash.flash_attn_func(q, k, k, alibi_slopes=alibi_slopes(8))
    with pytest.raises(ValueError, match=r"alibi_slopes must have shape \(77,\)"):
        flash.flash_attn_func(q, q, q, alibi_slopes=alibi_slopes(8))
    with pytest.raises(ValueError, match=r"k_cache's heads.*\(batch, slots, heads, head dim\)"):
        flash.flash_attn_with_kvcache(q, k, k, alibi_slopes=alibi_slopes(8))
    with pytest.raises(ValueError, match=r"k must have shape \(batch, tokens, heads, head dim\), got \(8, 78, 16\)"):
        flash.flash_attn_func(q, k[0], k, alibi_slopes=alibi_slopes(8))


def test_gradients_flow_to_inputs_slopes_and_from_the_lse():
    q, k, v = (tensor.double() for tensor in make(4, 6, batch=1, heads=2, kv_heads=1))
    slopes = alibi_slopes(2).double()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, slopes)]

    def total(found: tuple[Tensor, ...]) -> Tensor:
        return (found[0] * found[0]).sum() + found[1].sin().sum()

    for options in ({"causal": True}, {"window_size": (2, 1)}):
        found = flash.flash_attn_func(*inputs[:3], alibi_slopes=slopes, return_attn_probs=True, **options)
        actual = torch.autograd.grad(total(found), inputs)
        expected = torch.autograd.grad(total(kernel(*inputs, **options)), inputs)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("options", CALLS[:6], ids=str)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_varlen_is_each_sequence_alone(per_sequence, options):
    q, k, v = (tensor[0] for tensor in make(15, 19, batch=1))
    starts = torch.tensor([0, 4, 4, 15], dtype=torch.int32), torch.tensor([0, 7, 9, 19], dtype=torch.int32)
    slopes = alibi_slopes(6)
    slopes = torch.stack([slopes, slopes / 2, slopes * 1.5]) if per_sequence else slopes
    call = {"alibi_slopes": slopes, "return_attn_probs": True, **options}
    out, lse, _ = flash.flash_attn_varlen_func(q, k, v, *starts, 11, 10, **call)
    assert (out.shape, lse.shape) == ((15, 6, 5), (6, 15)) and out.is_contiguous()
    for n in range(3):
        rows, keys = (slice(int(bounds[n]), int(bounds[n + 1])) for bounds in starts)
        own = slopes[n : n + 1] if per_sequence else slopes
        alone = q[None, rows], k[None, keys], v[None, keys]
        assert_is_kernels((out[None, rows], lse[None, :, rows]), *alone, own, room=10, **options)


def test_varlen_reads_pages():
    q, k, v = (tensor[0] for tensor in make(7, 13, batch=1))
    starts = torch.tensor([0, 3, 7]), torch.tensor([0, 9, 13])
    call = {"causal": True, "alibi_slopes": alibi_slopes(6), "return_attn_probs": True}
    expected = flash.flash_attn_varlen_func(q, k, v, *starts, 4, 9, **call)
    table = torch.tensor([[3, 0, 4], [2, 1, 1]], dtype=torch.int32)
    pools = [torch.full((5, 4, 3, tensor.shape[2]), torch.nan) for tensor in (k, v)]
    for pool, tensor in zip(pools, (k, v), strict=True):
        for n, (first, last) in enumerate(((0, 9), (9, 13))):
            for slot in range(last - first):
                pool[table[n, slot // 4], slot % 4] = tensor[first + slot]
    found = flash.flash_attn_varlen_func(q, *pools, *starts, 4, 9, **call, block_table=table)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    with pytest.raises(ValueError, match="block_table has room for 8 tokens a sequence"):
        flash.flash_attn_varlen_func(q, *pools, *starts, 4, 9, **call, block_table=table[:, :2])


def test_every_path_applies_the_slopes():
    q, k, v = make(6, 6)
    starts = torch.tensor([0, 6])
    calls = (
        lambda slopes: flash.flash_attn_func(q, k, v, alibi_slopes=slopes),
        lambda slopes: flash.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 6, 6, alibi_slopes=slopes),
        lambda slopes: flash.flash_attn_with_kvcache(q[:, :1], k, v, causal=True, alibi_slopes=slopes),
    )
    for call in calls:
        assert (call(alibi_slopes(6)) - call(None)).abs().max() > 1e-2


def test_dropout_drops_and_its_pattern_is_refused():
    q, k, v = make(9, 9)
    with pytest.raises(NotImplementedError, match="return_attn_probs must be False with dropout"):
        flash.flash_attn_func(q, k, v, dropout_p=0.5, return_attn_probs=True)
    torch.manual_seed(3)
    dropped = flash.flash_attn_func(q, k, v, dropout_p=0.5, causal=True)
    torch.manual_seed(3)
    again = alibi_attention(*(t.transpose(1, 2) for t in (q, k, v)), torch.zeros(6), causal=True, dropout_p=0.5)
    assert torch.equal(dropped.transpose(1, 2), again)
    assert not torch.allclose(dropped, flash.flash_attn_func(q, k, v, causal=True))


def test_hints_change_nothing():
    q, k, v = make(5, 5)
    plain = flash.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(plain, flash.flash_attn_func(q, k, v, causal=True, deterministic=True))
    calls = [{}, {"num_splits": 4}, {"rotary_interleaved": False}]
    outputs = [flash.flash_attn_with_kvcache(q, k, v, causal=True, **call) for call in calls]
    assert all(torch.equal(out, outputs[0]) for out in outputs)


TOKENS = torch.ones(6, 2, 8)
ENDS = torch.tensor([0, 2, 6])


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("window_size must be (left, right), two ints", {"window_size": 5}),
        ("window_size must be (left, right), two ints", {"window_size": None}),
        ("window_size must be (left, right), two ints", {"window_size": ("a", 0)}),
        ("softcap must be a Python number, got NoneType", {"softcap": None}),
        ("softcap must be a Python number, got str", {"softcap": "a"}),
        ("softmax_scale must be a Python number, got str", {"softmax_scale": "a"}),
        ("causal must be True or False, got 'yes'", {"causal": "yes"}),
        ("dropout_p must be a Python number, got NoneType", {"dropout_p": None}),
        ("v must have k's shape but for the head dim, got (1, 5, 2, 8) and (1, 6, 2, 8)", {"v": TOKENS[None, :5]}),
        ("v must have k's shape but for the head dim, got (1, 6, 1, 8)", {"v": TOKENS[None, :, :1]}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_arguments_are_named_as_flash_attns(words, arguments):
    tokens = TOKENS[None]
    with pytest.raises((TypeError, ValueError)) as caught:
        flash.flash_attn_func(**({"q": tokens, "k": tokens, "v": tokens} | arguments))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("block_table must be a torch.Tensor, got list", {"block_table": [[0], [1]]}),
        ("block_table must be int32 or int64 of shape (2, n), got torch.int64 (2,)", {"block_table": ENDS[:2]}),
        ("k must have shape (pages, page size, heads, head dim)", {"block_table": ENDS[:2, None]}),
        ("cu_seqlens_q must be a torch.Tensor, got list", {"cu_seqlens_q": [0, 2, 6]}),
        ("cu_seqlens_q must be a torch.Tensor, got NoneType", {"cu_seqlens_q": None}),
        ("cu_seqlens_k must be a torch.Tensor, got list", {"cu_seqlens_k": [0, 2, 6]}),
        ("v must have k's shape but for the head dim, got (5, 2, 8)", {"v": TOKENS[:5]}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_arguments_of_varlen_are_named(words, arguments):
    given = {"q": TOKENS, "k": TOKENS, "v": TOKENS, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
    with pytest.raises((TypeError, ValueError)) as caught:
        flash.flash_attn_varlen_func(**(given | {"max_seqlen_q": 4, "max_seqlen_k": 4} | arguments))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("starts", "pages"),
    [([1, 2, 6], False), ([0, 4, 2, 6], False), ([0, -1, 6], False), ([0, 2, 7], False), ([1, 2, 6], True)],
)
def test_boundaries_that_do_not_fit_are_named(starts, pages):
    given, good = torch.tensor(starts), torch.tensor([0, *range(8 - len(starts), 7)])
    keys = TOKENS[None].expand(4, -1, -1, -1) if pages else TOKENS
    table = {"block_table": torch.arange(2)[:, None]} if pages else {}
    for place, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
        ends = [good, good]
        ends[place] = given
        with pytest.raises(ValueError, match=f"{name} must start with 0, never fall"):
            flash.flash_attn_varlen_func(TOKENS, keys, keys, *ends, 6, 6, **table)


def test_pages_that_do_not_exist_are_named():
    pools = TOKENS[None].expand(4, -1, -1, -1)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="block_table must be from 0 to 3"):
            table = torch.tensor([[0], [wrong]])
            flash.flash_attn_varlen_func(TOKENS, pools, pools, ENDS, ENDS, 4, 4, block_table=table)


@pytest.mark.parametrize("packed", [False, True])
def test_states_of_disjoint_keys_merge_although_some_are_empty(packed):
    """Windows that reach 2 keys back, and those further back: rows 0 to 2 see none of the second kind."""
    q, k, v = make(7, 7)
    whole = flash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    near = flash.flash_attn_func(q, k, v, window_size=(2, 0), return_attn_probs=True)
    far = flash.flash_attn_func(q, k[:, :4], v[:, :4], window_size=(-1, 0), return_attn_probs=True)
    assert (far[1][..., :3] == torch.inf).all()
    parts = (*near[:2], *far[:2])
    wanted = whole[:2]
    if packed:
        parts, wanted = ([each[0] for each in some] for some in (parts, wanted))
    merged = flash.merge_states(*parts)
    for found, expected in zip(merged, wanted, strict=True):
        torch.testing.assert_close(found, expected)
    nothing = [torch.zeros_like(wanted[0]), torch.full_like(wanted[1], torch.inf)] * 2
    out, lse = flash.merge_states(*nothing)
    assert (out == 0).all() and (lse == torch.inf).all()
    assert (
        merge(*(t.transpose(-3, -2) if t is not parts[1] and t is not parts[3] else t for t in parts))[0].isnan().any()
    )
