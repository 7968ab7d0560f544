# SPDX-License-Identifier: Apache-2.0
"""From what the user said (`Request`) to what a backend is given (`Problem`, `Operands`).

Every default is resolved and every rule checked here, once, for every door into the library.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .semantics.blocks import key_ranks, unbiased_marks
from .semantics.bounds import KeyBounds
from .semantics.checks import (
    check_count,
    check_dense,
    check_flag,
    check_metric,
    check_scale,
    check_share,
    check_softcap,
    check_tensor,
    check_tolerance,
    check_window,
    position_rows,
    segment_rows,
    slope_rows,
    token_rows,
)
from .semantics.dropout import draw_seed
from .semantics.problem import (
    Operands,
    Options,
    Problem,
    accumulating_dtype,
    default_scale,
    default_tolerance,
    transform_active,
)

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Request(NamedTuple):
    """The options of `linbias.alibi_attention`, as the user gave them; documented there."""

    causal: bool
    window: tuple[int | None, int | None] | None = None
    sinks: int = 0
    prefix: int = 0
    key_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    metric: str | None = None
    future_slopes: Tensor | None = None
    unbiased: int = 0
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    tolerance: float | None = None
    key_bounds: KeyBounds | None = None
    unbiased_marks: tuple[Tensor, Tensor] | None = None
    """(1, T) and (1, S) bool marks that stand for `unbiased` where "the first n" is per sequence (varlen)."""

    @staticmethod
    def of(caller: str, options: Mapping[str, Any], *, without: frozenset[str] = frozenset()) -> "Request":
        """From a caller's keyword arguments, except those `without` meaning there."""
        names = _USER_OPTIONS - without
        unknown = sorted(options.keys() - names)
        if unknown:
            raise TypeError(f"{caller} takes no {', '.join(unknown)}; its options are {', '.join(sorted(names))}")
        if "causal" not in options:
            raise TypeError(f"{caller} needs causal=True or causal=False: nobody should have to guess")
        return Request(**options)


_USER_OPTIONS = frozenset(Request._fields) - {"unbiased_marks"}


def prepare(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, request: Request, *, draw: bool = True
) -> tuple[Problem, Operands]:
    """Check and resolve one call; without `draw`, one that will not be run, so that torch's generator is left alone.

    Raises:
        TypeError, ValueError: naming the argument, the rule, what came and what to do.
    """
    given = key
    query, key, value = _check_inputs(*_autocast(query, key, value))
    if request.key_bounds is not None and key.dtype != given.dtype:
        # Rounding may lengthen a key beyond the bound of what was given; the backend computes its own.
        request = request._replace(key_bounds=None)
    options = _options(query, request)
    operands = _operands(query, key, value, slopes, request, options)
    if draw and options.dropout_p > 0:
        operands = operands._replace(seed=draw_seed(query.device))
    return Problem.of(operands, options, transformed=transform_active()), operands


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, q, k and v in its dtype, fp64 excepted, as scaled_dot_product_attention has it."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    kind = query.device.type
    if kind == "meta" or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(query), cast(key), cast(value)


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if query.dtype not in _FLOATING:
        raise TypeError(f"query must be float16, bfloat16, float32 or float64, got {query.dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dense(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, tokens, head dim), got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the query's dtype {query.dtype}, got {tensor.dtype}; cast it with .to()")
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on the query's device {query.device}, got {tensor.device}")
    batch, heads, _, head_dim = query.shape
    key_batch, kv_heads, keys, key_dim = key.shape
    if key_batch != batch or value.shape[0] != batch:
        raise ValueError(
            f"query, key and value must have one batch size, got {batch}, {key_batch} and {value.shape[0]}"
        )
    if key_dim != head_dim or head_dim == 0:
        raise ValueError(f"key must have the query's head dim {head_dim}, at least 1, got {key_dim}")
    if value.shape[1] != kv_heads or value.shape[2] != keys:
        raise ValueError(
            f"value must have the key's heads and tokens ({kv_heads}, {keys}), got {tuple(value.shape[1:3])}"
        )
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query heads must be a positive multiple of key/value heads, got {heads} and {kv_heads}; "
            f"layout is (batch, heads, tokens, head dim)"
        )
    return query, key, value


def _options(query: Tensor, request: Request) -> Options:
    left, right = check_window(request.window)
    options = Options(
        causal=check_flag("causal", request.causal),
        left=left,
        right=right,
        sinks=check_count("sinks", request.sinks),
        prefix=check_count("prefix", request.prefix),
        metric=check_metric(request.metric),
        scale=check_scale("scale", request.scale, default_scale(query.shape[3])),
        softcap=check_softcap(request.softcap),
        dropout_p=check_share("dropout_p", request.dropout_p),
        tolerance=check_tolerance(request.tolerance, default_tolerance(query.dtype)),
        bounds_block=0 if request.key_bounds is None else _bounds_block(request.key_bounds),
    )
    if options.metric is not None:
        _refuse_order(request, options)
    return options


