# SPDX-License-Identifier: Apache-2.0
"""From what the user said (`AttentionOptions`) to what a backend is given (`Problem`, `Operands`).

`prepare` is the one way in for what users pass: every rule is checked and every default resolved here, once, for every
door. Callers inside that already know where their tokens stand (a cache, packed sequences, a patched model) enter at
`resolve`.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor

from .semantics.bounds import KeyBounds
from .semantics.checks import (
    PLAIN_TENSORS,
    autocast_enabled,
    check_count,
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
    unwatched,
)
from .semantics.dropout import draw_seed
from .semantics.problem import (
    Operands,
    Options,
    Problem,
    accumulating_dtype,
    any_given,
    default_scale,
    default_tolerance,
    transform_active,
)
from .semantics.tokens import Tokens, key_ranks, unbiased_marks

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SharedOptions(TypedDict, total=False):
    """The options of `linbias.alibi_attention` but `causal`, which a cache has a default for."""

    window: tuple[int | None, int | None] | None
    sinks: int
    prefix: int
    key_mask: Tensor | None
    attn_mask: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    metric: str | None
    future_slopes: Tensor | None
    unbiased: int
    scale: float | None
    softcap: float | None
    dropout_p: float
    tolerance: float | None
    key_bounds: KeyBounds | None


class AttentionOptions(SharedOptions):
    """The options of `linbias.alibi_attention` that say what is computed; documented there, with its defaults."""

    causal: bool


OPTION_KEYS = frozenset(AttentionOptions.__annotations__)


def check_names(caller: str, options: Iterable[str], *, without: frozenset[str] = frozenset()) -> None:
    """Keyword arguments by name: known, but for those `without` meaning there, and `causal` among them."""
    names = OPTION_KEYS - without
    unknown = sorted(set(options) - names)
    if unknown:
        raise TypeError(f"{caller} takes no {', '.join(unknown)}; its options are {', '.join(sorted(names))}")
    if "causal" not in options:
        raise TypeError(f"{caller} needs causal=True or causal=False: nobody should have to guess")


def prepare(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: AttentionOptions, *, draw: bool = True
) -> tuple[Problem, Operands]:
    """Check and resolve one call; without `draw`, one that will not be run, so that torch's generator is left alone.

    Raises:
        TypeError, ValueError: naming the argument, the rule, what came and what to do.
    """
    signature = _signature(query, key, value, slopes, options)
    known = None if signature is None else _KNOWN.get(signature)
    if known is not None:
        return known, Operands(query, key, value, slopes.unsqueeze(0) if slopes.dim() == 1 else slopes)
    problem, operands = _prepare(query, key, value, slopes, options, draw=draw)
    # What only explains a call draws no seed, so a call of that signature may need more than is seen here.
    if signature is not None and draw and operands.slopes.dtype == slopes.dtype and not any_given(operands):
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[signature] = problem
    return problem, operands


_KNOWN: dict[tuple[Any, ...], Problem] = {}
"""Problems of calls that passed every check and need no tensor but their four, by signature. To check again what a
small call has in common with the one before would cost a third of its time."""
_MOST_KNOWN = 256
_VALUES = frozenset((bool, int, float, str, type(None)))


def _signature(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: AttentionOptions
) -> tuple[Any, ...] | None:
    """All that `_prepare` reads of a call; None where that may be more than numbers and the kind of four tensors.

    Types go with values, because True, 1 and 1.0 are equal and not alike.
    """
    parts: list[Any] = []
    for name, given in options.items():
        if type(given) not in _VALUES:
            return None
        parts += name, type(given), given
    for tensor in (query, key, value, slopes):
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        parts += tensor.shape, tensor.dtype, tensor.device
    if not unwatched() or transform_active() or autocast_enabled(query.device.type):
        return None
    return tuple(parts)


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: AttentionOptions, *, draw: bool
) -> tuple[Problem, Operands]:
    inputs = autocast(query, key, value)
    _check_layout(query, key, slopes)
    check_inputs(*inputs)
    rounded, like, metric = inputs[1].dtype != key.dtype, inputs[0], check_metric(options.get("metric"))
    batch, queries, keys, device = query.shape[0], query.shape[2], key.shape[2], query.device
    if metric is not None:
        _refuse_order(options, metric)
    bounds = options.get("key_bounds")
    if bounds is not None:
        bounds = _check_bounds(bounds, key)
        # Rounding may lengthen a key beyond the bound of what was given; the backend computes its own.
        bounds = None if rounded else bounds
    key_mask, segments, places = options.get("key_mask"), (None, None), (None, None)
    if key_mask is not None:
        key_mask = token_rows("key_mask", key_mask, batch, keys, (torch.bool,), like)
    if options.get("query_segments") is not None or options.get("key_segments") is not None:
        segments = _segments(like, keys, options)
    if options.get("query_positions") is not None or options.get("key_positions") is not None or metric is not None:
        places = _positions(like, keys, options, metric)
    marks = unbiased_marks(check_count("unbiased", options.get("unbiased", 0)), queries, keys, device)
    sides = (
        Tokens(queries, keys - queries, device, places[0], segments[0], unbiased=marks[0]),
        Tokens(keys, 0, device, places[1], segments[1], real=key_mask, unbiased=marks[1]),
    )
    return resolve(inputs, slopes, options, sides, bounds=bounds, draw=draw)


def resolve(
    inputs: tuple[Tensor, Tensor, Tensor],
    slopes: Tensor,
    options: AttentionOptions,
    tokens: tuple[Tokens, Tokens],
    *,
    bounds: KeyBounds | None = None,
    draw: bool = True,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Problem, Operands]:
    """A call whose inputs were checked and whose tokens stand: numbers, slopes and attn_mask are checked, nothing else.

    Args:
        inputs: query, key and value; with a `table`, the pages of key and value.
        slopes, options: the user's.
        tokens: of the queries and of the keys; both have positions, or neither. Ranks are added where they are needed.
        bounds: of the keys, in the accumulating dtype.
        draw: draw a seed for dropout.
        lengths, table: `Operands.key_lengths` and `Operands.block_table`.
    """
    query, keys = inputs[0], tokens[1]
    batch, heads, _, head_dim = query.shape
    numbers = resolve_options(options, head_dim, query.dtype, bounds)
    if table is not None:
        numbers = numbers._replace(paged_keys=keys.length)
    dtype = accumulating_dtype(query.dtype)
    mask, future, rank = options.get("attn_mask"), options.get("future_slopes"), keys.rank
    if rank is None and (numbers.sinks > 0 or numbers.prefix > 0):
        rank = key_ranks(keys.length, keys.real, keys.segment, keys.device)
    operands = Operands(
        *inputs,
        slope_rows("slopes", slopes, batch, heads, dtype, query),
        None if future is None else slope_rows("future_slopes", future, batch, heads, dtype, query),
        tokens[0].position,
        keys.position,
        tokens[0].segment,
        keys.segment,
        keys.real,
        None if mask is None else _mask(mask, query, keys.length),
        rank,
        tokens[0].unbiased,
        keys.unbiased,
        None if bounds is None else bounds.norms,
        draw_seed(query.device) if draw and numbers.dropout_p > 0 else None,
        lengths,
        table,
    )
    return Problem.of(operands, numbers, transformed=transform_active()), operands


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, q, k and v in its dtype, fp64 excepted, as scaled_dot_product_attention has it."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    kind = query.device.type
    if not autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(query), cast(key), cast(value)


def _check_layout(query: Tensor, key: Tensor, slopes: Tensor) -> None:
    """Whether these are (batch, tokens, heads, head dim), the commonest mistake, whose other symptoms mislead."""
    check_tensor("slopes", slopes)
    if query.dim() != 4 or key.dim() != 4 or slopes.dim() not in (1, 2) or slopes.shape[-1] == query.shape[1]:
        return
    heads, (tokens, third), kv_heads = slopes.shape[-1], query.shape[1:3], key.shape[2]
    if third == heads and kv_heads > 0 and heads % kv_heads == 0:
        raise ValueError(
            f"query must have layout (batch, heads, tokens, head dim), got {tuple(query.shape)}: its third size, not "
            f"its second, {tokens}, is the number of slopes, {heads}; pass query.transpose(1, 2), and key and value "
            f"likewise"
        )


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Whether these, which `autocast` found to be dense tensors, are a query, key and value of one call."""
    dtype, device = query.dtype, query.device
    if dtype not in _FLOATING:
        raise TypeError(f"query must be float16, bfloat16, float32 or float64, got {dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, tokens, head dim), got shape {tuple(tensor.shape)}"
            )
        if tensor is query:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must have the query's dtype {dtype}, got {tensor.dtype}; cast it with .to()")
        if tensor.device != device:
            raise ValueError(f"{name} must be on the query's device {device}, got {tensor.device}")
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


