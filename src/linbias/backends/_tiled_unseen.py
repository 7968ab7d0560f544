# SPDX-License-Identifier: Apache-2.0
"""Keys that no query of their batch item can see must not leak, whatever they hold."""

from dataclasses import replace

import torch
from torch import Tensor

from ._tiled_call import Call, batch_lanes
from ._tiled_pairs import Pairs

_PAIRS = 1 << 20


def without_unseen(call: Call) -> Call:
    """The call with unseen keys zeroed where they hold NaN or inf: 0 * NaN is NaN in every product.

    Finite contents are harmless behind a mask, so only what is not finite is looked at: as a rule, nothing.
    """
    problem, operands = call.problem, call.operands
    hiding = (operands.key_mask, operands.attn_mask, operands.query_segments, operands.query_positions)
    windowed = problem.options.left is not None or problem.options.right is not None
    if not (windowed or call.infinite or any(tensor is not None for tensor in hiding)):
        # The last query sees every key.
        return call
    if problem.queries == 0 or problem.batch == 0:
        return call
    wild = ~(call.key.isfinite().all(-1) & call.value.isfinite().all(-1))
    suspects = wild.any(0).nonzero().squeeze(-1)
    if len(suspects) == 0:
        return call
    unseen = ~_seen(call, suspects).unsqueeze(-1)
    key, value = call.key.clone(), call.value.clone()
    key[:, suspects] = key[:, suspects].masked_fill(unseen, 0.0)
    value[:, suspects] = value[:, suspects].masked_fill(unseen, 0.0)
    return replace(call, key=key, value=value)


def _seen(call: Call, suspects: Tensor) -> Tensor:
    """(K, n) bool: whether any query of the group sees each of these keys."""
    problem = call.problem
    seen = torch.zeros((problem.batch, problem.heads, len(suspects)), dtype=torch.bool, device=suspects.device)
    step = max(1, _PAIRS // (problem.heads * len(suspects)))
    for item in range(problem.batch):
        for first in range(0, problem.queries, step):
            rows = slice(first, min(first + step, problem.queries))
            hidden = Pairs.of(call, batch_lanes(problem, item), rows, suspects).hidden
            seen[item] |= True if hidden is None else ~hidden.all(1)
    return seen.unflatten(1, (problem.kv_heads, problem.group)).any(2).flatten(0, 1)
