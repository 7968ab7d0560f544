# SPDX-License-Identifier: Apache-2.0
"""The dense definitions: distance, bias and visibility as matrices, and the positions they are made from.

The reference backend is these formulas and a softmax; everything faster is tested against them. Ranking (the bias)
and visibility (whether a key exists for a query) never mix here: masks stay booleans.
"""

import torch
from torch import Tensor

from .checks import check_count, check_metric, check_tensor, position_rows, slope_rows
from .problem import Operands, Options


def alibi_bias(
    slopes: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    future_slopes: Tensor | None = None,
    metric: str | None = None,
    unbiased: int = 0,
) -> Tensor:
    """``-slope_h * |p_i - r_j|`` as a dense tensor, for tests, plots and kernels that add a bias.

    Keys later than the query use ``future_slopes`` (default: ``slopes``). It holds the ranking alone: a causal mask,
    padding or a window is for the caller to combine with it, as booleans. Memory grows with T x S;
    `alibi_attention` never makes this tensor.

    Args:
        slopes: (H,), (1, H) or (B, H), float32 or float64.
        query_positions: (T,) or (B, T) integers; (T, C) or (B, T, C) coordinates under a metric.
        key_positions: (S,) or (B, S); (S, C) or (B, S, C) under a metric.
        future_slopes: as ``slopes``; refused under a metric, which knows no later.
        metric: None, "euclidean" or "manhattan".
        unbiased: the first n keys give, and the queries S - T + i < n receive, no bias.

    Returns:
        (B or 1, H, T, S) in the dtype of slopes; <= 0 for slopes >= 0, and exactly 0 at distance 0.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.

    Reference:
        Press et al., https://arxiv.org/abs/2108.12409, section 3.

    >>> alibi_bias(torch.tensor([0.5]), torch.tensor([2]), torch.arange(4)).tolist()
    [[[[-1.0, -0.5, 0.0, -0.5]]]]
    """
    check_metric(metric)
    check_tensor("slopes", slopes)
    dtype = slopes.dtype
    slopes = slope_rows("slopes", slopes, None, None, dtype)
    positions = [
        position_rows(name, check_tensor(name, given, slopes), None, None, metric, dtype)
        for name, given in (("query_positions", query_positions), ("key_positions", key_positions))
    ]
    if future_slopes is not None:
        if metric is not None:
            raise ValueError(f"future_slopes must be None under metric={metric!r}: coordinates have no later side")
        future_slopes = slope_rows("future_slopes", future_slopes, None, slopes.shape[1], dtype, slopes)
    _check_together(slopes, future_slopes, *positions, coordinates=metric is not None)
    marks = unbiased_marks(check_count("unbiased", unbiased), positions[0].shape[1], positions[1].shape[1], slopes)
    return 0.0 - dense_penalty(slopes, future_slopes, positions[0], positions[1], *marks, metric=metric)


def _check_together(
    slopes: Tensor, future_slopes: Tensor | None, query_rows: Tensor, key_rows: Tensor, *, coordinates: bool
) -> None:
    rows = {"slopes": slopes, "future_slopes": future_slopes, "query_positions": query_rows, "key_positions": key_rows}
    batches = {name: given.shape[0] for name, given in rows.items() if given is not None}
    if len(set(batches.values()) - {1}) > 1:
        raise ValueError(f"{', '.join(batches)} must have one batch size or 1, got {tuple(batches.values())}")
    if coordinates and query_rows.shape[2] != key_rows.shape[2]:
        raise ValueError(
            f"query_positions and key_positions must have one number of coordinates, "
            f"got {query_rows.shape[2]} and {key_rows.shape[2]}"
        )


def grid_positions(height: int, width: int, *, device: torch.device | str | None = None) -> Tensor:
    """(row, column) of each cell of a grid, row by row, for ``metric="euclidean"`` or ``"manhattan"``.

    Args:
        height, width: cells, >= 0.
        device: where the result lives.

    Returns:
        (height * width, 2) int64.

    >>> grid_positions(2, 3).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """
    rows = torch.arange(check_count("height", height), device=device)
    columns = torch.arange(check_count("width", width), device=device)
    return torch.cartesian_prod(rows, columns).reshape(-1, 2)


def positions_from_mask(mask: Tensor) -> Tensor:
    """``max(cumsum(mask) - 1, 0)``: the position of each real token of a padded batch, wherever the padding is.

    Args:
        mask: (..., T), bool or integers of 0 and 1; 1 = real.

    Returns:
        (..., T) int64. A padded place repeats the position before it (0 at the start).

    >>> positions_from_mask(torch.tensor([0, 0, 1, 1, 1])).tolist()
    [0, 0, 0, 1, 2]
    """
    check_tensor("mask", mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"mask must be bool or integers with 1 = real, got {mask.dtype}")
    return (mask.to(torch.int64).cumsum(-1) - 1).clamp_min(0)


