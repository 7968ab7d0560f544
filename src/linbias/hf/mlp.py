# SPDX-License-Identifier: Apache-2.0
"""The MLP of a long text, some rows at a time: `in_blocks`.

Its inner activation is the widest tensor of these models, and each layer takes twice its size in fresh memory: 268 MB
at 8,192 tokens of width 1,024. On a CPU those pages take about as long to come as the activation takes to compute.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..semantics.checks import unwatched

# Elements of one block's inner activation: 16 MiB in float32, which an allocator keeps and uses again.
_BLOCK = 2**22
# Fewer rows would make the matrix products slower.
_LEAST_ROWS = 512


def in_blocks(
    mlp: nn.Module,
    whole: Callable[..., Tensor],
    hidden: Tensor,
    *residual: Tensor,
    activation: str = "act",
    linear: type[nn.Linear] = nn.Linear,
) -> Tensor:
    """`whole(hidden, *residual)`, over blocks of rows where nobody can tell the difference.

    That is: on the CPU, outside of autograd and training, with the parts the model was built with and no hooks on them.
    A hook, an adapter or a quantised layer sees the whole text.

    Args:
        mlp: the module.
        whole: its original forward, which works on each row by itself.
        hidden: (B, T, width).
        residual: of the same shape, where the original takes it in here; another, which it would broadcast, is left
            to it.
        activation: the name of the elementwise part.
        linear: the class of the others.

    Returns:
        (B, T, width).
    """
    if not _unseen(mlp, hidden, activation, linear) or any(part.shape != hidden.shape for part in residual):
        return whole(hidden, *residual)
    rows, width = hidden.shape[:-1].numel(), hidden.shape[-1]
    most = max(_LEAST_ROWS, _BLOCK // (4 * max(width, 1)))
    if rows <= most:
        return whole(hidden, *residual)
    flat = [part.flatten(0, 1)[None] for part in (hidden, *residual)]
    out: Tensor | None = None
    for start in range(0, rows, most):
        block = whole(*(part[:, start : start + most] for part in flat))
        out = block.new_empty(1, rows, width) if out is None else out
        out[:, start : start + most] = block
    assert out is not None  # there are more rows than fit a block
    return out.view(hidden.shape)


def _unseen(mlp: nn.Module, hidden: Tensor, activation: str, linear: type[nn.Linear]) -> bool:
    """Whether blocks give what the whole would, to the rounding of a matrix product, and nothing watches."""
    if mlp.training or torch.is_grad_enabled() or hidden.device.type != "cpu" or hidden.dim() != 3 or not unwatched():
        return False
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
        return False
    return all(
        (_is_elementwise(part) if name == activation else type(part) is linear and _is_plain(part.weight))
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for name, part in mlp.named_children()
    )


def _is_elementwise(activation: nn.Module) -> bool:
    """Whether it is one that transformers or torch builds: somebody's own may scale by the largest element, say."""
    known = type(activation).__module__.startswith(("transformers.", "torch.nn.", "linbias."))
    return known and next(activation.children(), None) is None


def _is_plain(weight: Tensor) -> bool:
    """Not of a class of its own: a quantised weight may quantise its input too, with one scale for all of it."""
    return type(weight) in (nn.Parameter, Tensor)
