# SPDX-License-Identifier: Apache-2.0
"""The public operation: prepare, select, call."""

from dataclasses import dataclass
from inspect import signature
from typing import Literal, Unpack, cast, overload

import torch
from torch import Tensor

from . import ops
from .backends import reference, select
from .prepare import AttentionOptions, check_names, prepare
from .semantics.bounds import KeyBounds
from .semantics.checks import check_tensor
from .semantics.problem import Operands, Problem, Result


@dataclass(frozen=True)
class Aux:
    """What `alibi_attention` knows besides its output."""

    lse: Tensor
    """(B, H, T) float32 (float64 for float64): natural log of the sum of exp(score) over the visible keys, in the
    relative form (bias 0 at distance 0); -inf where nothing is visible. Differentiable."""
    skipped: Tensor
    """(B, H, T), dtype of lse: proven bound of the skipped share of each row's softmax weight, <= tolerance."""
    computed: Tensor
    """(H,) int64: query-key pairs whose score was evaluated, summed over the batch."""

    @staticmethod
    def of(result: Result) -> "Aux":
        """From a backend's result."""
        return Aux(lse=result.lse, skipped=result.skipped.detach(), computed=result.computed.sum(0))


@overload
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    backend: str = "auto",
    return_aux: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    backend: str = "auto",
    return_aux: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Aux]: ...


