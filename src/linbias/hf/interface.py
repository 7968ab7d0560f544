# SPDX-License-Identifier: Apache-2.0
"""ALiBi for models that ask transformers' AttentionInterface: `attention_interface` registers it as "linbias"."""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import alibi_attention, alibi_attention_weights
from .mask import pair_mask, token_mask

# What changes which keys a token sees, or by how much, and is not among what this attention is told otherwise.
_REFUSED = {
    "position_bias": "a dense bias would have to be added to the scores, and ALiBi is passed as alibi_slopes",
    "head_mask": "the operation has none",
    "s_aux": "it has no learned sink",
    "cu_seq_lens_q": "pass position_ids that restart, from which transformers makes the mask",
    "cu_seq_lens_k": "pass position_ids that restart, from which transformers makes the mask",
    "seq_idx": "pass position_ids that restart, from which transformers makes the mask",
    "block_table": "paged caches are not read; call generate with a DynamicCache",
}


def attention_interface(name: str = "linbias") -> str:
    """Register ALiBi attention with transformers, for models that pass ``alibi_slopes`` to their attention function.

    transformers' own implementations take such slopes as one more keyword and leave the bias out in silence. This one
    honours them, exactly and without a matrix of T x S, and refuses a layer that passes none.

    Distances are counted in places, the ends of queries and keys aligned, as flash-attn's ``alibi_slopes`` counts them.
    Causal or not is what ``is_causal`` says, the keyword before the module's attribute. Padding is a mask of (B, S).
    A sliding window, packed texts and masks of one's own come as transformers' mask of (B, 1, T, S) booleans.

    Args:
        name: what `set_attn_implementation` and ``attn_implementation=`` will call it.

    Returns:
        The name.

    Raises:
        ImportError: transformers is missing.

    While a model runs, the attention raises TypeError without ``alibi_slopes`` or with half-precision ones, and
    ValueError for what it cannot honour: ``position_bias``, a floating mask that carries a bias, a learned sink, packed
    boundaries beside the mask, a static cache. ``output_attentions=True`` gives the weights, as a matrix.

    >>> attention_interface()
    'linbias'
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("linbias.hf.attention_interface needs transformers: pip install 'linbias[hf]'") from error
    AttentionInterface.register(name, _attend)
    # Without one of the same name transformers makes no mask, and padding would be seen.
    AttentionMaskInterface.register(name, _mask)
    return name


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a layer calls: query (B, H, T, D) to (B, T, H, V), and the weights (B, H, T, S) where they are asked for."""
    for name, reason in _REFUSED.items():
        if given.get(name) is not None:
            raise ValueError(f"{name} from {type(module).__name__} cannot be honoured by attention 'linbias': {reason}")
    slopes = given.get("alibi_slopes")
    if slopes is None:
        raise TypeError(
            f"{type(module).__name__} passes no alibi_slopes, so attention 'linbias' knows no bias: pass "
            f"alibi_slopes=linbias.alibi_slopes(num_heads) to its attention function, or choose another implementation"
        )
    said = given.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if said is None else said)
    options = _options(attention_mask, query.shape[2], key, causal, given.get("sliding_window"))
    options |= {"scale": scaling, "softcap": given.get("softcap")}
    out = alibi_attention(query, key, value, slopes, dropout_p=given.get("dropout") or 0.0, **options)
    weights = alibi_attention_weights(query, key, slopes, **options) if given.get("output_attentions") else None
    return out.transpose(1, 2).contiguous(), weights


def _options(
    mask: Tensor | None, queries: int, key: Tensor, causal: bool, sliding_window: int | None
) -> dict[str, Any]:
    """Which keys are seen."""
    batch, keys = key.shape[0], key.shape[2]
    if mask is not None and mask.dim() == 4:
        # It says all there is to say, a sliding window too.
        return {"causal": False, "attn_mask": pair_mask(mask, queries, keys)}
    options: dict[str, Any] = {"causal": causal}
    if sliding_window is not None:
        if not causal:
            raise ValueError(
                f"sliding_window={sliding_window} without is_causal needs a mask of (B, 1, T, S), which transformers' "
                f"create_bidirectional_sliding_window_mask makes"
            )
        options["window"] = (sliding_window - 1, 0)
    if mask is not None:
        real, documents = token_mask(mask, batch, keys, keys)
        options["key_mask"] = real
        if documents is not None:
            options |= {"query_segments": documents[:, keys - queries :], "key_segments": documents}
    return options


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **given: Any,
) -> Tensor | None:
    """What `_attend` will get: nothing or (B, S) where that says it all, else transformers' own booleans."""
    from transformers import masking_utils

    both_ways = mask_function is masking_utils.bidirectional_mask_function
    if not both_ways and (torch.is_tensor(q_offset) or kv_offset + kv_length != q_offset + q_length):
        raise ValueError(
            "attention 'linbias' counts distances from the last key, and this cache has room behind it: "
            "pass a DynamicCache and no StaticCache"
        )
    if both_ways or (mask_function is masking_utils.causal_mask_function and kv_offset == 0):
        return attention_mask
    asked: dict[str, Any] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, **(given | asked),
    )  # fmt: skip
