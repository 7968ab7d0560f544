# SPDX-License-Identifier: Apache-2.0
"""The rules for flash-attn's arguments, under flash-attn's names."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..prepare import AttentionOptions
from ..semantics.checks import check_flag, check_number, check_scale, check_share, check_tensor


def check_layout(tensors: dict[str, Tensor], layout: str, dims: int) -> None:
    """Every tensor has as many dimensions as the layout."""
    for name, tensor in tensors.items():
        if check_tensor(name, tensor).dim() != dims:
            raise ValueError(f"{name} must have shape {layout}, got {tuple(tensor.shape)}")


def check_heads(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str], layout: str) -> None:
    """k has heads that q's can share and q's head dim; v has k's shape but for the head dim."""
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q must have a positive multiple of {names[0]}'s heads and its head dim, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}; the layout is {layout}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{names[1]} must have {names[0]}'s shape but for the head dim, got {tuple(v.shape)} and {tuple(k.shape)}; "
            f"the layout is {layout}"
        )


def check_integers(name: str, tensor: Tensor, like: Tensor, *sizes: int | None) -> Tensor:
    """int32 or int64 of these sizes; None: any."""
    fits = check_tensor(name, tensor, like).dim() == len(sizes) and all(
        wanted in (None, size) for wanted, size in zip(sizes, tensor.shape, strict=True)
    )
    if tensor.dtype not in (torch.int32, torch.int64) or not fits:
        wanted = ", ".join("n" if size is None else str(size) for size in sizes)
        raise ValueError(
            f"{name} must be int32 or int64 of shape ({wanted}{',' if len(sizes) == 1 else ''}), "
            f"got {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor


def check_probs(return_attn_probs: bool, dropout_p: float) -> None:
    """No pattern of dropout can be returned."""
    if check_share("dropout_p", dropout_p) > 0 and return_attn_probs:
        raise NotImplementedError(
            "return_attn_probs must be False with dropout: S_dmask would be the dense matrix that this library never "
            "makes; alibi_attention_weights shows the softmax, linbias.semantics.dropout which pairs are kept"
        )


def options_of(
    causal: bool, window_size: Sequence[int], softmax_scale: float | None, softcap: float, dropout_p: float = 0.0
) -> AttentionOptions:
    """flash-attn's options as alibi_attention's."""
    left, right = (None if side < 0 else side for side in _window(window_size))
    if check_number("softcap", softcap) < 0:
        raise ValueError(f"softcap must be at least 0.0, which means none, got {softcap}")
    right = None if check_flag("causal", causal) else right  # causality hides the same keys
    return {
        "causal": causal,
        "window": None if left is None and right is None else (left, right),
        "scale": None if softmax_scale is None else check_scale("softmax_scale", softmax_scale, 0.0),
        "softcap": softcap or None,
        "dropout_p": dropout_p,
    }


def _window(window_size: object) -> tuple[int, int]:
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(
        isinstance(side, (int, torch.SymInt)) and not isinstance(side, bool) for side in sides
    ):
        raise ValueError(
            f"window_size must be (left, right), two ints, -1 for an unlimited side, got {window_size!r}; "
            f"a causal window of n keys is (n - 1, 0)"
        )
    return sides
