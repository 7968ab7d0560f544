# SPDX-License-Identifier: Apache-2.0
"""flash-attn's functions of three tensors, and of a cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import merge, run
from ..prepare import AttentionOptions, autocast, check_inputs, resolve
from ..semantics.checks import check_count, check_tensor, slope_rows
from ..semantics.problem import accumulating_dtype
from ..semantics.tokens import Tokens
from ..varlen import Sequences, check_boundaries, run_packed
from .arguments import check_heads, check_integers, check_layout, check_probs, options_of
from .kvcache import CallersCache, unpaged

_TOKENS = "(batch, tokens, heads, head dim)"
_PACKED = "(total tokens, heads, head dim)"


def flash_attn_func(  # noqa: PLR0913, PLR0917  (flash-attn's signature)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """softmax(cap(scale * q @ k.T) - slope_h * |i + S - T - j|) @ v.

    Args:
        q: (B, T, H, D).
        k: (B, S, G, D), H a multiple of G.
        v: (B, S, G, V).
        dropout_p: in [0, 1).
        softmax_scale: default 1 / sqrt(D).
        causal: query i sees keys j <= i + S - T.
        window_size: (left, right), inclusive; -1, or any negative number: unlimited.
        softcap: > 0, or 0.0 for none.
        alibi_slopes: (H,) or (B, H), float32 or float64; None: no bias.
        deterministic: without effect: every backend is deterministic.
        return_attn_probs: return (out, softmax_lse, S_dmask). S_dmask is the empty tensor that flash-attn returns
            without dropout; with dropout it would be a dense matrix, and the call raises.

    Returns:
        (B, T, H, V), contiguous; softmax_lse: (B, H, T), see the top of this page. Differentiable, softmax_lse too.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
        NotImplementedError: ``return_attn_probs`` with dropout.

    >>> q = torch.zeros(1, 4, 1, 8)
    >>> out = flash_attn_func(q, q, torch.eye(4)[None, :, None], causal=True, alibi_slopes=torch.tensor([0.5]))
    >>> [round(weight, 4) for weight in out[0, 3, 0].tolist()]
    [0.1015, 0.1674, 0.276, 0.4551]
    """
    check_layout({"q": q, "k": k, "v": v}, _TOKENS, 4)
    check_heads(q, k, v, ("k", "v"), _TOKENS)
    check_probs(return_attn_probs, dropout_p)
    options = options_of(causal, window_size, softmax_scale, softcap, dropout_p)
    slopes = _slopes(alibi_slopes, q, q.shape[0])
    inputs = _inputs(q, k, v)
    check_inputs(*inputs)
    queries, keys = q.shape[1], k.shape[1]
    first = keys - queries
    out, lse = _attend(inputs, slopes, options, (Tokens(queries, first, q.device), Tokens(keys, 0, q.device)))
    if not return_attn_probs:
        return out
    places = torch.arange(first, keys, device=q.device)
    shift = _shift(slopes[..., None], places) if _is_key_form(causal, window_size, keys) else None
    return out, _flash_lse(lse, shift), out.new_empty(0)


def flash_attn_varlen_func(  # noqa: PLR0913, PLR0917
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_func` on each of N sequences laid end to end.

    Args:
        q: (total_q, H, D).
        k, v: (total_k, G, D), (total_k, G, V); with ``block_table`` pages (P, page, G, D), (P, page, G, V).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 or int64: where each sequence starts, and the end.
        max_seqlen_q, max_seqlen_k: the longest sequence.
        alibi_slopes: (H,) or (N, H).
        block_table: (N, n) integers, the pages of each sequence. They are copied side by side, for which the lengths
            are read on the host.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as for
            `flash_attn_func`.

    Returns:
        (total_q, H, V); softmax_lse: (H, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.
    """
    check_probs(return_attn_probs, dropout_p)
    check_layout({"q": q}, _PACKED, 3)
    columns = max_seqlen_k
    if block_table is None:
        check_layout({"k": k, "v": v}, _PACKED, 3)
        check_boundaries(q, k.shape[0], cu_seqlens_q, cu_seqlens_k)
    else:
        check_boundaries(q, None, cu_seqlens_q, cu_seqlens_k)
        check_integers("block_table", block_table, q, cu_seqlens_k.shape[0] - 1, None)
        check_layout({"k": k, "v": v}, "(pages, page size, heads, head dim) with a block_table", 4)
        columns = block_table.shape[1] * k.shape[1]
        k, v = unpaged(k, v, block_table, cu_seqlens_k)
    check_heads(q, k, v, ("k", "v"), _PACKED)
    longest = check_count("max_seqlen_q", max_seqlen_q), check_count("max_seqlen_k", max_seqlen_k)
    options = options_of(causal, window_size, softmax_scale, softcap, dropout_p)
    slopes = _slopes(alibi_slopes, q, cu_seqlens_q.shape[0] - 1)
    inputs = _inputs(q[None], k[None], v[None])
    check_inputs(*inputs)
    sequences = Sequences.of(q, k, cu_seqlens_q, cu_seqlens_k)
    result = run_packed(inputs, slopes, options, sequences, longest, "auto")
    out = result.out.squeeze(0).transpose(0, 1).contiguous()
    if not return_attn_probs:
        return out
    shift = None
    if _is_key_form(causal, window_size, columns):
        rows = slopes if slopes.shape[0] == 1 else slopes[sequences.query_numbers.clamp_max(slopes.shape[0] - 1)]
        shift = _shift(rows, sequences.query_places[:, None]).T
    return out, _flash_lse(result.lse.squeeze(0), shift), out.new_empty(0)


