# SPDX-License-Identifier: Apache-2.0
"""How kernels are compiled and launched. None is imported before one runs."""

import math
import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...semantics.problem import Operands, Problem
from ...semantics.tokens import Tokens
from . import arguments
from .arguments import Found, Limits, Numbers, Rows, Saved, Visits, slopes_of, unit_of


def interpreted() -> bool:
    """Whether Triton interprets kernels, on any device: what TRITON_INTERPRET=1 asks for, before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def capability(device: torch.device) -> tuple[int, int]:
    """Of the GPU; (0, 0) on ROCm, whose shared memory is 64 KiB."""
    if device.type != "cuda":
        return (9, 0)
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


class Tiles(NamedTuple):
    """How a kernel is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiles_of(problem: Problem, *, backward: bool = False) -> Tiles:
    """By width and dtype; small ones in the interpreter, so that small problems have several."""
    if interpreted():
        return Tiles(64, 32, 4, 1)
    width = max(problem.head_dim, problem.value_dim)
    wide = problem.dtype == torch.float32
    if backward:
        return Tiles(64, 32, 4, 1 if wide or width > 128 else 2) if wide or width > 64 else Tiles(64, 64, 4, 2)
    if problem.queries <= 16 and not wide:
        return Tiles(16, 64, 4, 2)
    if wide or width > 128:
        return Tiles(64, 32, 4, 2 if capability(problem.device) > (0, 0) else 1)
    # Where a matrix instruction's operands are registers, 64 keys of more than 64 channels do not fit beside them.
    return Tiles(128, 64 if width <= 64 or capability(problem.device) >= (9, 0) else 32, 8, 3)


class Launch(NamedTuple):
    """What all kernels of one call are given."""

    problem: Problem
    tiles: Tiles
    query: Rows
    key: Rows
    value: Rows
    slopes: tuple[Tensor, Tensor]
    sides: tuple[arguments.Tokens, arguments.Tokens]
    shared: tuple[Limits, Numbers]
    seed: Tensor | None
    constants: dict[str, Any]

    @staticmethod
    def of(problem: Problem, operands: Operands, tiles: Tiles) -> "Launch":
        """Strides and numbers; tensors are copied only where their last dimension is strided."""
        metric, points = problem.options.metric, operands.key_positions
        return Launch(
            problem,
            tiles,
            *(Rows.of(operands.query), Rows.of(operands.key), Rows.of(operands.value)),
            slopes_of(problem, operands),
            (arguments.Tokens.of(Tokens.queries_of(operands)), arguments.Tokens.of(Tokens.keys_of(operands))),
            (Limits.of(problem), Numbers.of(problem)),
            operands.seed,
            {
                "D": problem.head_dim,
                "V": problem.value_dim,
                "BD": _padded(problem.head_dim),
                "BV": _padded(problem.value_dim),
                "BM": tiles.rows,
                "BN": tiles.keys,
                "METRIC": metric,
                "COORDS": 0 if metric is None or points is None else points.shape[2],
                "EXP2": problem.dtype != torch.float32,
                "num_warps": tiles.warps,
                "num_stages": tiles.stages,
            },
        )

    def forward(self, visits: Visits, found: Found, splits: int = 1) -> None:
        """Every row block over its list, in ``splits`` shares."""
        from .kernels.forward import forward_kernel

        own = {"VALUES": found.out is not None, "SPLITS": splits}
        self._run(forward_kernel, visits, splits, (found,), own)

    def splits(self, visits: Visits) -> int:
        """Shares of the keys, so that few rows keep the whole device busy; a power of two, for few compilations."""
        device = self.problem.device
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
        wanted = 2 * cores // max(1, visits.order.numel() * visits.each[0])
        most = min(wanted, visits.entries * visits.each[1] // 2, 64)
        return 1 << (most.bit_length() - 1) if most > 1 else 1

    def rows(self, visits: Visits, saved: Saved, gradients: tuple[Tensor | None, ...]) -> None:
        """Gradients of the query, and of both slopes by row block."""
        from .kernels.backward import rows_kernel

        self._run(rows_kernel, visits, 1, (saved, *gradients), {})

    def keys(self, visits: Visits, saved: Saved, gradients: tuple[Tensor, Tensor]) -> None:
        """Gradients of key and value."""
        from .kernels.backward import keys_kernel

        self._run(keys_kernel, visits, 1, (saved, *gradients), {})

    def _run(self, kernel: Any, visits: Visits, splits: int, results: tuple[Any, ...], own: dict[str, Any]) -> None:
        call = (self.query, self.key, self.value, *self.slopes, self.seed, *self.sides, *self.shared, visits)
        args = (*call, *results, self.problem.heads, self.problem.group)
        run(kernel, (visits.order.numel() * visits.each[0], splits), args, self.constants | own)

    def saved(self, results: tuple[Tensor, Tensor, Tensor], grad_out: Tensor | None, grad_lse: Tensor | None) -> Saved:
        """What backward reads of each row, from output, lse and lse_low."""
        from .kernels.backward import delta_kernel

        out, lse, lse_low = results
        exact = (lse.double() + lse_low.double()) * unit_of(self.problem)
        high = exact.float()
        low = torch.where(high.isfinite(), exact - high.double(), 0.0).float()
        delta, width = torch.empty_like(high), self.problem.value_dim
        block = max(1, 4096 // _padded(width))
        grad = None if grad_out is None else Rows.of(grad_out)
        lse_part = None if grad_lse is None else grad_lse.contiguous()
        args = (Rows.of(out), grad, lse_part, delta, *high.shape[1:], delta.numel())
        run(delta_kernel, (-(-delta.numel() // block),), args, {"V": width, "BV": _padded(width), "BM": block})
        grad = Rows.of(torch.zeros_like(out[:1, :1, :1]).expand_as(out)) if grad is None else grad
        return Saved(grad, torch.where(high == -math.inf, math.inf, high).contiguous(), low.contiguous(), delta)

    def norms(self, rows: Rows) -> Tensor:
        """(B, heads, N): upper bounds of the lengths of what are queries or keys."""
        from .kernels.forward import norms_kernel

        shape, width = rows.data.shape[:3], rows.data.shape[3]
        out = rows.data.new_empty(shape, dtype=torch.float32)
        info, block = torch.finfo(torch.float32), max(1, 4096 // _padded(width))
        inflation, least = 1 + (width / 2 + 10) * info.eps, info.tiny * math.sqrt(width)
        args = (rows, out, *shape[1:], out.numel(), inflation, least)
        run(norms_kernel, (-(-out.numel() // block),), args, {"D": width, "BD": _padded(width), "BM": block})
        return out


def _padded(width: int) -> int:
    """Matrix instructions take powers of two from 16 on."""
    return max(16, 1 << (width - 1).bit_length())


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Every launch is here, on the device of the first tensor: Triton launches on the current one."""
    device = args[0].data.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **constants)
