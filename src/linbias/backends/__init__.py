# SPDX-License-Identifier: Apache-2.0
"""The backends: their order, which one runs a call, and why the others do not.

A backend is a module of this package with the members of `Backend`. Backends never import each other, and `why_not`
imports no kernel, so asking is cheap and safe where a kernel cannot even load.
"""

from typing import Protocol, Unpack

from torch import Tensor

from ..errors import BackendUnavailable
from ..prepare import AttentionOptions, check_names, prepare
from ..semantics.problem import Gradients, Operands, Problem, Result
from . import native, reference, tiled, triton

__all__ = ["Backend", "available", "check_name", "explain", "select"]


class Backend(Protocol):
    """What a backend module provides."""

    @property
    def NAME(self) -> str:
        """What the user calls it."""
        ...

    @property
    def COMPOSITE(self) -> bool:
        """True: `forward` is plain torch that autograd sees through, and `backward` is not called."""
        ...

    @property
    def INSTALLED(self) -> bool:
        """Whether what it runs on is there: compiled kernels, or a package."""
        ...

    @property
    def READS_PAGES(self) -> bool:
        """Whether it reads keys through a block table, and lengths; others are given both `spelled_out`."""
        ...

    def why_not(self, problem: Problem) -> str | None:
        """The reason this call cannot run here, or None."""
        ...

    def forward(self, problem: Problem, operands: Operands) -> Result:
        """Output, lse, the bound on what was skipped, and the count of pairs computed."""
        ...

    def output(self, problem: Problem, operands: Operands) -> Tensor:
        """The output alone, where nobody asks for the rest."""
        ...

    def backward(
        self,
        problem: Problem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        lse_low: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        needs: tuple[bool, ...],
    ) -> Gradients:
        """Gradients of query, key, value, slopes, future slopes, where `needs` says so."""
        ...


_ORDER: tuple[Backend, ...] = (native, triton, tiled, reference)
_BY_NAME = {backend.NAME: backend for backend in _ORDER}


def available() -> tuple[str, ...]:
    """The names of the backends that are installed, in the order "auto" tries them.

    `explain` names the others too, with what they lack, and says which one runs a call.
    """
    return tuple(backend.NAME for backend in _ORDER if backend.INSTALLED)


def check_name(name: object) -> str:
    """The name of a backend or "auto"; whether it can run is another question."""
    if not isinstance(name, str) or (name != "auto" and name not in _BY_NAME):
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, _BY_NAME))}, got {name!r}")
    return name


def select(name: str, problem: Problem) -> Backend:
    """The backend to run `problem`: the one named, or for "auto" the first that can.

    Raises:
        ValueError: no such backend.
        BackendUnavailable: the one named cannot run this call; "auto" would have passed it over.
    """
    if name == "auto":
        for backend in _ORDER:
            if backend.why_not(problem) is None:
                return backend
    check_name(name)
    reason = _BY_NAME[name].why_not(problem)
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} cannot run this call: {reason}; backend='auto' picks one that can")
    return _BY_NAME[name]


def explain(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, **options: Unpack[AttentionOptions]) -> str:
    """Which backend "auto" runs this call on, and why each other one is not used.

    Args:
        query, key, value, slopes, options: as for `linbias.alibi_attention`, without backend and return_aux.

    Returns:
        One line a backend, in the order "auto" tries them.

    Raises:
        TypeError, ValueError: as `linbias.alibi_attention` would.
    """
    check_names("explain", options)
    problem, _ = prepare(query, key, value, slopes, options, draw=False)
    chosen = select("auto", problem).NAME
    lines: list[str] = []
    for backend in _ORDER:
        reason = backend.why_not(problem)
        verdict = (
            f"cannot: {reason}" if reason else "runs this call" if backend.NAME == chosen else "can, but not first"
        )
        lines.append(f"{backend.NAME:<10} {verdict}")
    return "\n".join(lines)