def flash_attn_with_kvcache(  # noqa: PLR0913, PLR0917
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache in the caller's tensors, after writing new keys and values into it in place.

    `linbias.KVCache` does the same with less to keep track of, and skips unread what the bias hides.

    Args:
        q: (B, T, H, D).
        k_cache, v_cache: (Bc, Sc, G, D), (Bc, Sc, G, V), Bc >= B; with ``block_table`` pages (P, page, G, .).
        k, v: (B, N, G, D), (B, N, G, V), written at ``cache_seqlens`` and after; None: only read.
        rotary_cos, rotary_sin: must be None: rotate q and k before the call. ALiBi models have no rotation.
        cache_seqlens: tokens in the cache before the call, left padding included: one number, or (B,) integers. None:
            the cache is full. An int keeps the call free of masks.
        cache_batch_idx: (B,) integers, the row of the cache of each q. Not with ``block_table``.
        cache_leftpad: (B,) integers: slots at the start of each row that hold nothing; column 0 is the one after them.
        block_table: (B, n) integers: the pages of each sequence, of any strides, read where they lie on the CPU.
        softmax_scale, causal, window_size, softcap: as for `flash_attn_func`.
        rotary_interleaved: without effect, as in flash-attn where there is no rotation.
        alibi_slopes: (H,) or (B, H).
        num_splits: how flash-attn divides its work; the result does not depend on it here.
        return_softmax_lse: return (out, softmax_lse).

    Returns:
        (B, T, H, V); softmax_lse: (B, H, T). A gradient flows to q and alibi_slopes.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
        NotImplementedError: rotary embeddings.
        RuntimeError: k or v require a gradient, which writing into the cache would lose.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise NotImplementedError("rotary_cos and rotary_sin must be None: rotate q and k before the call")
    cache = CallersCache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    options = options_of(causal, window_size, softmax_scale, softcap)
    slopes = _slopes(alibi_slopes, q, q.shape[0])
    none = _inputs(q[:0], k_cache[:0], v_cache[:0])
    check_inputs(*none)
    cache.check_places(k, v)
    if k is not None and v is not None:
        cache.write(k, v)  # last, so that a call that is refused has written nothing
    tokens, lengths, rows = cache.tokens()
    key, value, table = cache.read()
    out, lse = _attend(_inputs(q, key, value), slopes, options, tokens, lengths, table)
    shift = _shift(slopes[..., None], rows[:, None]) if _is_key_form(causal, window_size, cache.columns) else None
    return (out, _flash_lse(lse, shift)) if return_softmax_lse else out


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from what functions of this page return for each.

    Both log-sum-exps must be of one form, see the top of this page, and measure distances from the same places: with
    slopes, `linbias.alibi_attention` with positions and `linbias.merge` is what can say where a half stands.

    Args:
        out_a, out_b: (B, T, H, V) or (total, H, V).
        lse_a, lse_b: (B, H, T) or (H, total), +inf where a set had no visible key.

    Returns:
        (out, lse) of the union, as given: +inf where neither had one. Differentiable.

    Raises:
        TypeError, ValueError: not tensors, or shapes that do not belong together.

    >>> out, one = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    >>> merged, lse = merge_states(out, one, 0 * out, one + torch.inf)  # the second set is empty
    >>> merged.tolist(), lse.tolist()
    ([[[[1.0, 1.0]]]], [[[0.0]]])
    """
    outs = [check_tensor(name, each).transpose(-3, -2) for name, each in (("out_a", out_a), ("out_b", out_b))]
    lses = [check_tensor(name, each) for name, each in (("lse_a", lse_a), ("lse_b", lse_b))]
    lses = [torch.where(lse == torch.inf, -torch.inf, lse) for lse in lses]
    out, lse = merge(outs[0], lses[0], outs[1], lses[1])
    return out.transpose(-3, -2).contiguous(), _flash_lse(lse, None)


def _slopes(alibi_slopes: Tensor | None, q: Tensor, batch: int) -> Tensor:
    """(1, H) or (B, H); zeros for None."""
    heads = q.shape[-2]
    if alibi_slopes is None:
        return torch.zeros((1, heads), dtype=accumulating_dtype(q.dtype), device=q.device)
    return slope_rows("alibi_slopes", alibi_slopes, batch, heads, accumulating_dtype(q.dtype), q)


def _inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads before tokens, as autocast has them."""
    return autocast(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    slopes: Tensor,
    options: AttentionOptions,
    tokens: tuple[Tokens, Tokens],
    lengths: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, T, H, V) and (B, H, T), of inputs that were checked."""
    result = run(*resolve(inputs, slopes, options, tokens, lengths=lengths, table=table), "auto")
    return result.out.transpose(1, 2).contiguous(), result.lse


def _is_key_form(causal: bool, window_size: Sequence[int], columns: int) -> bool:
    """Whether flash-attn's kernel adds slope * column: only later keys are hidden. A window that hides none is none."""
    left, right = window_size
    return (causal or right == 0) and not 0 <= left < columns


def _shift(slopes: Tensor, rows: Tensor) -> Tensor:
    """slope * row: what the key form adds; 0 in row 0, for slopes of inf too."""
    return torch.where(rows == 0, 0.0, slopes * rows)


def _flash_lse(lse: Tensor, shift: Tensor | None) -> Tensor:
    shifted = lse if shift is None else lse + shift
    return torch.where(lse == -torch.inf, torch.inf, shifted)
