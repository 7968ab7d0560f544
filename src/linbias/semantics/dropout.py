# SPDX-License-Identifier: Apache-2.0
"""Which pairs dropout keeps: a counter-based generator, so every backend, tiling and pass draws the same mask.

Pair (b, h, i, j) of a call with seed s is kept when the word u of Philox4x32-10 is at least floor(p * 2**32), where

    key     = (s mod 2**32, s >> 32)
    counter = (j // 4, i, h, b)
    u       = word j mod 4 of the output

b, h, i, j index the call's query tensor and key tensor (a varlen call is one packed item: b = 0).

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor
from torch._functorch import config as functorch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def draw_seed(device: torch.device) -> Tensor:
    """A () int64 seed from torch's generator of that device.

    Raises: NotImplementedError where torch.compile may draw it once more in backward, which would drop other pairs.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and functorch.activation_memory_budget < 1:
        raise NotImplementedError(
            f"dropout_p must be 0 under torch.compile while torch._functorch.config.activation_memory_budget is "
            f"below 1, got a budget of {functorch.activation_memory_budget}: backward would draw another mask; "
            f"set the budget to 1, or use torch.utils.checkpoint, which keeps the generator's state"
        )
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """floor(p * 2**32): words below it are dropped."""
    return int(p * 2**32)


def keep_mask(seed: Tensor, p: float, b: Tensor, h: Tensor, i: Tensor, first_key: int, keys: int) -> Tensor:
    """Bool of shape broadcast(b, h, i) + (keys,): True where the pair is kept.

    Args:
        seed: () int64.
        p: chance to drop, in [0, 1).
        b, h, i: int64 index tensors that broadcast together.
        first_key, keys: the range of j.
    """
    first_counter = first_key // 4
    counters = (first_key + keys + 3) // 4 - first_counter
    j = torch.arange(counters, device=seed.device) + first_counter
    words = philox4x32(seed, (j, i[..., None], h[..., None], b[..., None]))
    drawn = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)
    return drawn.narrow(-1, first_key - 4 * first_counter, keys) >= threshold(p)


def philox4x32(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on int64 tensors holding 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = _wide_product(_MULTIPLIERS[0], c0)
        high1, low1 = _wide_product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _wide_product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    # Two halves: the full 64-bit product would overflow int64, which compiled C++ may treat as undefined.
    low_part = multiplier * (word & 0xFFFF)
    high_part = multiplier * (word >> 16) + (low_part >> 16)
    return high_part >> 16, ((high_part << 16) & _WORD) | (low_part & 0xFFFF)
