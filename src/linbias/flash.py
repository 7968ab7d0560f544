# SPDX-License-Identifier: Apache-2.0
"""flash-attn's functions under flash-attn's names: its arguments, order, defaults, layouts and meanings, on any device.

Written to the signatures of flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention, flash_attn_interface.py):
tokens before heads, ends aligned, -1 for an unlimited side of the window, ``softcap=0.0`` for none. What flash-attn
refuses here works too: any head dim, float32 and float64, pages of any size, dropout with a soft cap.

``softmax_lse`` also means what flash-attn's kernels make of it. Where nothing but causality hides keys (``causal``
without a left window, or ``window_size=(-1, 0)``) they add ``+slope * column`` to the scores instead of
``-slope * (row - column)``: the same softmax, but a log-sum-exp that is larger by ``slope * row``, with row counted
from the sequence's first key. Everywhere else it is the sum of the scores as documented. A row that sees no key has
+inf. ``linbias.alibi_attention(..., return_aux=True)`` gives the relative form always, and -inf.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ._flash_checks import check_heads, check_integers, check_layout, check_probs, options_of
from .attention import Aux, run
from .cache.pages import gather_pages
from .prepare import AttentionOptions, prepare
from .semantics.checks import slope_rows
from .semantics.problem import accumulating_dtype
from .varlen import _Sequences, alibi_attention_varlen


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
    check_layout({"q": q, "k": k, "v": v}, "(batch, tokens, heads, head dim)", 4)
    check_heads(q, k, v, ("k", "v"), "(batch, tokens, heads, head dim)")
    check_probs(return_attn_probs, dropout_p)
    options = options_of(causal, window_size, softmax_scale, softcap)
    slopes = _slopes(alibi_slopes, q, q.shape[0])
    out, aux = _call(q, k, v, slopes, options | {"dropout_p": dropout_p})
    if not return_attn_probs:
        return out
    places = torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1])
    shift = _shift(slopes[..., None], places) if _is_key_form(causal, window_size, k.shape[1]) else None
    return out, _flash_lse(aux.lse, shift), out.new_empty(0)


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
    check_layout({"q": q}, "(total tokens, heads, head dim)", 3)
    check_integers("cu_seqlens_q", cu_seqlens_q, q, None)
    check_integers("cu_seqlens_k", cu_seqlens_k, q, None)
    columns = max_seqlen_k
    if block_table is not None:
        check_integers("block_table", block_table, q, cu_seqlens_k.shape[0] - 1, None)
        check_layout({"k": k, "v": v}, "(pages, page size, heads, head dim) with a block_table", 4)
        columns = block_table.shape[1] * k.shape[1]
        k, v = (_unpaged(pool, block_table, cu_seqlens_k) for pool in (k, v))
    check_layout({"q": q, "k": k, "v": v}, "(total tokens, heads, head dim)", 3)
    check_heads(q, k, v, ("k", "v"), "(total tokens, heads, head dim)")
    options = options_of(causal, window_size, softmax_scale, softcap)
    slopes = _slopes(alibi_slopes, q, cu_seqlens_q.shape[0] - 1)
    result = alibi_attention_varlen(
        q,
        k,
        v,
        slopes,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        **options,
        dropout_p=dropout_p,
        return_aux=True,
    )
    assert isinstance(result, tuple)
    out, aux = result
    out = out.contiguous()
    if not return_attn_probs:
        return out
    shift = None
    if _is_key_form(causal, window_size, columns):
        sequences = _Sequences.of(q, k, cu_seqlens_q, cu_seqlens_k)
        rows = slopes if slopes.shape[0] == 1 else slopes[sequences.query_numbers.clamp_max(slopes.shape[0] - 1)]
        shift = _shift(rows, sequences.query_places[:, None]).T
    return out, _flash_lse(aux.lse, shift), out.new_empty(0)


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
        block_table: (B, n) integers: the pages of each sequence, copied side by side before attention.
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
    cache = _Cache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    options = options_of(causal, window_size, softmax_scale, softcap)
    slopes = _slopes(alibi_slopes, q, q.shape[0])
    if k is not None or v is not None:
        cache.write(k, v)  # last, so that a call that is refused has written nothing
    keys, values = cache.read()
    queries, placed = cache.place()
    out, aux = _call(q, keys, values, slopes, options | placed)
    shift = _shift(slopes[..., None], queries[:, None]) if _is_key_form(causal, window_size, cache.columns) else None
    return (out, _flash_lse(aux.lse, shift)) if return_softmax_lse else out


class _Cache:
    """The caller's cache tensors and what says where in them the tokens are."""

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seqlens: int | Tensor | None,
        batch_index: Tensor | None,
        leftpad: Tensor | None,
        table: Tensor | None,
    ) -> None:
        layout = "(batch, slots, heads, head dim), or (pages, page size, heads, head dim) with block_table"
        check_layout({"q": q}, "(batch, tokens, heads, head dim)", 4)
        check_layout({"k_cache": k_cache, "v_cache": v_cache}, layout, 4)
        check_heads(q, k_cache, v_cache, ("k_cache", "v_cache"), layout)
        self.batch, self.queries = q.shape[:2]
        self.key, self.value = k_cache, v_cache
        rows = {"cache_seqlens": seqlens, "cache_batch_idx": batch_index, "cache_leftpad": leftpad}
        for name, tensor in rows.items():
            number = name == "cache_seqlens" and isinstance(tensor, int) and not isinstance(tensor, bool)
            if tensor is not None and not number:
                check_integers(name, cast(Tensor, tensor), q, self.batch)
        self.leftpad = None if leftpad is None else leftpad.long()[:, None]
        self.table = None
        if table is not None:
            if batch_index is not None:
                raise ValueError("cache_batch_idx must be None with a block_table: order the rows of the table instead")
            self.table = check_integers("block_table", table, q, self.batch, None).long()
        elif batch_index is None and k_cache.shape[0] < self.batch:
            raise ValueError(f"k_cache must have a row for each of q's {self.batch}, got {k_cache.shape[0]}")
        self.index = None if batch_index is None else batch_index.long()
        self.columns: int = k_cache.shape[1] * (1 if self.table is None else self.table.shape[1])
        # Tokens in the cache: an int, (B, 1), or None for all slots.
        self.lengths = seqlens if seqlens is None or isinstance(seqlens, int) else seqlens.long()[:, None]
        if isinstance(seqlens, int) and not 0 <= seqlens <= self.columns:
            raise ValueError(f"cache_seqlens must be between 0 and the cache's {self.columns} slots, got {seqlens}")

    def write(self, k: Tensor | None, v: Tensor | None) -> None:
        """New keys and values behind what is there."""
        if k is None or v is None or self.lengths is None:
            raise ValueError("k, v and cache_seqlens must be given together: what to write, and where")
        check_layout({"k": k, "v": v}, "(batch, tokens, heads, head dim)", 4)
        for name, tensor, kept in (("k", k, self.key), ("v", v, self.value)):
            wanted = (self.batch, k.shape[1], *kept.shape[2:])
            if tuple(tensor.shape) != wanted or tensor.dtype != kept.dtype:
                raise ValueError(
                    f"{name} must be {kept.dtype} of shape {wanted}, got {tensor.dtype} {tuple(tensor.shape)}"
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name} must not require a gradient, which the cache would lose; use torch.no_grad()"
                )
        tokens = k.shape[1]
        if isinstance(self.lengths, int) and self.lengths + tokens > self.columns:
            raise ValueError(f"the cache has {self.columns} slots and holds {self.lengths}: {tokens} more do not fit")
        slots = self.lengths + torch.arange(tokens, device=k.device)[None]
        if self.table is not None:
            rows = self.table.gather(1, (slots // self.key.shape[1]).expand(self.batch, tokens))
            slots = slots % self.key.shape[1]
        else:
            rows = (torch.arange(self.batch, device=k.device) if self.index is None else self.index)[:, None]
        with torch.no_grad():
            self.key[rows, slots], self.value[rows, slots] = k, v
        self.lengths = self.lengths + tokens

    def read(self) -> tuple[Tensor, Tensor]:
        """(B, S, G, .), S the slots that can be in use."""
        slots = self.lengths if isinstance(self.lengths, int) else self.columns
        if self.table is not None:
            table = self.table[:, : -(-slots // self.key.shape[1])]
            key, value = gather_pages(self.key, table), gather_pages(self.value, table)
        elif self.index is not None:
            key, value = self.key[self.index], self.value[self.index]
        else:
            key, value = self.key[: self.batch], self.value[: self.batch]
        return key[:, :slots], value[:, :slots]

    def place(self) -> tuple[Tensor, dict[str, Tensor]]:
        """(b, T) positions of the queries, and positions and mask as options where the defaults are not right."""
        device = self.key.device
        steps = torch.arange(-self.queries, 0, device=device)[None]
        slots = self.lengths if isinstance(self.lengths, int) else self.columns
        used = slots if self.lengths is None else self.lengths
        if self.leftpad is None and isinstance(used, int):
            return used + steps, {}
        start = 0 if self.leftpad is None else self.leftpad
        columns = torch.arange(slots, device=device)[None]
        queries = used - start + steps
        real = (columns >= start) & (columns < used)
        return queries, {"query_positions": queries, "key_positions": columns - start, "key_mask": real}


def _slopes(alibi_slopes: Tensor | None, q: Tensor, batch: int) -> Tensor:
    """(1, H) or (B, H); zeros for None."""
    heads = q.shape[-2]
    if alibi_slopes is None:
        return torch.zeros((1, heads), dtype=accumulating_dtype(q.dtype), device=q.device)
    return slope_rows("alibi_slopes", alibi_slopes, batch, heads, accumulating_dtype(q.dtype), q)


def _call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, options: dict[str, Any]) -> tuple[Tensor, Aux]:
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    result = run(*prepare(query, key, value, slopes, cast(AttentionOptions, options)), "auto")
    return result.out.transpose(1, 2).contiguous(), Aux.of(result)


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


def _unpaged(pool: Tensor, table: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The tokens of pages (P, page, G, D), laid end to end: (total, G, D)."""
    lengths = cu_seqlens.diff()
    rows = gather_pages(pool, table.long())
    real = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    packed = rows[real]
    if packed.shape[0] != int(cu_seqlens[-1]):
        raise ValueError(f"block_table has room for {rows.shape[1]} tokens a sequence; cu_seqlens_k needs more")
    return packed
