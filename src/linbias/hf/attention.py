# SPDX-License-Identifier: Apache-2.0
"""The attention of a patched layer: ours, or the family's own formula a few query rows at a time."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..attention import alibi_attention, alibi_attention_weights
from ..prepare import AttentionOptions, prepare
from ..semantics.blocks import dense
from .cache import AlibiCache
from .growing import bounds_of, grow_in_place
from .sight import Sight

OwnFormula = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""(query, key, value, own bias, visible, with_weights) -> (out (B, H, t, V), weights (B, H, t, S)) for t query rows."""

# Elements of one block of scores: 16 MiB in float32, small beside the layer's own activations.
_BLOCK = 2**22


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    *,
    into: tuple[Any, Any],
    scale: float,
    dropout_p: float,
    own: OwnFormula,
) -> tuple[Tensor, Tensor | None]:
    """Attention as `sight` has it, heads merged.

    Args:
        query: (B, H, T, D).
        key: (B, G, T, D), of the new tokens.
        value: (B, G, T, V).
        sight: from `look`.
        into: a transformers cache that takes the new tokens in, or None; and the number of the layer in it.
        scale: multiplies the dot product.
        dropout_p: chance that a pair is dropped from the output.
        own: the family's own formula, used where the sight carries the family's own bias.

    Returns:
        (B, T, H * V), and the softmax weights (B, H, T, S), without dropout, where the sight asks for them.

    Raises:
        TypeError: the sight is none: an unpatched model calls a patched layer.
    """
    if not isinstance(sight, Sight):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"attention_mask must be a Sight in a patched layer, got {type(sight).__name__}: the model around it is "
            f"not patched. linbias.patch that too, or linbias.unpatch the one it shares this layer with"
        )
    cache, layer = into
    if isinstance(cache, AlibiCache):
        store = cache.layer(layer)
        store.append(key, value, sight)
        return store.attend(query, sight, scale=scale, dropout_p=dropout_p).transpose(1, 2).flatten(2), None
    if cache is not None:
        grow_in_place(cache, layer)
        key, value = cache.update(key, value, layer)
    if sight.own_bias is not None:
        out, weights = _by_rows(own, query, key, value, sight.own_bias, sight)
    else:
        options = sight.options()
        bounds = None if cache is None else bounds_of(cache, layer, key)
        out = alibi_attention(
            query, key, value, sight.slopes, scale=scale, dropout_p=dropout_p, key_bounds=bounds, **options
        )
        weights = (
            alibi_attention_weights(query, key, sight.slopes, scale=scale, **options) if sight.with_weights else None
        )
    return out.transpose(1, 2).flatten(2), weights


def _by_rows(
    own: OwnFormula, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sight: Sight
) -> tuple[Tensor, Tensor | None]:
    """`own` over blocks of query rows, so that scores never exist whole; a gradient computes them again."""
    problem, operands = prepare(query, key, value, sight.slopes, cast(AttentionOptions, sight.options()))
    blocks = [slice(None)]
    # A compiler would unroll the blocks, and must not specialise on their number.
    if not torch.compiler.is_compiling():
        rows = max(1, _BLOCK // max(1, query.shape[:2].numel() * key.shape[2]))
        blocks = [slice(start, start + rows) for start in range(0, max(query.shape[2], 1), rows)]
    outs: list[Tensor] = []
    shown: list[Tensor] = []
    for block in blocks:
        visible = dense(operands, problem.options, block)[1]
        arguments = (query[:, :, block], key, value, bias, visible, sight.with_weights)
        if torch.is_grad_enabled() and len(blocks) > 1:
            out, weights = checkpoint(own, *arguments, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
        else:
            out, weights = own(*arguments)
        # The originals spread a row that sees nothing evenly over all keys, or make it NaN in half precision.
        outs.append(out.masked_fill(~visible.any(-1, keepdim=True), 0.0))
        if weights is not None:
            shown.append(weights)
    return torch.cat(outs, 2), torch.cat(shown, 2) if shown else None
