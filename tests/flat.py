# SPDX-License-Identifier: Apache-2.0
"""Flat attention: no content, so that the weights are the bias alone and can be known by hand."""

import torch

from linbias import alibi_attention

HALF = torch.tensor([0.5])
# Slope 0.5, keys at distance 3, 2, 1, 0, and without the first.
FOUR = [0.1015363, 0.1674051, 0.2760043, 0.4550542]
THREE = [0.1863237, 0.3071959, 0.5064804]


def flat(
    slopes: torch.Tensor, queries: int, keys: int, *, dtype: torch.dtype = torch.float32, **options
) -> torch.Tensor:
    """(B, H, T, S): what each key weighs when all scores are 0, read off with the identity as value."""
    batch = slopes.shape[0] if slopes.dim() == 2 else 1
    for name in ("key_mask", "key_positions", "query_positions", "query_segments"):
        if name in options and options[name].dim() == 2:
            batch = options[name].shape[0]
    query = torch.zeros(batch, slopes.shape[-1], queries, 4, dtype=dtype)
    key = torch.zeros(batch, 1, keys, 4, dtype=dtype)
    value = torch.eye(keys, dtype=dtype).expand(batch, 1, keys, keys)
    return alibi_attention(query, key, value, slopes, **options)


def assert_close(found: torch.Tensor, expected: object, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)
