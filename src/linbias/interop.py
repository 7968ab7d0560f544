# SPDX-License-Identifier: Apache-2.0
"""ALiBi for torch's own attention kernels: a mask for SDPA, a score_mod and a BlockMask for FlexAttention.

`sdpa_mask` has to be a matrix. FlexAttention needs none: it captures the slopes, H numbers, and computes the bias where
it is wanted; and since the bias proves how far a head sees, a BlockMask can leave out every block beyond.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .prepare import AttentionOptions, check_names, prepare
from .semantics.blocks import Blocks, Tiles, dense
from .semantics.bounds import reach, score_bound, upper_norms
from .semantics.checks import (
    check_count,
    check_flag,
    check_scale,
    check_tensor,
    check_tolerance,
    check_window,
    position_rows,
    slope_rows,
)
from .semantics.problem import Options, default_scale, default_tolerance
from .semantics.tokens import Tokens, unbiased_marks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Kernels load rows of a mask in vectors of 8 elements; an unaligned row makes them fall back, copy or refuse.
_ROW = 8


def sdpa_mask(query: Tensor, key: Tensor, slopes: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    """``attn_mask`` for `torch.nn.functional.scaled_dot_product_attention`: -slope_h * distance, -inf where hidden.

    All that hides a key is folded in, so SDPA needs no further argument than ``scale``. With ``causal=False`` and
    T = S, SDPA on the CPU also takes ``is_causal=True`` beside the mask and applies both; elsewhere fold it in here,
    because SDPA's own aligns the first query with the first key. Memory is H x T x S numbers, which `alibi_attention`
    and `flex_score_mod` do without.

    Args:
        query: (B, H, T, D); gives sizes, dtype and device.
        key: (B, G, S, D).
        slopes: as for `linbias.alibi_attention`. Learned ones get their gradient from SDPA.
        options: those of `linbias.alibi_attention` about position and visibility, ``causal`` required: causal, window,
            sinks, prefix, key_mask, attn_mask, query_segments, key_segments, query_positions, key_positions, metric,
            future_slopes, unbiased.

    Returns:
        (B or 1, H, T, S) in the query's dtype, as SDPA demands. Rows start at multiples of 8 elements. In half
        precision the bias is rounded: near keys keep their digits, far ones of shallow heads do not.

    Raises:
        TypeError, ValueError: as `linbias.alibi_attention`, and for an option that belongs to SDPA itself.

    >>> tokens = torch.zeros(1, 1, 4, 2)
    >>> sdpa_mask(tokens, tokens, torch.tensor([0.5]), causal=True)[0, 0, 2].tolist()
    [-1.0, -0.5, 0.0, -inf]
    """
    check_names("sdpa_mask", options, without=frozenset({"scale", "softcap", "dropout_p", "tolerance", "key_bounds"}))
    problem, operands = prepare(query, key, key, slopes, options)
    penalty, visible = dense(operands, problem.options)
    mask = torch.where(visible, 0.0 - penalty, -torch.inf).to(problem.dtype)
    return F.pad(mask, (0, -problem.keys % _ROW))[..., : problem.keys]


def flex_score_mod(
    slopes: Tensor,
    *,
    offset: int = 0,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    future_slopes: Tensor | None = None,
    unbiased: int = 0,
) -> ScoreMod:
    """``score_mod`` for FlexAttention: score - slope_h * |p_i - r_j|, from exact distances.

    It captures the slopes (and the positions, if given): never anything of T x S. Learned slopes get a gradient where
    FlexAttention has a backward: on GPUs, and uncompiled everywhere.

    Args:
        slopes: (H,), (1, H) or (B, H), float32 or float64, H the number of *query* heads, which FlexAttention does not
            tell and nobody can check here.
        offset: position of the first query among the keys; S - T aligns ends, as a cache needs.
        query_positions, key_positions: (T,) or (B, T), (S,) or (B, S) integers, together, instead of ``offset``.
        future_slopes: as slopes, for later keys; default: the same.
        unbiased: keys j < n give, and queries offset + i < n receive, no bias.

    Returns:
        score_mod(score, b, h, q_idx, kv_idx) -> score.

    Raises:
        TypeError, ValueError: naming the argument, the rule, what came and what to do.

    >>> score_mod = flex_score_mod(torch.tensor([0.5, 0.25]))
    >>> b, h, q_idx, kv_idx = torch.tensor([0, 1, 7, 3])
    >>> score_mod(torch.tensor(3.0), b, h, q_idx, kv_idx).item()
    2.0
    """
    past = _per_head("slopes", slopes)
    future = None if future_slopes is None else _per_head("future_slopes", future_slopes)
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):  # pyright: ignore
        raise TypeError(f"offset must be an int, got {offset!r}")
    check_count("unbiased", unbiased)
    if (query_positions is None) != (key_positions is None) or (query_positions is not None and offset):
        raise ValueError("query_positions and key_positions must be given together, and without an offset")
    query_place = _per_token("query_positions", query_positions, slopes)
    key_place = _per_token("key_positions", key_positions, slopes)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = query_place(b, q_idx) + offset - key_place(b, kv_idx)
        slope = past(b, h)
        if future is not None:
            slope = torch.where(distance < 0, future(b, h), slope)
        free = distance == 0
        if unbiased:
            free = free | (kv_idx < unbiased) | (q_idx + offset < unbiased)
        # Slope inf at distance 0 would make NaN.
        return torch.where(free, score, score - slope * distance.abs())

    return score_mod


def flex_block_mask(  # noqa: PLR0913
    slopes: Tensor,
    query_length: int,
    key_length: int,
    *,
    causal: bool,
    content: float | Tensor,
    tolerance: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    future_slopes: Tensor | None = None,
    unbiased: int = 0,
    mask_mod: MaskMod | None = None,
    block_size: int | tuple[int, int] = 128,
) -> "BlockMask":
    """A BlockMask per head, without the blocks that are invisible or that the bias proves negligible.

    For every query that sees the key at its own position, the keys of all blocks left out hold at most ``tolerance`` of
    its softmax weight (`linbias.reach` says how far that is). Ends are aligned: query i stands at S - T + i. Memory and
    time are those of the blocks, H x T x S / block_size**2; nothing is read back from the device.

    Args:
        slopes: (H,), (1, H) or (B, H), as for `flex_score_mod`.
        query_length, key_length: T and S.
        causal: hide keys later than the query.
        content: how far a scaled dot product can exceed that of the query with its own key: a number, or a tensor that
            broadcasts to slopes; see `content_bound`. inf leaves out only what is invisible.
        tolerance: in [0, 1); default: a quarter of float32's eps. With keys on both sides each side gets half.
        window: (left, right), inclusive, None = unlimited.
        future_slopes, unbiased: as given to `flex_score_mod`.
        mask_mod: hides more, such as other documents. It must leave each query its own key, or the promise fails.
        block_size: keys and queries a block, or (queries, keys).

    Returns:
        A BlockMask of shape (b, H, T, S) for ``flex_attention(..., score_mod=flex_score_mod(...), block_mask=...)``.

    Raises:
        TypeError, ValueError: naming the argument, the rule, what came and what to do.

    >>> mask = flex_block_mask(torch.tensor([0.5, 0.0]), 1024, 1024, causal=True, content=8.0)
    >>> (mask.kv_num_blocks + mask.full_kv_num_blocks)[0].tolist()  # a head that forgets, and one that cannot
    [[1, 2, 2, 2, 2, 2, 2, 2], [1, 2, 3, 4, 5, 6, 7, 8]]
    """
    from torch.nn.attention.flex_attention import BlockMask, and_masks, noop_mask

    past = slope_rows("slopes", slopes, None, None, torch.float64).detach()
    future = past
    if future_slopes is not None:
        future = slope_rows("future_slopes", future_slopes, None, past.shape[1], torch.float64, slopes).detach()
    tolerance = check_tolerance(tolerance, default_tolerance(torch.float32))
    if mask_mod is not None and not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), or None, got {mask_mod!r}")
    sizes = _block_sizes(block_size)
    queries, keys = check_count("query_length", query_length), check_count("key_length", key_length)
    left, right = check_window(window)
    right = 0 if check_flag("causal", causal) else right
    marks = unbiased_marks(check_count("unbiased", unbiased), queries, keys, slopes.device)
    rows = Blocks.of(Tokens(queries, keys - queries, slopes.device, unbiased=marks[0]), sizes[0])
    columns = Blocks.of(Tokens(keys, 0, slopes.device, unbiased=marks[1]), sizes[1])
    tiles = Tiles.of(rows.down(), columns.across(), Options(left=left, right=right))
    share = tolerance if right == 0 else tolerance / 2
    back, ahead = (reach(side, tolerance=share, content=content)[..., None, None] for side in (past, future))
    near = _within(tiles, rows.position.low[:, None, :, None], back, ahead)
    whole = tiles.visible.every if mask_mod is None else torch.zeros_like(tiles.visible.every)
    ordered = [_ordered(near & kind) for kind in (tiles.visible.some & ~whole, whole)]
    inside = _inside(queries, keys, left, right) or noop_mask
    return BlockMask.from_kv_blocks(
        *ordered[0],
        *ordered[1],
        BLOCK_SIZE=sizes,
        mask_mod=inside if mask_mod is None else and_masks(inside, mask_mod),
        seq_lengths=(queries, keys),
    )


def content_bound(query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
    """``content`` of `flex_block_mask` for these inputs: 2 * |scale| * max |q| * max |k|, per head.

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D).
        scale: as given to FlexAttention; default 1 / sqrt(D).

    Returns:
        (H,), detached; nothing is read back from the device.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.

    >>> content_bound(torch.full((1, 2, 3, 4), 2.0), torch.ones(1, 1, 5, 4)).round(decimals=4).tolist()
    [8.0, 8.0]
    """
    for name, tensor in (("query", query), ("key", key)):
        if check_tensor(name, tensor).dim() != 4 or tensor.shape[1] == 0 or query.shape[1] % tensor.shape[1]:
            raise ValueError(
                f"{name} must have shape (B, heads, tokens, D), query heads a multiple of key heads, "
                f"got {tuple(tensor.shape)}"
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key must have the query's head dim {query.shape[3]}, got {key.shape[3]}")
    factor = check_scale("scale", scale, default_scale(query.shape[3]))
    # One more norm of 0 stands for no tokens at all.
    norms = [F.pad(upper_norms(tensor.detach()).transpose(0, 1).flatten(1), (0, 1)) for tensor in (query, key)]
    largest = norms[1].amax(1).repeat_interleave(query.shape[1] // key.shape[1])
    return 2 * score_bound(factor, None, norms[0].amax(1), largest)


def _block_sizes(block_size: object) -> tuple[int, int]:
    """(queries, keys) a block."""
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size must be an int or (queries, keys), got {block_size!r}")
    queries, keys = (check_count("block_size", size) for size in pair)
    if min(queries, keys) < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size!r}; 128 is FlexAttention's own")
    return queries, keys


def _within(tiles: Tiles, first_query: Tensor, past: Tensor, future: Tensor) -> Tensor:
    """Which pairs of blocks the reaches (b, H, 1, 1) do not rule out; NaN rules nothing out."""
    # Queries before the first key have no own key: theirs is that far away, and reach counts from there.
    gap = (-first_query).clamp_min(0)
    behind, before = tiles.sides()
    return ~(behind & (tiles.distance.low > past)) & ~(before & (tiles.distance.low > future + gap))


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a choice of blocks: how many in each row, and their numbers, chosen ones first."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _inside(queries: int, keys: int, left: int | None, right: int | None) -> MaskMod | None:
    """The window as a mask_mod; None if it hides nothing."""
    # Plain numbers to capture: compiled for dynamic shapes, FlexAttention takes no expression of them.
    last = None if right is None else keys - queries + right
    first = None if left is None else keys - queries - left

    def inside(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if last is None:
            return q_idx + cast(int, first) <= kv_idx
        early_enough = q_idx + last >= kv_idx
        return early_enough if first is None else early_enough & (q_idx + first <= kv_idx)

    return None if left is None and right is None else inside


def _per_head(name: str, slopes: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(b, h) -> slope."""
    check_tensor(name, slopes)
    slope_rows(name, slopes, None, None, slopes.dtype)
    # What was given is what is captured: a view of a parameter would be no leaf, which makes torch.compile warn.
    if slopes.dim() == 1:
        return lambda b, h: slopes[h]
    if slopes.shape[0] == 1:
        return lambda b, h: slopes[0, h]
    return lambda b, h: slopes[b, h]


def _per_token(name: str, positions: Tensor | None, like: Tensor) -> Callable[[Tensor, Tensor], Any]:
    """(b, index) -> position."""
    if positions is None:
        return lambda b, index: index
    rows = position_rows(name, check_tensor(name, positions, like), None, None, None, torch.int64)
    if rows.shape[0] == 1:
        return lambda b, index: rows[0, index]
    return lambda b, index: rows[b, index]
