# SPDX-License-Identifier: Apache-2.0
"""How the inputs of a `Case` are drawn."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..prepare import AttentionOptions, prepare
from ..semantics.blocks import dense
from ..semantics.problem import Operands, Problem, accumulating_dtype
from ..semantics.slopes import alibi_slopes
from ..semantics.tokens import grid_positions
from .cases import Case


@dataclass(frozen=True)
class Inputs:
    """The arguments of one `linbias.alibi_attention` call and the gradients that come back to it."""

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor
    future_slopes: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keywords of the call; future_slopes and key_bounds apart."""
    bounds: int = 0
    """Block of key_bounds; 0: none."""
    seed: int = 0
    """For torch's generator before each call, so that every backend drops the same pairs."""

    def exactly(self, dtype: torch.dtype = torch.float64) -> "Inputs":
        """The same values for the plain formula in `dtype`, which knows no skipping.

        Slopes come in the accumulating dtype, so that their gradient keeps its digits.
        """
        tensors = {name: getattr(self, name).to(dtype) for name in ("query", "key", "value", "grad_out")}
        for name in ("slopes", "future_slopes", "grad_lse"):
            tensor = getattr(self, name)
            tensors[name] = None if tensor is None else tensor.to(accumulating_dtype(dtype))
        options = {name: given for name, given in self.options.items() if name != "tolerance"}
        return replace(self, **tensors, options=options, bounds=0)

    def dtype_of(self, result: str) -> torch.dtype:
        """What the named result of the call must come in: gradients as what they belong to, lse as accumulated."""
        if result == "lse":
            return accumulating_dtype(self.query.dtype)
        return self.query.dtype if result == "out" else getattr(self, result.removeprefix("grad_")).dtype

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, those among the options too."""
        everything = {each.name: getattr(self, each.name) for each in fields(self)} | self.options
        return {name: given for name, given in everything.items() if isinstance(given, Tensor)}

    def resolve(self) -> tuple[Problem, Operands]:
        """What a backend is given, key bounds apart."""
        options = cast(AttentionOptions, {"future_slopes": self.future_slopes, **self.options})
        with self.seeded():
            return prepare(self.query, self.key, self.value, self.slopes, options)

    @contextmanager
    def seeded(self) -> Generator[None]:
        """torch's generator starts from `seed`, and afterwards goes on as if nothing had been drawn."""
        if not self.options["dropout_p"]:
            yield
            return
        with torch.random.fork_rng(devices=[self.query.device] if self.query.is_cuda else []):
            torch.manual_seed(self.seed)
            yield


