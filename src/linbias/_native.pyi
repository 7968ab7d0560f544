# SPDX-License-Identifier: Apache-2.0
"""The extension built from csrc/; see csrc/bindings.cpp."""

from torch import Tensor

from .semantics.problem import Gradients, Operands, Options, Result

_Names = tuple[str, ...]
_OutOnly = tuple[Tensor, None, None, None, None]

def bind(exchange: object, operands: _Names, options: _Names, results: _Names, gradients: _Names, /) -> list[str]: ...
def forward(
    operands: Operands, options: Options, results: Result | _OutOnly, threads: int, variant: str, /
) -> None: ...
def backward(
    operands: Operands,
    options: Options,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    gradients: Gradients,
    threads: int,
    variant: str,
    /,
) -> None: ...
def has_variant(name: str) -> bool: ...
def variant() -> str: ...