def resolve_options(
    options: AttentionOptions, head_dim: int, dtype: torch.dtype, bounds: KeyBounds | None = None
) -> Options:
    """The numbers of a call with inputs of `dtype`, checked, defaults resolved; only what is given costs time."""
    left = right = None
    numbers: dict[str, Any] = {"scale": default_scale(head_dim), "tolerance": default_tolerance(dtype)}
    for name, value in options.items():
        if name == "window":
            left, right = check_window(value)
        elif (check := _NUMBERS.get(name)) is not None:
            numbers[name] = check(name, value, numbers.get(name))
    return Options(left=left, right=right, bounds_block=0 if bounds is None else bounds.block, **numbers)


_NUMBERS: dict[str, Callable[[str, Any, Any], Any]] = {
    "causal": lambda name, value, _: check_flag(name, value),
    "sinks": lambda name, value, _: check_count(name, value),
    "prefix": lambda name, value, _: check_count(name, value),
    "metric": lambda _, value, __: check_metric(value),
    "scale": check_scale,
    "softcap": lambda _, value, __: check_softcap(value),
    "dropout_p": lambda name, value, _: check_share(name, value),
    "tolerance": lambda _, value, default: check_tolerance(value, default),
}
"""How each number is checked: by its name, what was given and the default."""


