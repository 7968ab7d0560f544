# SPDX-License-Identifier: Apache-2.0
"""The public reports of what goes wrong with ALiBi, each a test named after its number, and what they share.

Here: A1 A2 A4 A5 A7 A8 A9 A10; B1 B2 B3 B5 B7 B8; C1 C4 C5 C6 C8 C9; D1 D2 D3 D7 D9; E1 E2 E6 E7;
F1 F2 F4 F6 F7 F9 F10 F12; G8 G9 G11; H1 H2 H3 H5; I1 I4; J1 J2 J4; K3; L1 L4; of each, what the operation itself
can show. Beside what they concern: B10 C1 C2 C4 C12 (caches), C9 F5 F6 F9 F12 H7 L3 L6 (nn), G3 G4 G7 (interop and
backends), A8 A9 A10 C D5 F5 G1 G2 (model families), E4 E5 (benchmarks), I3 K1 K2 (the lab). K5 and K6 are for docs.
"""

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
