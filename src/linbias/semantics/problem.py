# SPDX-License-Identifier: Apache-2.0
"""What a backend is given: `Operands` (the tensors), `Options` (the numbers), `Problem` (facts from metadata).

`attention.py` turns what the user said into these three. By then every default is resolved, every shape is in one
form, and what an option means per token (rank, unbiased, segment) has become a tensor: a backend only evaluates
pairs. Nothing here reads the value of a tensor.

Shape legend, used everywhere inside: B batch, H query heads, G key/value heads, T queries, S keys, D head dim,
V value dim, C coordinates. `b` in a shape is B or 1.
"""

import math
from itertools import compress
from operator import ne
from typing import NamedTuple

import torch
from torch import Tensor


class Operands(NamedTuple):
    """The tensors of one call. Half-open choices are gone: shapes and dtypes are exactly as written here."""

    query: Tensor
    """(B, H, T, D), floating."""
    key: Tensor
    """(B, G, S, D), the query's dtype; H is a multiple of G and query head h reads key head h // (H // G). With a
    block_table (P, G, page, D): pages of any strides."""
    value: Tensor
    """(B, G, S, V), the query's dtype; with a block_table (P, G, page, V)."""
    slopes: Tensor
    """(b, H), the accumulating dtype: for keys at or before the query, or at any distance under a metric."""
    future_slopes: Tensor | None = None
    """(b, H), the accumulating dtype: for later keys. None: as `slopes`."""
    query_positions: Tensor | None = None
    """(b, T) int64, or (b, T, C) in the accumulating dtype under a metric. None: S - T + i."""
    key_positions: Tensor | None = None
    """(b, S) int64 or (b, S, C); given exactly when query_positions is. None: j."""
    query_segments: Tensor | None = None
    """(b, T) int64; a query sees only keys of its own segment."""
    key_segments: Tensor | None = None
    """(b, S) int64; given exactly when query_segments is."""
    key_mask: Tensor | None = None
    """(b, S) bool; False: the key does not exist."""
    attn_mask: Tensor | None = None
    """bool, four dimensions, each full or 1: (B, H, T, S); False: hidden."""
    key_ranks: Tensor | None = None
    """(b, S) int64, the count of real keys before this one in its sequence and segment; given exactly when
    sinks or prefix are used."""
    query_unbiased: Tensor | None = None
    """(b, T) bool; True: this query receives no bias. Given exactly when unbiased tokens are."""
    key_unbiased: Tensor | None = None
    """(b, S) bool; True: this key gives no bias."""
    bound_norms: Tensor | None = None
    """(B, G, ceil(S / block)): an upper bound of the key norms of each block, which a caller keeps beside a cache.
    With a block_table (P, G, 1): of each page."""
    seed: Tensor | None = None
    """() int64: key of the dropout generator; given exactly when dropout_p > 0."""
    key_lengths: Tensor | None = None
    """(b,) int64: of its S keys a sequence has only so many, and where positions are None its queries end there."""
    block_table: Tensor | None = None
    """(B, n) int64: the page of each stretch of `page` keys; entries of which a sequence has no key may hold anything.
    S is then options.paged_keys, at most n * page. No gradient flows to pages."""


class Options(NamedTuple):
    """The numbers of one call, all resolved. A default here is the neutral value, which changes nothing."""

    causal: bool = False
    """Keys later than the query are hidden."""
    left: int | None = None
    """How far back a query sees, inclusive; None: all the way."""
    right: int | None = None
    """How far ahead a query sees, inclusive; None: all the way."""
    sinks: int = 0
    """Keys of rank below this escape the window."""
    prefix: int = 0
    """Keys of rank below this escape `causal`."""
    metric: str | None = None
    """None for one-dimensional positions, or "euclidean", "manhattan"."""
    scale: float = 1.0
    """Multiplies the dot product."""
    softcap: float | None = None
    """cap(x) = softcap * tanh(x / softcap); None: none."""
    dropout_p: float = 0.0
    """The chance that a pair is dropped from the output."""
    tolerance: float = 0.0
    """Largest share of a row's softmax weight that skipped keys may hold."""
    bounds_block: int = 0
    """Keys per block of the key bounds; 0 when there are none."""
    paged_keys: int = 0
    """S, where keys lie in pages; else 0."""