def alibi_attention(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    causal: bool,
    window: tuple[int | None, int | None] | None = None,
    sinks: int = 0,
    prefix: int = 0,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    metric: str | None = None,
    future_slopes: Tensor | None = None,
    unbiased: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    tolerance: float | None = None,
    key_bounds: KeyBounds | None = None,
    backend: str = "auto",
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """softmax(cap(scale * q @ k.T) - slope_h * |p_i - r_j|) @ v over the keys each query can see.

    For query i at position p_i and key j at position r_j::

        score   = cap(scale * <q_i, k_j>) - bias      bias = 0 at distance 0, else slope_h * |p_i - r_j|
        visible = key_mask_j and segment_i == segment_j and attn_mask_ij
                  and (not causal or r_j <= p_i or rank_j < prefix)
                  and (-right <= p_i - r_j <= left or rank_j < sinks)

    where cap(x) is x, or softcap * tanh(x / softcap), and rank_j counts the real keys before j in its sequence and
    segment, in storage order. A query that sees nothing gives output 0, lse -inf and gradients 0. Gradients flow to
    query, key, value, slopes, future_slopes, and back from the output and from ``aux.lse``.

    Without positions, keys stand at 0..S-1 and queries at S-T..S-1: ends are aligned, as a cache needs (T=2, S=4,
    causal sees 1110 / 1111). With key_positions alone, queries take the last T of them.

    Args:
        query: (B, H, T, D), float16, bfloat16, float32 or float64; half types accumulate in float32.
        key: (B, G, S, D). H is a multiple of G; query head h reads key head h // (H // G).
        value: (B, G, S, V).
        slopes: (H,), (1, H) or (B, H), float32 or float64, one per *query* head. 0: no bias. inf: only distance 0 is
            left on that side. Negative slopes reward distance. See `alibi_slopes`.
        causal: hide keys later than the query. Required: nobody should have to guess.
        window: (left, right), inclusive, None = unlimited: (2, 0) keeps the query's own position and two before.
        sinks: keys of rank below this escape the window (they stay causal).
        prefix: keys of rank below this escape ``causal`` (they stay windowed).
        key_mask: (S,) or (B, S) bool; False: the key does not exist (padding).
        attn_mask: bool, broadcastable to (B, H, T, S); True = visible.
        query_segments, key_segments: (T,) or (B, T), (S,) or (B, S) integers; packed documents see only themselves.
        query_positions, key_positions: (T,) or (B, T), (S,) or (B, S) integers, in any order, repeats allowed. Under a
            metric: coordinates (T, C) or (B, T, C), and likewise for keys.
        metric: None, or the distance between coordinates: "euclidean" or "manhattan". Coordinates have no order, so
            causal, window, sinks, prefix and future_slopes are refused.
        future_slopes: as slopes, for keys later than the query; default: the same (symmetric).
        unbiased: keys j < n give, and queries S - T + i < n receive, no bias (CLS tokens, registers).
        scale: multiplies the dot product before cap and bias; default 1 / sqrt(D).
        softcap: > 0, or None.
        dropout_p: in [0, 1); pairs dropped from the output, the kept ones divided by 1 - p. The seed comes from
            torch's generator; `linbias.semantics.dropout` says which pairs stay.
        tolerance: in [0, 1): how large a share of a row's softmax weight may be skipped; default: a quarter of the
            accumulator's eps. 0 skips only what is invisible.
        key_bounds: from `key_bounds(key)`, kept beside a cache, so that keys can be skipped unread.
        backend: "auto", "reference", "tiled" or "native"; see `linbias.backends.explain`.
        return_aux: return (out, aux) with ``aux.lse``, ``aux.skipped`` and ``aux.computed``; see `Aux`.

    Returns:
        (B, H, T, V) in the query's dtype; with ``return_aux`` also `Aux`.

    Raises:
        TypeError, ValueError: naming the argument, the rule, what came and what to do.
        BackendUnavailable: the backend named cannot run this call; there is no silent fallback.

    Reference:
        Press et al., "Train short, test long", https://arxiv.org/abs/2108.12409, section 3.

    >>> query = torch.zeros(1, 1, 4, 2)  # no content: the softmax shows the bias alone
    >>> out = alibi_attention(query, query, torch.eye(4)[None, None], torch.tensor([0.5]), causal=True)
    >>> [round(weight, 4) for weight in out[0, 0, 3].tolist()]
    [0.1015, 0.1674, 0.276, 0.4551]
    """
    given: AttentionOptions = {
        "causal": causal,
        "window": window,
        "sinks": sinks,
        "prefix": prefix,
        "key_mask": key_mask,
        "attn_mask": attn_mask,
        "query_segments": query_segments,
        "key_segments": key_segments,
        "query_positions": query_positions,
        "key_positions": key_positions,
        "metric": metric,
        "future_slopes": future_slopes,
        "unbiased": unbiased,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "tolerance": tolerance,
        "key_bounds": key_bounds,
    }
    # What was not given stays absent: nothing is checked or carried along for it.
    options = {name: value for name, value in given.items() if value is not _DEFAULTS[name]}
    problem, operands = prepare(query, key, value, slopes, cast(AttentionOptions, options))
    if not return_aux:
        return output(problem, operands, backend)
    result = run(problem, operands, backend)
    return result.out, Aux.of(result)


_DEFAULTS = {name: parameter.default for name, parameter in signature(alibi_attention).parameters.items()}


def run(problem: Problem, operands: Operands, backend: str) -> Result:
    """The one way of every call, once prepared: pick the backend and run it."""
    return ops.attention(problem, operands, select(backend, problem))


def output(problem: Problem, operands: Operands, backend: str) -> Tensor:
    """`run` for its output alone."""
    return ops.output(problem, operands, select(backend, problem))


def alibi_attention_weights(query: Tensor, key: Tensor, slopes: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    """The softmax weights themselves, (B, H, T, S): to look at, at the cost of a dense matrix.

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D).
        slopes: as for `alibi_attention`.
        options: those of `alibi_attention`, ``causal`` required; without dropout_p, tolerance, key_bounds, backend and
            return_aux, which mean nothing here.

    Returns:
        (B, H, T, S) in the query's dtype; rows sum to 1, and to 0 where nothing is visible. Differentiable.

    Raises:
        TypeError, ValueError: as `alibi_attention`.

    >>> flat = torch.zeros(1, 1, 3, 2)
    >>> weights = alibi_attention_weights(flat, flat, torch.tensor([0.5]), causal=True)
    >>> [round(weight, 4) for weight in weights[0, 0, 2].tolist()]
    [0.1863, 0.3072, 0.5065]
    """
    # What changes only how the output is computed has no meaning for the exact softmax.
    without = frozenset({"dropout_p", "tolerance", "key_bounds"})
    check_names("alibi_attention_weights", options, without=without)
    problem, operands = prepare(query, key, key, slopes, options)
    return weights(problem, operands)


def weights(problem: Problem, operands: Operands) -> Tensor:
    """The softmax weights (B, H, T, S), without dropout, in the query's dtype."""
    with ops.full_precision(problem):
        return reference.weights(problem, operands).to(problem.dtype)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``.

    Args:
        out_a, out_b: (B, H, T, V), one dtype.
        lse_a, lse_b: (B, H, T), as ``aux.lse``; -inf where a set had no visible key.

    Returns:
        (out, lse) of the union, differentiable; dtypes as given.

    Raises:
        TypeError, ValueError: not tensors, or shapes that do not belong together.

    >>> out, lse = merge(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> out.tolist()
    [[[[0.5, 0.5]]]]
    """
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_tensor(name, tensor)
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.shape[:-1] != lse_a.shape:
        raise ValueError(
            f"merge needs out_a and out_b of one shape (..., V) and lse_a and lse_b of its (...), got "
            f"{tuple(out_a.shape)}, {tuple(lse_a.shape)}, {tuple(out_b.shape)}, {tuple(lse_b.shape)}"
        )
    empty = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    # The larger lse is the shift, so both exponentials stay in [0, 1]; it needs no gradient.
    shift = torch.where(empty, 0.0, torch.maximum(lse_a, lse_b).detach())
    weight_a, weight_b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = torch.where(empty, 1.0, weight_a + weight_b)
    out = (weight_a / total).unsqueeze(-1) * out_a + (weight_b / total).unsqueeze(-1) * out_b
    return out.to(out_a.dtype), torch.where(empty, -torch.inf, shift + total.log())
