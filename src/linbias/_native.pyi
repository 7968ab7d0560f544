# SPDX-License-Identifier: Apache-2.0
"""The extension built from csrc/; see csrc/bindings.cpp for the order of what the tuples hold."""

from collections.abc import Sequence

_View = tuple[int, Sequence[int], Sequence[int]] | None

def forward(
    sizes: tuple[int, ...],
    options: tuple[bool | int | float | None, ...],
    operands: tuple[_View, ...],
    results: tuple[int, ...],
    variant: str = "",
) -> None: ...
def backward(
    sizes: tuple[int, ...],
    options: tuple[bool | int | float | None, ...],
    operands: tuple[_View, ...],
    saved: tuple[_View, ...],
    results: tuple[int | None, ...],
    variant: str = "",
) -> None: ...
def has_variant(name: str) -> bool: ...
def variant() -> str: ...
