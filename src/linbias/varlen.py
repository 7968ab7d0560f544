# SPDX-License-Identifier: Apache-2.0
"""Sequences laid end to end, without padding: flash-attn's varlen form.

A varlen call *is* a packed call: one batch item, the sequence number as segment, positions that restart with each
sequence. So no backend knows of it, and nothing is padded or copied.
"""

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from .attention import Aux, run
from .prepare import AttentionOptions, autocast, check_inputs, check_names, resolve
from .semantics.checks import check_count, check_tensor, position_rows, readable, token_rows
from .semantics.problem import Result
from .semantics.tokens import Tokens

_MEANINGLESS = frozenset({"attn_mask", "query_segments", "key_segments", "metric", "key_bounds"})
"""Options of `alibi_attention` that the packed form has no use for: its sequences are its segments."""


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
    backend: str = "auto",
    return_aux: bool = False,
    **options: Unpack[AttentionOptions],
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
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 or int64, on the query's device: from 0, never falling, ending at the
            number of tokens or before. Compared on the CPU; elsewhere, and in traced code, they are not read on the
            host, and what others mean is undefined.
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
    check_names("alibi_attention_varlen", options, without=_MEANINGLESS)
    places = options.get("query_positions"), options.get("key_positions")
    if (places[0] is None) != (places[1] is None):
        raise ValueError("query_positions and key_positions must be given together in a varlen call")
    inputs = autocast(*(tokens.transpose(0, 1).unsqueeze(0) for tokens in (query, key, value)))
    check_inputs(*inputs)
    sequences = Sequences.of(query, key, cu_seqlens_q, cu_seqlens_k)
    result = run_packed(inputs, slopes, options, sequences, (max_seqlen_q, max_seqlen_k), backend)
    aux = Aux.of(result)
    out = result.out.squeeze(0).transpose(0, 1)
    flat = Aux(lse=aux.lse.squeeze(0), skipped=aux.skipped.squeeze(0), computed=aux.computed)
    return (out, flat) if return_aux else out


def run_packed(
    inputs: tuple[Tensor, Tensor, Tensor],
    slopes: Tensor,
    options: AttentionOptions,
    sequences: "Sequences",
    longest: tuple[int, int],
    backend: str,
) -> Result:
    """The packed call of (1, heads, total, dim) inputs; they, the boundaries and `longest` (T, S) were checked."""
    query, key, _ = inputs
    queries, keys = sequences.tokens(check_count("unbiased", options.get("unbiased", 0)))
    places = options.get("query_positions"), options.get("key_positions")
    if places[0] is not None and places[1] is not None:
        queries = queries._replace(position=_places("query_positions", places[0], query))
        keys = keys._replace(position=_places("key_positions", places[1], key))
    if (key_mask := options.get("key_mask")) is not None:
        keys = keys._replace(real=token_rows("key_mask", key_mask, 1, key.shape[2], (torch.bool,), query))
    rows = {"slopes": slopes, "future_slopes": options.get("future_slopes")}
    if all(given is None or check_tensor(name, given).dim() == 1 or len(given) == 1 for name, given in rows.items()):
        return run(*resolve(inputs, slopes, options, (queries, keys)), backend)
    call = _Padded(sequences, *longest)
    return call.restore(run(*resolve(call.inputs(*inputs), slopes, options, call.tokens(queries, keys)), backend))


def _places(name: str, positions: Tensor, tokens: Tensor) -> Tensor:
    """(1, total) int64."""
    return position_rows(name, check_tensor(name, positions, tokens), 1, tokens.shape[2], None, torch.int64)


