# SPDX-License-Identifier: Apache-2.0
"""torch's nested tensors and masks as ours."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..semantics.checks import check_tensor, readable


class Ragged:
    """The sequences of a nested tensor laid end to end."""

    def __init__(self, nested: Tensor) -> None:
        if not nested.is_nested or nested.dim() != 3:
            raise ValueError("query, key and value must all be nested tensors (B, ragged, features), or none of them")
        self._layout = nested.layout
        if nested.layout == torch.jagged:
            jagged: Any = nested
            if jagged.lengths() is not None or isinstance(jagged.shape[1], int):
                raise ValueError("nested tensors must be ragged in dimension 1 without holes; make them anew")
            self.tokens, self.bounds = jagged.values(), jagged.offsets()
            self.lengths: Any = jagged.shape[1]
        else:
            parts = nested.unbind()
            self.lengths = [part.shape[0] for part in parts]
            self.tokens = torch.cat(parts)
            self.bounds = torch.tensor([0, *accumulate(self.lengths)], device=nested.device)

    def restore(self, tokens: Tensor) -> Tensor:
        """Nested as the input was."""
        if self._layout == torch.jagged:
            return torch.nested.nested_tensor_from_jagged(tokens, self.bounds)
        return torch.nested.as_nested_tensor(list(tokens.split(self.lengths)))


def visible_pairs(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...], like: Tensor) -> Tensor:
    """torch's mask (bool, True = hidden, or floats of 0 and -inf) as ours: bool, True = visible."""
    check_tensor(name, mask, like)
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be bool with True = hidden, or floating with 0 and -inf, got {mask.dtype}")
    visible = mask == 0
    message = (
        f"{name} must hold nothing but 0 and -inf when it is floating: masks hide keys here and add nothing to the "
        f"scores; pass it as bool with True = hidden"
    )
    _require((visible | (mask == -torch.inf)).all(), message)
    return visible


def _require(holds: Tensor, message: str) -> None:
    """Raise where reading a value is free; elsewhere assert on the device, which waits for nothing."""
    functorch = torch._C._functorch  # pyright: ignore
    while not torch.compiler.is_compiling() and functorch.is_functorch_wrapped_tensor(holds):
        holds = functorch.get_unwrapped(holds).all()  # vmap: of every example
    if type(holds) is Tensor and holds.device.type == "cpu" and not torch.compiler.is_compiling():
        if not holds:
            raise ValueError(message)
    else:
        torch._assert_async(holds, message)  # pyright: ignore[reportPrivateImportUsage]


def is_lower_triangle(visible: Tensor) -> bool:
    """Whether a mask says no more than ``causal`` does, where that is free to know: then no kernel need read it."""
    if not readable(visible) or visible.dim() != 2 or visible.shape[0] != visible.shape[1]:
        return False
    return torch.equal(visible, torch.ones_like(visible).tril_())
