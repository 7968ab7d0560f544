# SPDX-License-Identifier: Apache-2.0
"""The bias alone, as a dense tensor."""

from torch import Tensor

from .blocks import Blocks, Tiles, penalty
from .checks import check_count, check_metric, check_tensor, position_rows, slope_rows
from .problem import Options
from .tokens import Tokens, unbiased_marks


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

    >>> import torch
    >>> alibi_bias(torch.tensor([0.5]), torch.tensor([2]), torch.arange(4)).tolist()
    [[[[-1.0, -0.5, 0.0, -0.5]]]]
    """
    check_metric(metric)
    check_tensor("slopes", slopes)
    dtype = slopes.dtype
    slopes = slope_rows("slopes", slopes, None, None, dtype)
    rows, keys = (
        position_rows(name, check_tensor(name, given, slopes), None, None, metric, dtype)
        for name, given in (("query_positions", query_positions), ("key_positions", key_positions))
    )
    if future_slopes is not None:
        if metric is not None:
            raise ValueError(f"future_slopes must be None under metric={metric!r}: coordinates have no later side")
        future_slopes = slope_rows("future_slopes", future_slopes, None, slopes.shape[1], dtype, slopes)[
            ..., None, None
        ]
    _check_together(slopes, future_slopes, rows, keys, coordinates=metric is not None)
    marks = unbiased_marks(check_count("unbiased", unbiased), rows.shape[1], keys.shape[1], slopes.device)
    sides = [
        Blocks.of(Tokens(places.shape[1], 0, places.device, places, unbiased=free))
        for places, free in zip((rows, keys), marks, strict=True)
    ]
    tiles = Tiles.of(sides[0].down(), sides[1].across(), Options(metric=metric))
    return 0.0 - penalty(tiles, slopes[..., None, None], future_slopes)


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
