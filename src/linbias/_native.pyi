# SPDX-License-Identifier: Apache-2.0
"""The extension built from csrc/; see csrc/bindings.cpp for the order of what the tuples hold."""

from collections.abc import Sequence

_View = tuple[int, Sequence[int], Sequence[int]] | None
_Environment = tuple[int, int, str]
_Options = tuple[bool | int | float | str | None, ...]

interface: int

def forward(
    environment: _Environment, options: _Options, operands: tuple[_View, ...], results: tuple[int, ...]
) -> None: ...
def backward(
    environment: _Environment,
    options: _Options,
    operands: tuple[_View, ...],
    saved: tuple[_View, ...],
    results: tuple[int | None, ...],
) -> None: ...
def has_variant(name: str) -> bool: ...
def variant() -> str: ...