def make_qkv(case: Case, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Query (B, H, T, D), key (B, G, S, D), value (B, G, S, V): normal, with the strides that `case.layout` says."""
    generator = torch.Generator().manual_seed(case.seed)
    kv_heads, value_dim = case.kv_heads or case.heads, case.value_dim or case.head_dim
    made: list[Tensor] = []
    for heads, tokens, dim, spread in (
        (case.heads, case.queries, case.head_dim, case.spread),
        (kv_heads, case.keys, case.head_dim, case.spread),
        (kv_heads, case.keys, value_dim, 1.0),
    ):
        drawn = spread * torch.randn((case.batch, heads, tokens, dim), generator=generator, dtype=torch.float64)
        made.append(_LAYOUTS[case.layout](drawn.to(device, case.dtype)))
    return made[0], made[1], made[2]


def _sliced(tensor: Tensor) -> Tensor:
    """The middle of a larger buffer whose rest is NaN."""
    whole = torch.nn.functional.pad(tensor, (3, 2, 1, 2), value=torch.nan)
    return whole[:, :, 1 : whole.shape[2] - 2, 3 : whole.shape[3] - 2]


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda tensor: tensor,
    "tokens": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda tensor: tensor.mT.contiguous().mT,
    "sliced": _sliced,
    "expanded": lambda tensor: tensor[:1, :1].expand_as(tensor),
}


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """All that a call of `case` takes, drawn from `case.seed`; the same values on every device."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    query, key, value = make_qkv(case, device)
    rows = query.shape[:3]
    options = {
        name: getattr(case, name)
        for name in ("causal", "window", "sinks", "prefix", "metric", "unbiased", "scale", "softcap", "dropout_p")
    }
    if case.tolerance is not None:
        options["tolerance"] = case.tolerance
    tensors = {**_masks(case, generator), **_segments(case, generator), **_positions(case, generator)}
    inputs = Inputs(
        query=query,
        key=key,
        value=value,
        slopes=_slopes(case.slopes, case, generator).to(device),
        future_slopes=None if case.future is None else _slopes(case.future, case, generator).to(device),
        grad_out=torch.randn((*rows, value.shape[3]), generator=generator).to(device, case.dtype),
        grad_lse=torch.randn(rows, generator=generator).to(device, accumulating_dtype(case.dtype)),
        options=options | {name: tensor.to(device) for name, tensor in tensors.items()},
        bounds=case.bounds,
        seed=case.seed,
    )
    return _poisoned(inputs) if case.poison else inputs


def _slopes(kind: str, case: Case, generator: torch.Generator) -> Tensor:
    press = alibi_slopes(case.heads)
    made = {
        "press": press,
        "steeper": 2 * press,
        "zero": torch.zeros_like(press),
        "inf": torch.full_like(press, torch.inf),
        "negative": -press,
        "mixed": torch.tensor([0.0, torch.inf, -0.125, 1.5, 2.0**-9]).repeat(case.heads)[: case.heads],
        "double": press.double() / 3,
        "row": press[None],
        "items": press * (0.5 + torch.rand((case.batch, case.heads), generator=generator)),
    }
    return made[kind]


def _masks(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    batch, keys = case.batch, case.keys
    made: dict[str, Tensor] = {}
    lengths = torch.randint(1, keys + 1, (batch, 1), generator=generator) if keys else torch.zeros(batch, 1).long()
    index = torch.arange(keys)
    if case.padding is not None:
        made["key_mask"] = {
            "left": index >= keys - lengths,
            "right": index < lengths,
            "holes": torch.rand((batch, keys), generator=generator) < 0.6,
            "shared": torch.rand((keys,), generator=generator) < 0.6,
            "nothing": (torch.arange(batch) > 0)[:, None].repeat(1, keys),
        }[case.padding]
    if case.mask is not None:
        shape = {
            "keys": (keys,),
            "pairs": (case.queries, keys),
            "heads": (case.heads, 1, keys),
            "items": (batch, 1, 1, keys),
            "full": (batch, case.heads, case.queries, keys),
        }[case.mask]
        made["attn_mask"] = torch.rand(shape, generator=generator) < 0.7
    return made


def _segments(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    if case.segments is None:
        return {}
    if case.segments == "mixed":
        numbers = [
            torch.randint(-2, 2, (case.batch, count), generator=generator) for count in (case.queries, case.keys)
        ]
    else:
        starts = torch.rand((case.batch, case.keys), generator=generator) < 3 / (case.keys + 1)
        key_numbers = starts.cumsum(1)
        aligned = (torch.arange(case.queries) + case.keys - case.queries).clamp_min(0)
        numbers = [key_numbers[:, aligned] if case.keys else aligned.expand(case.batch, -1), key_numbers]
    return {"query_segments": numbers[0], "key_segments": numbers[1]}


def _positions(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    kind, counts = case.positions, (case.queries, case.keys)
    if kind is None:
        return {}

    def drawn(low: int, high: int, *rows: int) -> list[Tensor]:
        return [torch.randint(low, high, (*rows, count), generator=generator) for count in counts]

    if kind in ("keys", "jumps", "far"):
        query_positions, key_positions = (steps.cumsum(0) for steps in drawn(0 if kind == "keys" else 1, 4))
        if kind == "keys":
            return {"key_positions": key_positions}
        shift = 2**40 if kind == "far" else 0
        # Ends aligned, so that a window and a causal mask leave something.
        query_positions = query_positions - query_positions[-1:] + key_positions[-1:].sum()
        made = [query_positions + shift, key_positions + shift]
    elif kind == "grid":
        made = [grid_positions(count // 5 + 1, 5)[:count] for count in counts]
    elif kind == "points":
        made = [5 * torch.rand((case.batch, count, 3), generator=generator) for count in counts]
    else:
        made = {
            "shifted": lambda: [torch.arange(-count, 0) - 1000 for count in counts],
            "away": lambda: [torch.arange(case.queries) + 10_000 + case.keys, torch.arange(case.keys)],
            "repeats": lambda: drawn(-3, 5),
            "unsorted": lambda: [torch.randperm(count, generator=generator) for count in counts],
            "items": lambda: [rows.int() for rows in drawn(0, 2 * case.keys + 1, case.batch)],
        }[kind]()
    return {"query_positions": made[0], "key_positions": made[1]}


def visible_pairs(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(b, H, T, S) slope x distance, and (B, H, T, S) whether the pair exists."""
    penalty, visible = dense(operands, problem.options)
    return penalty, visible.expand(problem.batch, problem.heads, problem.queries, problem.keys)


def seen(problem: Problem, visible: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, T) rows that see some key, and (B, G, S) keys that some query of their item and group sees."""
    return visible.any(3), visible.any(2).unflatten(1, (problem.kv_heads, problem.group)).any(2)


def _poisoned(inputs: Inputs) -> Inputs:
    problem, operands = inputs.resolve()
    rows, keys = seen(problem, visible_pairs(problem, operands)[1])
    # In turn, because a fast path that survives one may not survive the other.
    poison = torch.tensor([torch.nan, torch.inf, -torch.inf], device=rows.device)

    def fill(tensor: Tensor, keep: Tensor) -> Tensor:
        tail = (1,) * (tensor.dim() - 3)
        bad = poison[torch.arange(tensor.shape[2], device=rows.device) % 3].to(tensor.dtype)
        return torch.where(keep.reshape(*keep.shape, *tail), tensor, bad.reshape(-1, *tail))

    return replace(
        inputs,
        query=fill(inputs.query, rows),
        key=fill(inputs.key, keys),
        value=fill(inputs.value, keys),
        grad_out=fill(inputs.grad_out, rows),
        grad_lse=fill(inputs.grad_lse, rows),
    )