def token_positions(operands: Operands) -> tuple[Tensor, Tensor]:
    """The (b, T[, C]) and (b, S[, C]) positions of a call, defaults written out: ends aligned."""
    if operands.query_positions is not None and operands.key_positions is not None:
        return operands.query_positions, operands.key_positions
    queries, keys = operands.query.shape[2], operands.key.shape[2]
    device = operands.query.device
    return (torch.arange(queries, device=device) + (keys - queries))[None], torch.arange(keys, device=device)[None]


def unbiased_marks(unbiased: int, queries: int, keys: int, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(1, T) and (1, S) bool marks of the tokens that neither receive nor give bias; None when there are none."""
    if unbiased == 0:
        return None, None
    query_index = torch.arange(queries, device=like.device) + (keys - queries)
    return (query_index < unbiased)[None], (torch.arange(keys, device=like.device) < unbiased)[None]


def key_ranks(keys: int, key_mask: Tensor | None, key_segments: Tensor | None, like: Tensor) -> Tensor:
    """(b, S) int64: how many real keys of the same segment come before each key, in storage order."""
    if key_mask is None:
        real = torch.ones((1, keys), dtype=torch.int64, device=like.device)
    else:
        real = key_mask.to(torch.int64)
    if key_segments is None:
        return real.cumsum(1) - real
    real, segments = torch.broadcast_tensors(real, key_segments)
    ordered_segments, order = torch.sort(segments, dim=1, stable=True)
    ordered_real = real.gather(1, order)
    before = ordered_real.cumsum(1) - ordered_real
    # The count at a segment's first key is what earlier segments left; counts never fall, so cummax carries it on.
    starts = torch.ones_like(ordered_segments, dtype=torch.bool)
    starts[:, 1:] = ordered_segments[:, 1:] != ordered_segments[:, :-1]
    carried = torch.where(starts, before, 0).cummax(1).values if keys else before
    return torch.empty_like(before).scatter(1, order, before - carried)


def dense_penalty(
    slopes: Tensor,
    future_slopes: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    query_unbiased: Tensor | None = None,
    key_unbiased: Tensor | None = None,
    *,
    metric: str | None = None,
) -> Tensor:
    """(b, H, T, S): slope x distance, what is subtracted from the score; exactly 0 at distance 0."""
    if metric is None:
        offset = query_positions[:, None, :, None] - key_positions[:, None, None, :]
        distance = offset.abs()
    else:
        difference = query_positions[:, None, :, None, :] - key_positions[:, None, None, :, :]
        distance = difference.abs().sum(-1) if metric == "manhattan" else difference.square().sum(-1).sqrt()
        offset = distance
    slope = slopes[:, :, None, None]
    if future_slopes is not None:
        slope = torch.where(offset < 0, future_slopes[:, :, None, None], slope)
    free = distance == 0
    if query_unbiased is not None and key_unbiased is not None:
        free = free | query_unbiased[:, None, :, None] | key_unbiased[:, None, None, :]
    # Distances are exact integers until this one product; slope inf at distance 0 would make NaN.
    return torch.where(free, 0.0, slope * distance.to(slopes.dtype))


def dense_visible(operands: Operands, options: Options) -> Tensor:
    """(b, h, T, S) bool, h = 1 or H: whether each key exists for each query, before slopes of inf."""
    query, key = operands.query, operands.key
    visible = torch.ones((1, 1, query.shape[2], key.shape[2]), dtype=torch.bool, device=query.device)
    if operands.key_mask is not None:
        visible = visible & operands.key_mask[:, None, None, :]
    if operands.query_segments is not None and operands.key_segments is not None:
        visible = visible & (operands.query_segments[:, None, :, None] == operands.key_segments[:, None, None, :])
    if operands.attn_mask is not None:
        visible = visible & operands.attn_mask
    if options.metric is not None:
        return visible
    query_positions, key_positions = token_positions(operands)
    offset = query_positions[:, None, :, None] - key_positions[:, None, None, :]
    rank = None if operands.key_ranks is None else operands.key_ranks[:, None, None, :]
    if options.causal:
        allowed = offset >= 0
        visible = visible & (allowed if rank is None else allowed | (rank < options.prefix))
    if options.left is not None or options.right is not None:
        inside = torch.ones_like(offset, dtype=torch.bool)
        if options.left is not None:
            inside = inside & (offset <= options.left)
        if options.right is not None:
            inside = inside & (offset >= -options.right)
        visible = visible & (inside if rank is None else inside | (rank < options.sinks))
    return visible
