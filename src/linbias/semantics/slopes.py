# SPDX-License-Identifier: Apache-2.0
"""Slopes: how fast each head forgets."""

from typing import Literal

import torch
from torch import Tensor

from .checks import check_count, check_number

SlopeRule = Literal["press", "geometric"]


def alibi_slopes(
    num_heads: int,
    *,
    rule: SlopeRule = "press",
    max_bias: float = 8.0,
    biased_heads: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """One slope per query head, computed in doubles and rounded once.

    ``press``, for a power of two H: ``2 ** (-max_bias * h / H)`` for h = 1..H. For any other H: the slopes of the
    power of two c below it, then the 1st, 3rd, 5th ... slope of 2c, appended and left unsorted, as the authors' code
    and every model trained from it do (sorting them would give each head of a checkpoint another head's slope).
    ``geometric``: ``2 ** (-max_bias * h / H)`` for every H, the series of the paper's text.

    Under tensor parallelism compute the slopes of the *global* head count, then slice.

    Args:
        num_heads: H, the number of query heads, >= 1.
        rule: which series; see above.
        max_bias: the exponent of the last slope, > 0. 16 squares every slope (MPT's ``alibi_bias_max``).
        biased_heads: n heads get the slopes of n heads, the remaining H - n heads get 0. None: all of them.
        device: where the result lives; torch's default device if None.

    Returns:
        (H,) float32.

    Raises:
        TypeError, ValueError: a count, a rule or ``max_bias`` that is not one or is outside its range.

    Reference:
        Press et al., https://arxiv.org/abs/2108.12409, section 3, and the code released with it.

    >>> alibi_slopes(3).tolist() == [2**-4, 2**-8, 2**-2]
    True
    """
    if check_count("num_heads", num_heads) < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}; pass the global number of query heads")
    if not 0 < check_number("max_bias", max_bias) < float("inf"):
        raise ValueError(f"max_bias must be a positive finite number, got {max_bias}; the paper uses 8.0")
    biased = num_heads if biased_heads is None else check_count("biased_heads", biased_heads)
    if biased > num_heads:
        raise ValueError(f"biased_heads must be between 0 and num_heads={num_heads}, got {biased}; None means all")
    if rule == "press":
        values = _press(biased, max_bias)
    elif rule == "geometric":
        values = _series(biased, max_bias)
    else:
        raise ValueError(f"rule must be 'press' or 'geometric', got {rule!r}; checkpoints almost always use 'press'")
    return torch.tensor(values + [0.0] * (num_heads - biased), dtype=torch.float32, device=device)


def _series(heads: int, max_bias: float) -> list[float]:
    return [2.0 ** (-max_bias * h / heads) for h in range(1, heads + 1)]


def _press(heads: int, max_bias: float) -> list[float]:
    if heads == 0:
        return []
    below = 1 << (heads.bit_length() - 1)
    return _series(below, max_bias) + _series(2 * below, max_bias)[0::2][: heads - below]