def _refuse_order(request: Request, options: Options) -> None:
    """Coordinates have no before and after, so nothing that needs an order goes with a metric."""
    given = {
        "causal": options.causal,
        "window": request.window is not None,
        "sinks": options.sinks != 0,
        "prefix": options.prefix != 0,
        "future_slopes": request.future_slopes is not None,
    }
    wrong = [name for name, used in given.items() if used]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} must be left out under metric={options.metric!r}: coordinates have no order; "
            f"hide pairs with attn_mask instead"
        )


def _operands(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, request: Request, options: Options
) -> Operands:
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    dtype = accumulating_dtype(query.dtype)
    key_mask, key_segments, query_segments = request.key_mask, None, None
    if key_mask is not None:
        key_mask = token_rows("key_mask", key_mask, batch, keys, (torch.bool,), query)
    if (request.query_segments is None) != (request.key_segments is None):
        raise ValueError("query_segments and key_segments must be given together; in self-attention they are one")
    if request.query_segments is not None and request.key_segments is not None:
        query_segments = segment_rows("query_segments", request.query_segments, batch, queries, query)
        key_segments = segment_rows("key_segments", request.key_segments, batch, keys, query)
    query_positions, key_positions = _positions(query, key, request, options)
    marks = request.unbiased_marks or unbiased_marks(check_count("unbiased", request.unbiased), queries, keys, query)
    bounds = request.key_bounds
    if bounds is not None:
        _check_bounds(bounds, key, dtype)
    ranked = options.sinks > 0 or options.prefix > 0
    return Operands(
        query=query,
        key=key,
        value=value,
        slopes=slope_rows("slopes", slopes, batch, heads, dtype, query),
        future_slopes=None
        if request.future_slopes is None
        else slope_rows("future_slopes", request.future_slopes, batch, heads, dtype, query),
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        key_mask=key_mask,
        attn_mask=None if request.attn_mask is None else _mask(request.attn_mask, query, keys),
        key_ranks=key_ranks(keys, key_mask, key_segments, query) if ranked else None,
        query_unbiased=marks[0],
        key_unbiased=marks[1],
        bound_norms=None if bounds is None else bounds.norms,
    )


def _positions(query: Tensor, key: Tensor, request: Request, options: Options) -> tuple[Tensor | None, Tensor | None]:
    """Both position tensors, or neither."""
    metric = options.metric
    if metric is not None and request.key_positions is None:
        raise ValueError(f"key_positions must be given under metric={metric!r}; see grid_positions")
    if request.query_positions is None and request.key_positions is None:
        return None, None
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    dtype = accumulating_dtype(query.dtype)
    if request.key_positions is None:
        key_rows = torch.arange(keys, device=query.device)[None]
    else:
        given = check_tensor("key_positions", request.key_positions, query)
        key_rows = position_rows("key_positions", given, batch, keys, metric, dtype)
    if request.query_positions is None:
        if queries > keys:
            raise ValueError(
                f"query_positions must be given when there are more queries ({queries}) than keys ({keys}): "
                f"key_positions alone place only the last {keys} queries"
            )
        return key_rows[:, keys - queries :], key_rows
    given = check_tensor("query_positions", request.query_positions, query)
    query_rows = position_rows("query_positions", given, batch, queries, metric, dtype)
    if metric is not None and query_rows.shape[2] != key_rows.shape[2]:
        raise ValueError(
            f"query_positions and key_positions must have one number of coordinates, "
            f"got {query_rows.shape[2]} and {key_rows.shape[2]}"
        )
    return query_rows, key_rows


def _mask(mask: Tensor, query: Tensor, keys: int) -> Tensor:
    check_tensor("attn_mask", mask, query)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask must be bool with True = visible, got {mask.dtype}; a float mask of 0 and -inf is `mask == 0`"
        )
    full = (*query.shape[:3], keys)
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(size not in (1, whole) for size, whole in zip(sizes, full, strict=True)):
        raise ValueError(f"attn_mask must broadcast to (B, H, T, S) = {tuple(full)}, got {tuple(mask.shape)}")
    return mask[(None,) * (4 - mask.dim())]


def _bounds_block(bounds: KeyBounds) -> int:
    if not isinstance(bounds, KeyBounds):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"key_bounds must come from linbias.key_bounds, got {type(bounds).__name__}")
    if check_count("key_bounds.block", bounds.block) < 1:
        raise ValueError(f"key_bounds.block must be at least 1, got {bounds.block}; recompute with linbias.key_bounds")
    return bounds.block


def _check_bounds(bounds: KeyBounds, key: Tensor, dtype: torch.dtype) -> None:
    batch, kv_heads, keys, _ = key.shape
    wanted = (batch, kv_heads, -(-keys // bounds.block))
    norms = check_tensor("key_bounds.norms", bounds.norms, key)
    if tuple(norms.shape) != wanted or norms.dtype != dtype:
        raise ValueError(
            f"key_bounds.norms must be {dtype} of shape {wanted} for this key and block={bounds.block}, "
            f"got {norms.dtype} of {tuple(norms.shape)}; recompute with linbias.key_bounds"
        )
