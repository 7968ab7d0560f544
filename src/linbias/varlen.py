# SPDX-License-Identifier: Apache-2.0
"""Sequences laid end to end, without padding: flash-attn's varlen form.

A varlen call *is* a packed call: one batch item, the sequence number as segment, positions that restart with each
sequence. So no backend knows of it, and nothing is padded or copied.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import Aux, attend
from .prepare import Request
from .semantics.checks import check_count, check_tensor, position_rows, readable, token_rows
from .semantics.problem import Result


def alibi_attention_varlen(  # noqa: PLR0913  (the public operations are exempt)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    window: tuple[int | None, int | None] | None = None,
    sinks: int = 0,
    prefix: int = 0,
    key_mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    future_slopes: Tensor | None = None,
    unbiased: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    tolerance: float | None = None,
    backend: str = "auto",
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """`alibi_attention` on each of N sequences laid end to end, as if each were called alone.

    Sequence n owns queries ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n+1] - 1`` and keys likewise; its ends are aligned, so
    its i-th query stands at ``len_k - len_q + i``. Ranks (sinks, prefix) and ``unbiased`` count within a sequence.
    Rows beyond the last boundary belong to no sequence and give output 0 and lse -inf.

    Args:
        query: (total_q, H, D).
        key: (total_k, G, D).
        value: (total_k, G, V).
        slopes: (H,), (1, H), or (N, H): one row a sequence, which pads the sequences to the longest.
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 or int64, from 0 upward, on the query's device. Not read on the host.
        max_seqlen_q, max_seqlen_k: the longest sequence, or more; used only where sequences must be padded. Too small a
            number raises on the CPU; elsewhere, and in traced code, it is not compared and the result is undefined.
        causal, window, sinks, prefix, future_slopes, unbiased, scale, softcap, tolerance, backend, return_aux: as for
            `alibi_attention`.
        dropout_p: likewise; the indices i and j count from the start of the call and b is 0. With one row of slopes a
            sequence, they count within the sequence and b is its number.
        key_mask: (total_k,) bool.
        query_positions, key_positions: (total_q,), (total_k,) integers; given together, they replace the aligned ones.

    Returns:
        (total_q, H, V); with ``return_aux`` also `Aux` with lse and skipped of shape (H, total_q).

    Raises:
        TypeError, ValueError, BackendUnavailable: as `alibi_attention`.

    >>> q = torch.zeros(7, 1, 2)  # documents of 3 and 4 tokens
    >>> bounds = torch.tensor([0, 3, 7])
    >>> half = torch.tensor([0.5])
    >>> out = alibi_attention_varlen(q, q, torch.eye(7)[:, None], half, bounds, bounds, 4, 4, causal=True)
    >>> [round(weight, 4) for weight in out[6, 0].tolist()]
    [0.0, 0.0, 0.0, 0.1015, 0.1674, 0.276, 0.4551]
    """
    _check_layout(query, key, value, cu_seqlens_q, cu_seqlens_k)
    check_count("max_seqlen_q", max_seqlen_q)
    check_count("max_seqlen_k", max_seqlen_k)
    if (query_positions is None) != (key_positions is None):
        raise ValueError("query_positions and key_positions must be given together in a varlen call")
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "sinks": sinks,
        "prefix": prefix,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "tolerance": tolerance,
    }
    sequences = _Sequences.of(query.shape[0], key.shape[0], cu_seqlens_q, cu_seqlens_k)
    places = (
        (sequences.query_places, sequences.key_places)
        if query_positions is None or key_positions is None
        else (_places("query_positions", query_positions, query), _places("key_positions", key_positions, key))
    )
    if key_mask is not None:
        key_mask = token_rows("key_mask", key_mask, 1, key.shape[0], (torch.bool,), query)[0]
    marks = sequences.unbiased(check_count("unbiased", unbiased))
    if _differ_by_sequence("slopes", slopes) or _differ_by_sequence("future_slopes", future_slopes):
        call = _Padded(sequences, max_seqlen_q, max_seqlen_k)
        request = call.request(options, future_slopes, key_mask, places, marks)
        result = call.restore(attend(*call.inputs(query, key, value), slopes, request, backend))
    else:
        request = Request(
            **options,
            future_slopes=future_slopes,
            key_mask=key_mask,
            query_positions=places[0],
            key_positions=places[1],
            query_segments=sequences.query_numbers,
            key_segments=sequences.key_numbers,
            unbiased_marks=marks,
        )
        result = attend(_packed(query), _packed(key), _packed(value), slopes, request, backend)
    out = result.out.squeeze(0).transpose(0, 1)
    aux = Aux.of(result)
    flat = Aux(lse=aux.lse.squeeze(0), skipped=aux.skipped.squeeze(0), computed=aux.computed)
    return (out, flat) if return_aux else out


def _differ_by_sequence(name: str, slopes: Tensor | None) -> bool:
    return slopes is not None and check_tensor(name, slopes).dim() == 2 and slopes.shape[0] != 1


def _places(name: str, positions: Tensor, tokens: Tensor) -> Tensor:
    """(total,) int64."""
    return position_rows(name, check_tensor(name, positions, tokens), 1, tokens.shape[0], None, torch.int64)[0]


def _packed(tokens: Tensor) -> Tensor:
    """(total, heads, dim) as the one batch item (1, heads, total, dim), without a copy."""
    return tokens.transpose(0, 1).unsqueeze(0)


def _check_layout(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if check_tensor(name, tensor).dim() != 3:
            raise ValueError(
                f"{name} must have 3 dimensions (total tokens, heads, head dim) in a varlen call, "
                f"got shape {tuple(tensor.shape)}"
            )
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, bounds, query)
        if bounds.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {bounds.dtype}")
        if bounds.dim() != 1 or bounds.shape[0] == 0:
            raise ValueError(f"{name} must have shape (sequences + 1,) and start with 0, got {tuple(bounds.shape)}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must bound the same sequences, got {cu_seqlens_q.shape[0] - 1} and "
            f"{cu_seqlens_k.shape[0] - 1}"
        )


@dataclass(frozen=True)
class _Sequences:
    """Per token: its sequence and its place in it. All on the device."""

    query_starts: Tensor
    """(N + 1,) int64."""
    key_starts: Tensor
    """(N + 1,) int64."""
    query_numbers: Tensor
    """(total_q,): the sequence; N beyond the last."""
    key_numbers: Tensor
    """(total_k,): the sequence; -1 beyond the last, which no query has."""
    query_places: Tensor
    """(total_q,): aligned with the sequence's last key."""
    key_places: Tensor
    """(total_k,): from 0 in each sequence."""

    @staticmethod
    def of(queries: int, keys: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> "_Sequences":
        query_starts, key_starts = cu_seqlens_q.long(), cu_seqlens_k.long()
        query_index = torch.arange(queries, device=query_starts.device)
        key_index = torch.arange(keys, device=key_starts.device)
        query_numbers = torch.bucketize(query_index, query_starts[1:], right=True)
        key_numbers = torch.bucketize(key_index, key_starts[1:], right=True)
        ends_apart = torch.nn.functional.pad(key_starts.diff() - query_starts.diff(), (0, 1))
        return _Sequences(
            query_starts=query_starts,
            key_starts=key_starts,
            query_numbers=query_numbers,
            key_numbers=torch.where(key_index < key_starts[-1], key_numbers, -1),
            query_places=query_index - query_starts[query_numbers] + ends_apart[query_numbers],
            key_places=key_index - key_starts[key_numbers],
        )

    def unbiased(self, count: int) -> tuple[Tensor, Tensor] | None:
        """(1, total) marks of each sequence's first `count` tokens."""
        return None if count == 0 else ((self.query_places < count)[None], (self.key_places < count)[None])


class _Padded:
    """The same call as a batch of N padded sequences, for slopes that differ by sequence."""

    def __init__(self, sequences: _Sequences, max_seqlen_q: int, max_seqlen_k: int) -> None:
        self._query_index, self._query_real = _pad_index("max_seqlen_q", sequences.query_starts, max_seqlen_q)
        self._key_index, self._key_real = _pad_index("max_seqlen_k", sequences.key_starts, max_seqlen_k)
        self._numbers = sequences.query_numbers
        self._columns = torch.arange(len(sequences.query_numbers), device=self._numbers.device)
        self._columns = self._columns - sequences.query_starts[self._numbers]

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, heads, longest, dim) each."""
        # A padded query sees its sequence's keys, so it must not be a token that may hold NaN.
        queries = torch.where(self._query_real[..., None, None], _take(query, self._query_index), 0.0)
        return (
            queries.transpose(1, 2),
            _take(key, self._key_index).transpose(1, 2),
            _take(value, self._key_index).transpose(1, 2),
        )

    def request(
        self,
        options: dict[str, Any],
        future_slopes: Tensor | None,
        key_mask: Tensor | None,
        places: tuple[Tensor, Tensor],
        marks: tuple[Tensor, Tensor] | None,
    ) -> Request:
        """The options, per-token ones padded."""
        key_rows = self._key_real if key_mask is None else self._key_real & _take(key_mask, self._key_index)
        return Request(
            **options,
            future_slopes=future_slopes,
            key_mask=key_rows,
            query_positions=_take(places[0], self._query_index),
            key_positions=_take(places[1], self._key_index),
            unbiased_marks=marks and (_take(marks[0][0], self._query_index), _take(marks[1][0], self._key_index)),
        )

    def restore(self, result: Result) -> Result:
        """Back to one packed item; rows of no sequence see nothing."""
        sequences = result.out.shape[0]
        real = self._numbers < sequences
        rows, columns = torch.where(real, self._numbers, 0), torch.where(real, self._columns, 0)

        def packed(tensor: Tensor, empty: float) -> Tensor:
            chosen = tensor[rows, :, columns]
            shape = (-1,) + (1,) * (chosen.dim() - 1)
            return torch.where(real.view(shape), chosen, empty).transpose(0, 1).unsqueeze(0)

        return Result(
            out=packed(result.out, 0.0),
            lse=packed(result.lse, -torch.inf),
            lse_low=packed(result.lse_low, 0.0),
            skipped=packed(result.skipped, 0.0),
            computed=result.computed.sum(0, keepdim=True),
        )


def _pad_index(name: str, starts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """(N, longest) index into the tokens laid end to end, and which places are real."""
    lengths = starts.diff()
    if readable(lengths) and lengths.numel() and (found := int(lengths.amax())) > longest:
        raise ValueError(f"{name} must be at least the longest sequence's {found} tokens, got {longest}; pass {found}")
    columns = torch.arange(longest, device=starts.device)
    real = columns < lengths[:, None]
    return torch.where(real, starts[:-1, None] + columns, 0), real


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens[index], also where there are no tokens and so no real place."""
    return tokens[index] if tokens.shape[0] else tokens.new_zeros((*index.shape, *tokens.shape[1:]))
