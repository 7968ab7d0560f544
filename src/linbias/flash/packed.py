# SPDX-License-Identifier: Apache-2.0
"""flash-attn's functions of query, key and value in one tensor, or key and value in one.

flash-attn packs them to save a copy of gradients in its own kernels. Here the parts are views: nothing is copied, and
the gradient of the packed tensor is that of its parts.
"""

from collections.abc import Sequence

from torch import Tensor

from .arguments import check_layout
from .functions import flash_attn_func, flash_attn_varlen_func

Found = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_qkvpacked_func(  # noqa: PLR0913, PLR0917  (flash-attn's signature, as those below)
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """`flash_attn_func` of the three parts of one tensor.

    Args:
        qkv: (B, T, 3, H, D).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as for
            `flash_attn_func`.

    Returns:
        (B, T, H, D); with return_attn_probs as `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.

    >>> import torch
    >>> flash_attn_qkvpacked_func(torch.randn(2, 7, 3, 4, 16), causal=True, alibi_slopes=torch.rand(4)).shape
    torch.Size([2, 7, 4, 16])
    """
    q, k, v = _parts("qkv", qkv, 3, "(batch, tokens, 3, heads, head dim)", 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_kvpacked_func(  # noqa: PLR0913, PLR0917
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """`flash_attn_func` of q (B, T, H, D) and the two parts of kv (B, S, 2, G, D).

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.

    >>> import torch
    >>> q, kv = torch.randn(2, 7, 4, 16), torch.randn(2, 9, 2, 1, 16)
    >>> flash_attn_kvpacked_func(q, kv, causal=True, alibi_slopes=torch.rand(4)).shape
    torch.Size([2, 7, 4, 16])
    """
    k, v = _parts("kv", kv, 2, "(batch, tokens, 2, heads, head dim)", 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(  # noqa: PLR0913, PLR0917
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """`flash_attn_varlen_func` of the three parts of qkv (total, 3, H, D), with one set of boundaries.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_varlen_func`.

    >>> import torch
    >>> qkv, bounds = torch.randn(9, 3, 4, 16), torch.tensor([0, 2, 9])
    >>> flash_attn_varlen_qkvpacked_func(qkv, bounds, 7, causal=True, alibi_slopes=torch.rand(4)).shape
    torch.Size([9, 4, 16])
    """
    q, k, v = _parts("qkv", qkv, 3, "(total tokens, 3, heads, head dim)", 4)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *bounds, *options, return_attn_probs)


def flash_attn_varlen_kvpacked_func(  # noqa: PLR0913, PLR0917
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """`flash_attn_varlen_func` of q (total_q, H, D) and the two parts of kv (total_k, 2, G, D).

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_varlen_func`.

    >>> import torch
    >>> q, kv, bounds = torch.randn(9, 4, 16), torch.randn(9, 2, 2, 16), torch.tensor([0, 2, 9])
    >>> flash_attn_varlen_kvpacked_func(q, kv, bounds, bounds, 7, 7, alibi_slopes=torch.rand(4)).shape
    torch.Size([9, 4, 16])
    """
    k, v = _parts("kv", kv, 2, "(total tokens, 2, heads, head dim)", 4)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *bounds, *options, return_attn_probs)


def _parts(name: str, packed: Tensor, count: int, layout: str, dims: int) -> tuple[Tensor, ...]:
    check_layout({name: packed}, layout, dims)
    if packed.shape[-3] != count:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(packed.shape)}")
    return packed.unbind(-3)
