# SPDX-License-Identifier: Apache-2.0
"""A call with its keys put into pages."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from linbias import key_bounds
from linbias.semantics.problem import Operands, Options


def in_pages(
    operands: Operands, options: Options, page: int, lengths: list[int] | None = None
) -> tuple[Operands, Options]:
    """The call with its keys in pages in any order: NaN where no key is, and entries of no page, -1, behind lengths.

    Bounds, if there are some, are of pages. In odd pages the keys of a head lie one behind another, in even ones those
    of all heads of a token do.
    """
    batch, heads, keys, _ = operands.key.shape
    stretches = -(-keys // page)
    table = (torch.randperm(batch * stretches) + 1).reshape(batch, stretches)
    behind = torch.zeros(batch, keys, dtype=torch.bool)
    norms = None
    if operands.bound_norms is not None:
        norms = operands.bound_norms.new_zeros(batch * stretches + 3, heads, 1)
        norms[table] = key_bounds(operands.key, page).norms.transpose(1, 2).unsqueeze(-1)
    if lengths is not None:
        behind = torch.arange(keys) >= torch.tensor(lengths)[:, None]
        operands = operands._replace(key_lengths=torch.tensor(lengths))

    def pool(given: Tensor) -> Tensor:
        """(P, G, page, .)."""
        given = given.masked_fill(behind[:, None, :, None], torch.nan)
        made = given.new_full((batch * stretches + 3, heads, page, given.shape[3]), torch.nan)
        missing = stretches * page - keys
        made[table] = pad(given, (0, 0, 0, missing), value=torch.nan).unflatten(2, (stretches, page)).transpose(1, 2)
        return made if page % 2 else made.transpose(1, 2).contiguous().transpose(1, 2)

    key, value = pool(operands.key), pool(operands.value)
    if lengths is not None:
        table = torch.where(torch.arange(stretches) * page >= torch.tensor(lengths)[:, None], -1, table)
    paged = operands._replace(key=key, value=value, block_table=table, bound_norms=norms)
    return paged, options._replace(paged_keys=keys, bounds_block=0 if norms is None else page)