OPERAND_NAMES = Operands._fields
OPTION_NAMES = Options._fields
_OPTIONAL = tuple(Operands._field_defaults)
_REQUIRED = len(OPERAND_NAMES) - len(_OPTIONAL)
_NEUTRAL = Options()
TRANSFORMED = "functorch gradients or forward mode"
"""The one feature that is torch's state and no argument: which only autograd through plain operations honours."""
FEATURES = frozenset((*_OPTIONAL, *OPTION_NAMES, TRANSFORMED))
"""All that `Problem.features` can hold."""


def any_given(operands: Operands) -> bool:
    """Whether a call has more tensors than the four that every call has."""
    return any(tensor is not None for tensor in operands[_REQUIRED:])


def accumulating_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, bias, softmax and lse: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Problem(NamedTuple):
    """Frozen facts of one call, from metadata alone: what `why_not` and the kernels decide by."""

    options: Options
    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    features: frozenset[str]
    """What the call uses: the optional fields of `Operands` that are given, the fields of `Options` that are not
    neutral, and `TRANSFORMED`. A backend names what it supports, and runs no call that uses more."""

    @staticmethod
    def of(operands: Operands, options: Options, *, transformed: bool = False) -> "Problem":
        """Collect the facts; `operands` are already validated."""
        batch, heads, queries, head_dim = operands.query.shape
        kv_heads, keys, value_dim = operands.value.shape[1:]
        keys = keys if operands.block_table is None else options.paged_keys
        # Written for the small call, which this would otherwise cost a tenth of its time.
        used = [name for name, tensor in zip(_OPTIONAL, operands[_REQUIRED:]) if tensor is not None]  # noqa: B905
        used.extend(compress(OPTION_NAMES, map(ne, options, _NEUTRAL)))
        if transformed:
            used.append(TRANSFORMED)
        sizes = (batch, heads, kv_heads, queries, keys, head_dim, value_dim)
        return Problem(options, operands.query.device, operands.query.dtype, *sizes, frozenset(used))

    def beyond(self, supported: frozenset[str]) -> str | None:
        """What the call uses that a backend does not support, as the reason it gives; None: nothing."""
        missing = self.features - supported
        return f"does not support {', '.join(sorted(missing))}" if missing else None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of scores, bias, softmax and lse."""
        return accumulating_dtype(self.dtype)


class Result(NamedTuple):
    """What a backend's forward returns."""

    out: Tensor
    """(B, H, T, V), the query's dtype, rounded once."""
    lse: Tensor
    """(B, H, T), accumulating dtype, natural log; -inf where nothing is visible."""
    lse_low: Tensor
    """(B, H, T), accumulating dtype: the digits that `lse` drops, so that backward knows ``exp(score - lse - lse_low)``
    however large lse is. ``lse`` is the sum, rounded."""
    skipped: Tensor
    """(B, H, T), accumulating dtype: proven bound of the skipped share of the row's weight, <= tolerance."""
    computed: Tensor
    """(B, H) int64: query-key pairs whose score was evaluated."""


class Gradients(NamedTuple):
    """What a backend's backward returns; None for what was not asked."""

    query: Tensor | None
    """(B, H, T, D), the query's dtype."""
    key: Tensor | None
    """(B, G, S, D), the key's dtype."""
    value: Tensor | None
    """(B, G, S, V), the value's dtype."""
    slopes: Tensor | None
    """(b, H), accumulating dtype, summed over what `slopes` was broadcast to."""
    future_slopes: Tensor | None
    """(b, H), accumulating dtype."""


def default_tolerance(dtype: torch.dtype) -> float:
    """A quarter of the accumulator's eps: skipping that is invisible beside rounding."""
    return (2**-52 if dtype == torch.float64 else 2**-23) / 4


def default_scale(head_dim: int) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(head_dim)


def transform_active() -> bool:
    """Whether a functorch gradient or a forward-mode derivative is being taken, which only composite backends allow."""
    if torch.compiler.is_compiling():
        return False
    if torch.autograd.forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return True
    if torch._C._functorch.peek_interpreter_stack() is None:  # pyright: ignore
        return False
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    levels = {interpreter.key() for interpreter in retrieve_all_functorch_interpreters()}
    kinds = torch._C._functorch.TransformType  # pyright: ignore
    return bool(levels & {kinds.Grad, kinds.Jvp})