def _check_layout(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if check_tensor(name, tensor).dim() != 3:
            raise ValueError(
                f"{name} must have 3 dimensions (total tokens, heads, head dim) in a varlen call, "
                f"got shape {tuple(tensor.shape)}"
            )
    check_boundaries(query, key.shape[0], cu_seqlens_q, cu_seqlens_k)


def check_boundaries(query: Tensor, keys: int | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Whether these bound sequences of the query's tokens and of `keys`, None: any; read where that is free."""
    for name, bounds, tokens in (("cu_seqlens_q", cu_seqlens_q, query.shape[0]), ("cu_seqlens_k", cu_seqlens_k, keys)):
        check_tensor(name, bounds, query)
        if bounds.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {bounds.dtype}")
        if bounds.dim() != 1 or bounds.shape[0] == 0:
            raise ValueError(f"{name} must have shape (sequences + 1,) and start with 0, got {tuple(bounds.shape)}")
        if readable(bounds):
            first, last = int(bounds[0]), int(bounds[-1])
            fits = tokens is None or last <= tokens
            if first != 0 or not fits or bool((bounds.diff() < 0).any()):
                end = "" if tokens is None else f", and end at the {tokens} tokens or before"
                raise ValueError(f"{name} must start with 0, never fall{end}, got {bounds.tolist()}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must bound the same sequences, got {cu_seqlens_q.shape[0] - 1} and "
            f"{cu_seqlens_k.shape[0] - 1}"
        )


@dataclass(frozen=True)
class Sequences:
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
    def of(query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> "Sequences":
        """From the tokens laid end to end and their boundaries."""
        query_starts, key_starts = cu_seqlens_q.long(), cu_seqlens_k.long()
        query_index = torch.arange(query.shape[0], device=query.device)
        key_index = torch.arange(key.shape[0], device=query.device)
        query_numbers = torch.bucketize(query_index, query_starts[1:], right=True)
        key_numbers = torch.bucketize(key_index, key_starts[1:], right=True)
        ends_apart = torch.nn.functional.pad(key_starts.diff() - query_starts.diff(), (0, 1))
        return Sequences(
            query_starts=query_starts,
            key_starts=key_starts,
            query_numbers=query_numbers,
            key_numbers=torch.where(key_index < key_starts[-1], key_numbers, -1),
            query_places=query_index - query_starts[query_numbers] + ends_apart[query_numbers],
            key_places=key_index - key_starts[key_numbers],
        )

    def tokens(self, unbiased: int) -> tuple[Tokens, Tokens]:
        """Both sides of the packed call; the first `unbiased` tokens of each sequence have no bias."""

        def side(numbers: Tensor, places: Tensor) -> Tokens:
            marks = (places < unbiased)[None] if unbiased else None
            return Tokens(len(places), 0, places.device, places[None], numbers[None], unbiased=marks)

        return side(self.query_numbers, self.query_places), side(self.key_numbers, self.key_places)


class _Padded:
    """The same call as a batch of N padded sequences, for slopes that differ by sequence."""

    def __init__(self, sequences: Sequences, max_seqlen_q: int, max_seqlen_k: int) -> None:
        self._query_index, self._query_real = _pad_index("max_seqlen_q", sequences.query_starts, max_seqlen_q)
        self._key_index, self._key_real = _pad_index("max_seqlen_k", sequences.key_starts, max_seqlen_k)
        self._numbers = sequences.query_numbers
        self._columns = torch.arange(len(sequences.query_numbers), device=self._numbers.device)
        self._columns = self._columns - sequences.query_starts[self._numbers]

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, heads, total, dim) each as (N, heads, longest, dim)."""
        queries = _take(query[0].transpose(0, 1), self._query_index)
        # A padded query sees its sequence's keys, so it must not be a token that may hold NaN.
        queries = torch.where(self._query_real[..., None, None], queries, 0.0)
        keys, values = (_take(tensor[0].transpose(0, 1), self._key_index) for tensor in (key, value))
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def tokens(self, queries: Tokens, keys: Tokens) -> tuple[Tokens, Tokens]:
        """Of each sequence alone: no segments, and padding is not real."""

        def padded(tensor: Tensor | None, index: Tensor) -> Tensor | None:
            return None if tensor is None else _take(tensor[0], index)

        real = self._key_real if keys.real is None else self._key_real & _take(keys.real[0], self._key_index)
        sides = [
            Tokens(index.shape[1], 0, index.device, padded(side.position, index), unbiased=padded(side.unbiased, index))
            for side, index in ((queries, self._query_index), (keys, self._key_index))
        ]
        return sides[0], sides[1]._replace(real=real)

    def restore(self, result: Result) -> Result:
        """Back to one packed item; rows of no sequence see nothing."""
        sequences = result.out.shape[0]
        real = self._numbers < sequences
        rows, columns = torch.where(real, self._numbers, 0), torch.where(real, self._columns, 0)

        def packed(tensor: Tensor, empty: float) -> Tensor:
            if result.lse.numel() == 0 and result.lse.shape[1]:  # no sequence, or none with a query
                none = tensor.new_full((1, tensor.shape[1], len(rows), *tensor.shape[3:]), empty)
                return none + tensor.sum()  # for its gradient
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
    if tokens.shape[0]:
        return tokens[index]
    none = tokens.new_zeros((*index.shape, *tokens.shape[1:]))
    return none + tokens.sum() if tokens.is_floating_point() else none  # for its gradient
