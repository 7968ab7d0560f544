# SPDX-License-Identifier: Apache-2.0
"""How much a key can weigh: norms of keys, the bound of a score before its bias, and what distance leaves of it.

Everything that skips rests on one inequality. For a block of n keys whose largest norm is rho and whose nearest key is
d positions from query i, on a side of slope m >= 0, with Z_i a proven lower bound of the row's whole weight:

    weight of the block / Z_i  <=  exp(score_bound(|q_i|, rho) - m d - log Z_i) * gamma

docs/proof.md derives it, and what follows from it for outputs and gradients, line by line. How the shares are added up
is each backend's own: see its ledger.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import in_tiles
from .checks import check_count, check_number, check_tensor, readable
from .problem import accumulating_dtype


class KeyBounds(NamedTuple):
    """What a caller keeps beside a cache so that keys can be skipped unread: upper bounds for each block of keys."""

    norms: Tensor
    """(B, G, ceil(S / block)): the largest key norm of the block, never below the true one."""
    block: int
    """Keys a block."""


def key_bounds(key: Tensor, block: int = 64) -> KeyBounds:
    """The largest norm of each block of ``block`` keys: a score of the block is at most ``|scale| |q| norm``.

    Args:
        key: (B, G, S, D), floating.
        block: keys a block, >= 1; the last block may hold fewer.

    Returns:
        `KeyBounds` in the accumulating dtype: float64 for float64, else float32. A NaN or infinite key gives a NaN or
        infinite bound, which is never skipped.

    Raises:
        TypeError, ValueError: a key that is not floating with four dimensions, or a block below 1.

    >>> key_bounds(torch.tensor([[[[3.0, 4.0], [0.0, 1.0], [0.5, 0.0]]]]), block=2).norms.round(decimals=3).tolist()
    [[[5.0, 0.5]]]
    """
    check_tensor("key", key)
    if key.dim() != 4 or not key.is_floating_point():
        raise ValueError(f"key must be floating with shape (B, G, S, D), got {key.dtype} {tuple(key.shape)}")
    if check_count("block", block) < 1:
        raise ValueError(f"block must be at least 1, got {block}; 64 is a good size")
    return KeyBounds(_block_norms(upper_norms(key), block), block)


def append_norms(norms: Tensor, start: int, key: Tensor, block: int) -> None:
    """Account for appended keys: a block that starts with them gets a fresh bound, the one being filled a raised one.

    Args:
        norms: (B, G, blocks), as `KeyBounds.norms`, with room for the new blocks; written to.
        start: keys so far.
        key: (B, G, T, D), the new ones.
        block: keys a block.
    """
    fresh, tokens = upper_norms(key), key.shape[2]
    head = min(-start % block, tokens)
    if head:
        # In place, and one operation for the one token of a step; NaN stays NaN.
        first = fresh if tokens == 1 else fresh[:, :, :head].amax(2, keepdim=True)
        norms.narrow(2, start // block, 1).clamp_min_(first)
    if head < tokens:
        blocks = _block_norms(fresh[:, :, head:], block)
        norms.narrow(2, (start + head) // block, blocks.shape[2]).copy_(blocks)


def _block_norms(norms: Tensor, block: int) -> Tensor:
    """(B, G, ceil(S / block)): the largest of each block of (B, G, S)."""
    return in_tiles(norms.flatten(0, 1), block, 0.0).amax(-1).unflatten(0, norms.shape[:2])


def reach(slopes: Tensor, *, tolerance: float, content: float | Tensor = 0.0) -> Tensor:
    """How far each head sees: the smallest integer R >= 0 with ``e^(content - m (R + 1)) / (1 - e^-m) <= tolerance``.

    All keys further than R positions away on one side together weigh at most ``tolerance`` of the softmax, if the score
    of none exceeds the row's log-sum-exp by more than ``content`` before the bias.

    Args:
        slopes: any shape, floating: the m.
        tolerance: share of the weight, >= 0.
        content: bound of ``score before bias - log Z``, broadcastable to slopes.

    Returns:
        float64, the shape of slopes and content broadcast: whole numbers, and inf where nothing bounds the reach
        (m <= 0, or tolerance 0 with a finite slope).

    Raises:
        TypeError, ValueError: slopes that are not floating, a tolerance below 0, or what is not a number.

    >>> reach(torch.tensor([0.5, 0.00390625, 0.0]), tolerance=2**-25).tolist()
    [36.0, 5856.0, inf]
    """
    check_tensor("slopes", slopes)
    if not slopes.is_floating_point():
        raise TypeError(f"slopes must be floating, got {slopes.dtype}")
    if not check_number("tolerance", tolerance) >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    if not isinstance(content, Tensor):
        check_number("content", content)
    slope = slopes.double()
    limit = math.log(tolerance) if tolerance > 0 else -math.inf
    excess = torch.as_tensor(content, dtype=torch.float64, device=slope.device) - tail_log(slope) - limit
    distance = (excess / slope).ceil().sub(1).clamp_min(0)
    distance = torch.where(slope == torch.inf, 0.0, distance)
    return torch.where(slope > 0, distance, torch.inf)


def tail_log(slope: Tensor) -> Tensor:
    """log(1 - e^(-m)): minus the log of the sum of an endless geometric tail; -inf for m <= 0."""
    return torch.where(slope > 0, torch.log(-torch.expm1(-slope)), -torch.inf)


def log_gamma(slope: Tensor, count: Tensor) -> Tensor:
    """log of ``(1 - e^(-m n)) / (1 - e^(-m))``: how many times its nearest key's bound a block of n keys at consecutive
    positions on one side can weigh; log n for m <= 0.
    """
    decayed = torch.log(-torch.expm1(-slope * count)) - tail_log(slope)
    return torch.where(slope > 0, decayed, count.log())


def score_bound(scale: float, softcap: float | None, query_norms: Tensor, key_norms: Tensor) -> Tensor:
    """``cap(|scale| |q| |k|)``, what no score exceeds before its bias: by Cauchy-Schwarz, and cap is monotone.

    Args:
        scale, softcap: of the scores.
        query_norms, key_norms: upper bounds that broadcast together, of one dtype.
    """
    rounding = 1 + 4 * torch.finfo(key_norms.dtype).eps
    bound = abs(scale) * query_norms * key_norms * rounding
    return bound if softcap is None else softcap * torch.tanh(bound / softcap) * rounding


def upper_norms(vectors: Tensor) -> Tensor:
    """Euclidean norms over the last dimension, in the accumulating dtype, never below the true ones.

    NaN and inf stay what they are; squares can neither underflow nor overflow unnoticed.
    """
    dtype = accumulating_dtype(vectors.dtype)
    dim, info = vectors.shape[-1], torch.finfo(dtype)
    if vectors.numel() == 0:
        return vectors.new_zeros(vectors.shape[:-1], dtype=dtype)
    wide = vectors.to(dtype)
    inflation = 1 + (dim / 2 + 8) * info.eps
    norms = torch.linalg.vector_norm(wide, dim=-1)
    if readable(norms):
        low, high = torch.aminmax(norms)
        if low.item() > 1e-15 and high.item() < 1e15:
            return norms * inflation
    peak = wide.abs().amax(-1)
    unit = torch.where((peak > 0) & (peak < torch.inf), peak, 1.0)
    scaled = unit * torch.linalg.vector_norm(wide / unit.unsqueeze(-1), dim=-1)
    return scaled * inflation + info.tiny * math.sqrt(dim)
