# SPDX-License-Identifier: Apache-2.0
"""The attention of a patched layer: ours, or the family's own formula a few query rows at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..attention import output
from ..attention import weights as weights_of
from ..prepare import AttentionOptions, autocast, resolve
from ..semantics.blocks import dense
from ..semantics.problem import Operands, Problem
from .cache import AlibiCache
from .growing import bounds_of, grow_in_place
from .mask import AttentionMask

# Elements of one block of scores: 16 MiB in float32, small beside the layer's own activations.
_BLOCK = 2**22


def attend_in_layer(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, cache: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention as `mask` has it, heads merged.

    Args:
        layer: a `linbias.hf.decoder.Attention`: scale, dropout, number, and the family's own formula.
        query: (B, H, T, D).
        key: (B, G, T, D), of the new tokens.
        value: (B, G, T, V).
        mask: from `read_mask`.
        cache: a transformers cache that takes the new tokens in, or None.

    Returns:
        (B, T, H * V), and the softmax weights (B, H, T, S), without dropout, where the mask asks for them.

    Raises:
        TypeError: the mask is none: an unpatched model calls a patched layer.
    """
    if not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"attention_mask must be an AttentionMask in a patched layer, got {type(mask).__name__}: the model around "
            f"it is not patched. linbias.patch that too, or linbias.unpatch the one it shares this layer with"
        )
    mask, number = mask.to(query.device), layer.layer_idx
    dropout_p = layer.dropout_p if layer.training else 0.0
    if isinstance(cache, AlibiCache):
        store = cache.layer(number)
        store.append(key, value, mask)
        return _merged(store.attend(query, mask, scale=layer.score_scale, dropout_p=dropout_p)), None
    if cache is not None:
        grow_in_place(cache, number)
        key, value = cache.update(key, value, number)
    if key.shape[2] != mask.keys.length:
        raise ValueError(f"the cache gave {key.shape[2]} keys, and get_mask_sizes said {mask.keys.length}")
    inputs = autocast(query, key, value)
    eager = mask.eager_bias is not None
    options: AttentionOptions = {"causal": mask.causal, "attn_mask": mask.attn_mask, "scale": layer.score_scale}
    options["dropout_p"] = 0.0 if eager else dropout_p
    # Rounding, as autocast does it, may lengthen a key beyond its bound.
    bounds = None if cache is None or inputs[1] is not key else bounds_of(cache, number, key)
    problem, operands = resolve(inputs, mask.slopes, options, (mask.queries, mask.keys), bounds=bounds)
    if eager:
        out, weights = _by_rows(layer, problem, operands._replace(query=query, key=key, value=value), mask)
        return _merged(out), weights
    out, weights = output(problem, operands, "auto"), None
    if mask.with_weights:
        weights = weights_of(problem, operands)
    return _merged(out), weights


def _merged(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def _by_rows(layer: Any, problem: Problem, operands: Operands, mask: AttentionMask) -> tuple[Tensor, Tensor | None]:
    """The family's own formula over blocks of query rows, so that scores never exist whole; a gradient repeats them."""
    query, key, value, *_ = operands
    # A compiler would unroll the blocks, and must not specialise on their number.
    blocks: list[slice | None] = [None]
    if not torch.compiler.is_compiling():
        rows = max(1, _BLOCK // max(1, query.shape[:2].numel() * key.shape[2]))
        blocks = [slice(start, start + rows) for start in range(0, max(query.shape[2], 1), rows)]
    outs: list[Tensor] = []
    shown: list[Tensor] = []
    for block in blocks:
        visible = dense(operands, problem.options, block)[1]
        part = query if block is None else query[:, :, block]
        arguments = (part, key, value, mask.eager_bias, visible, mask.with_weights)
        if torch.is_grad_enabled() and len(blocks) > 1:
            out, weights = checkpoint(layer.eager_formula, *arguments, use_reentrant=False)  # pyright: ignore
        else:
            out, weights = layer.eager_formula(*arguments)
        # The originals spread a row that sees nothing evenly over all keys, or make it NaN in half precision.
        outs.append(out.masked_fill(~visible.any(-1, keepdim=True), 0.0))
        if weights is not None:
            shown.append(weights)
    return torch.cat(outs, 2), torch.cat(shown, 2) if shown else None