def _refuse_order(given: AttentionOptions, metric: str) -> None:
    """Coordinates have no before and after, so nothing that needs an order goes with a metric."""
    used = {
        "causal": given["causal"],
        "window": given.get("window") is not None,
        "sinks": given.get("sinks", 0) != 0,
        "prefix": given.get("prefix", 0) != 0,
        "future_slopes": given.get("future_slopes") is not None,
    }
    wrong = [name for name, there in used.items() if there]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} must not be used under metric={metric!r}: coordinates have no order; "
            f"pass causal=False, leave the others out, and hide pairs with attn_mask instead"
        )


def _segments(query: Tensor, keys: int, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    query_segments, key_segments = options.get("query_segments"), options.get("key_segments")
    if query_segments is None or key_segments is None:
        raise ValueError("query_segments and key_segments must be given together; in self-attention they are one")
    batch, _, queries, _ = query.shape
    return (
        segment_rows("query_segments", query_segments, batch, queries, query),
        segment_rows("key_segments", key_segments, batch, keys, query),
    )


def _positions(query: Tensor, keys: int, options: AttentionOptions, metric: str | None) -> tuple[Tensor, Tensor]:
    """Both position tensors, where one is given."""
    query_positions, key_positions = options.get("query_positions"), options.get("key_positions")
    if metric is not None and key_positions is None:
        raise ValueError(f"key_positions must be given under metric={metric!r}; see grid_positions")
    batch, queries = query.shape[0], query.shape[2]
    dtype = accumulating_dtype(query.dtype)
    if key_positions is None:
        key_rows = torch.arange(keys, device=query.device)[None]
    else:
        given = check_tensor("key_positions", key_positions, query)
        key_rows = position_rows("key_positions", given, batch, keys, metric, dtype)
    if query_positions is None:
        if queries > keys:
            raise ValueError(
                f"query_positions must be given when there are more queries ({queries}) than keys ({keys}): "
                f"key_positions alone place only the last {keys} queries"
            )
        return key_rows[:, keys - queries :], key_rows
    given = check_tensor("query_positions", query_positions, query)
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


def _check_bounds(bounds: object, key: Tensor) -> KeyBounds:
    if not isinstance(bounds, KeyBounds):
        raise TypeError(f"key_bounds must come from linbias.key_bounds, got {type(bounds).__name__}")
    if check_count("key_bounds.block", bounds.block) < 1:
        raise ValueError(f"key_bounds.block must be at least 1, got {bounds.block}; recompute with linbias.key_bounds")
    batch, kv_heads, keys, _ = key.shape
    wanted = (batch, kv_heads, -(-keys // bounds.block))
    norms, dtype = check_tensor("key_bounds.norms", bounds.norms, key), accumulating_dtype(key.dtype)
    if tuple(norms.shape) != wanted or norms.dtype != dtype:
        raise ValueError(
            f"key_bounds.norms must be {dtype} of shape {wanted} for this key and block={bounds.block}, "
            f"got {norms.dtype} of {tuple(norms.shape)}; recompute with linbias.key_bounds"
        )
    return bounds
