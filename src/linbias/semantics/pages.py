# SPDX-License-Identifier: Apache-2.0
"""Keys in pages of a pool, and sequences with fewer keys than the call has: what that means, written out.

A cache that many sequences share keeps keys in pages, and a table of their numbers says where each sequence's are. A
backend that reads through the table copies nothing; the others are given what `spelled_out` makes of the call.
"""

import torch
from torch import Tensor

from .problem import Operands, Options


def gather_pages(pool: Tensor, table: Tensor) -> Tensor:
    """Pages (P, G, page, .) by a table (B, n) of their numbers, side by side: (B, G, n * page, .), a copy.

    Entries that nobody reads may hold anything, -1 as a rule; they are held inside the pool.
    """
    within = table.clamp(0, max(pool.shape[0] - 1, 0))
    return pool.transpose(0, 1)[:, within].flatten(2, 3).transpose(0, 1)


def spelled_out(operands: Operands, options: Options) -> tuple[Operands, Options]:
    """The same call without `block_table` and `key_lengths`: keys side by side, a mask and positions."""
    if operands.block_table is not None:
        keys = options.paged_keys
        table = operands.block_table[:, : -(-keys // max(operands.key.shape[2], 1))]
        key, value = (gather_pages(pool, table)[:, :, :keys] for pool in (operands.key, operands.value))
        norms = operands.bound_norms
        norms = None if norms is None else gather_pages(norms, table)
        operands = operands._replace(key=key, value=value, bound_norms=norms, block_table=None)
        options = options._replace(paged_keys=0)
    if operands.key_lengths is not None:
        keys, queries, device = operands.key.shape[2], operands.query.shape[2], operands.key.device
        lengths = operands.key_lengths.clamp(0, keys)[:, None]
        places, mask, rows = torch.arange(keys, device=device)[None], operands.key_mask, operands.query_positions
        real = places < lengths
        real = real if mask is None else real & mask
        if rows is None:
            rows = lengths + torch.arange(-queries, 0, device=device)
            operands = operands._replace(query_positions=rows, key_positions=places)
        operands = operands._replace(key_mask=real, key_lengths=None)
    return operands, options
