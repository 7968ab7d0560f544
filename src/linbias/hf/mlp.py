# SPDX-License-Identifier: Apache-2.0
"""The MLP of a long text, some rows at a time: `RowBlocks`.

Its inner activation is the widest tensor of these models, and each layer takes twice its size in fresh memory: 268 MB
at 8,192 tokens of width 1,024. On a CPU those pages take about as long to come as the activation takes to compute.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..semantics.checks import unwatched

# Elements of one block's inner activation: 16 MiB in float32, which an allocator keeps and uses again.
_BLOCK = 2**22
# Fewer rows would make the matrix products slower.
_LEAST_ROWS = 512
# Layers and activations that work on each row by itself: somebody's own may scale by the largest element, say.
_ROW_WISE = (
    "torch.nn.modules.",
    "transformers.models.",
    "transformers.activations",
    "transformers.pytorch",
    "linbias.",
)


class RowBlocks:
    """Mixed in before an MLP's class: its forward over blocks of rows, where nobody can tell the difference.

    That is: on the CPU, outside of autograd and training, with the parts the model was built with and no hooks on them.
    A hook, an adapter or a quantised layer sees the whole text.
    """

    def forward(self: Any, hidden: Tensor, *residual: Tensor) -> Tensor:
        """(B, T, width), as the original's; a residual that it would broadcast is left to it."""
        whole = super().forward  # pyright: ignore
        if not _unseen(self, hidden) or any(part.shape != hidden.shape for part in residual):
            return whole(hidden, *residual)
        rows, width = hidden.shape[:-1].numel(), hidden.shape[-1]
        most = max(_LEAST_ROWS, _BLOCK // (4 * max(width, 1)))
        if rows <= most:
            return whole(hidden, *residual)
        out: Tensor | None = None
        flat = [part.flatten(0, 1)[None] for part in (hidden, *residual)]
        for start in range(0, rows, most):
            block = whole(*(part[:, start : start + most] for part in flat))
            out = block.new_empty(1, rows, width) if out is None else out
            out[:, start : start + most] = block
        assert out is not None  # there are more rows than fit a block
        return out.view(hidden.shape)


def _unseen(mlp: nn.Module, hidden: Tensor) -> bool:
    """Whether blocks give what the whole would, to the rounding of a matrix product, and nothing watches."""
    if mlp.training or torch.is_grad_enabled() or hidden.device.type != "cpu" or hidden.dim() != 3 or not unwatched():
        return False
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
        return False
    return all(
        type(part).__module__.startswith(_ROW_WISE)
        and next(part.children(), None) is None
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        # A quantised weight, of a class of its own, may quantise its input too, with one scale for all of it.
        and all(type(weight) in (nn.Parameter, Tensor) for weight in part.parameters())
        for part in mlp.children()
    )
