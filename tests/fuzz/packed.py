# SPDX-License-Identifier: Apache-2.0
"""Varlen calls, each sequence of which is judged as if it were alone; under dropout all of them as one packed call."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linbias import alibi_attention_varlen
from linbias.testing import Inputs
from tests.fuzz.loop import runners, running
from tests.fuzz.rounding import assert_right, bounds_of
from tests.judged import answers

Bounds = tuple[list[int], list[int]]
Part = tuple[slice, slice]
"""Rows and keys of it."""


def check_packed(inputs: Inputs, call: Any) -> list[str]:
    """Raise where a backend is wrong; the names of what was asked. `call` says how many sequences there are."""
    bounds = _boundaries(call)
    ends = bounds[0][-1], bounds[1][-1]
    if call.dropout_p:  # pairs are numbered from the start of the call
        parts, whole = [(slice(0, ends[0]), slice(0, ends[1]))], _one_call(inputs, bounds)
        alone = [_part(whole, parts[0])]
    else:
        parts = [(slice(*rows), slice(*keys)) for rows, keys in zip(*map(pairwise, bounds), strict=True)]
        inputs = _by_sequence(inputs, call)
        alone = [_part(inputs, part, n) for n, part in enumerate(parts)]
    judged = [(answers(part), bounds_of(part)) for part in alone]
    for runner in runners():
        with running(runner, threads=call.threads, flush=call.flush) as backend:
            found = _evaluate(inputs, bounds, backend)
            for (exact, room), part in zip(judged, parts, strict=True):
                _assert_part(found, exact, room, part, inputs)
            _assert_slopes(found, judged, inputs)
            assert not found["out"][:, :, ends[0] :].any(), "rows of no sequence hold something"
            assert (found["lse"][:, :, ends[0] :] == -torch.inf).all(), "rows of no sequence see something"
    return [f"{runner.name} varlen" for runner in runners()]


def _boundaries(call: Any) -> Bounds:
    """From 0; tokens may be left over at the end."""
    drawn = random.Random(call.seed)
    counts = call.sequences - 1 + (drawn.random() < 0.5)
    made = [sorted(drawn.randint(0, tokens) for _ in range(counts)) for tokens in (call.queries, call.keys)]
    last = [[tokens] * (call.sequences - counts) for tokens in (call.queries, call.keys)]
    return [0, *made[0], *last[0]], [0, *made[1], *last[1]]


def _by_sequence(inputs: Inputs, call: Any) -> Inputs:
    """ "items" are sequences here."""
    more = 1 + torch.arange(call.sequences)[:, None] / 4
    changed = {
        name: getattr(inputs, name)[:1] * more
        for name, kind in (("slopes", call.slopes), ("future_slopes", call.future))
        if kind == "items"
    }
    return replace(inputs, **changed)


def _part(inputs: Inputs, part: Part, number: int | None = None) -> Inputs:
    """The call of these rows and keys alone."""
    rows, keys = part
    cut: dict[str, Any] = {name: getattr(inputs, name)[:, :, rows] for name in ("query", "grad_out", "grad_lse")}
    cut |= {name: getattr(inputs, name)[:, :, keys] for name in ("key", "value")}
    for name in ("slopes", "future_slopes"):
        given = getattr(inputs, name)
        cut[name] = given if number is None or given is None or given.dim() == 1 or len(given) == 1 else given[number]
    sides = {"query_positions": rows, "query_segments": rows} | dict.fromkeys(
        ("key_positions", "key_segments", "key_mask"), keys
    )
    options = {name: given[..., sides[name]] if name in sides else given for name, given in inputs.options.items()}
    return replace(inputs, **cut, options=options)


def _one_call(inputs: Inputs, bounds: Bounds) -> Inputs:
    """Segments and aligned ends, as the page on packed sequences has it."""
    more: dict[str, Tensor] = {}
    both = list(zip(*map(pairwise, bounds), strict=True))
    for side, tokens in (("query", inputs.query.shape[2]), ("key", inputs.key.shape[2])):
        number, place = torch.full((tokens,), -1), torch.zeros(tokens, dtype=torch.int64)
        for n, ((row, row_end), (key, key_end)) in enumerate(both):
            start, end = (row, row_end) if side == "query" else (key, key_end)
            number[start:end] = n
            place[start:end] = torch.arange(end - start)
            if side == "query":
                place[start:end] += (key_end - key) - (row_end - row)
        more |= {f"{side}_segments": number, f"{side}_positions": place}
    return replace(inputs, options=more | inputs.options | {f"{side}_segments": more[f"{side}_segments"]
                                                            for side in ("query", "key")})  # fmt: skip


def _evaluate(inputs: Inputs, bounds: Bounds, backend: str) -> dict[str, Tensor]:
    """Everything by name, with the batch's dimension, as `linbias.testing.evaluate` gives it."""
    names = ("query", "key", "value", "slopes", "future_slopes")
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in names if name in inputs.tensors()}
    packed = {name: leaves[name][0].transpose(0, 1) for name in ("query", "key", "value")}
    options = {name: given for name, given in inputs.options.items() if name != "metric"}
    for name in ("key_mask", "query_positions", "key_positions"):
        if name in options:
            options[name] = options[name].reshape(-1)
    cu_seqlens = [torch.tensor(each, dtype=torch.int32) for each in bounds]
    longest = [max(end - start for start, end in pairwise(each)) for each in bounds]
    with inputs.seeded():
        out, aux = alibi_attention_varlen(
            *packed.values(), leaves["slopes"], *cu_seqlens, *longest, future_slopes=leaves.get("future_slopes"),
            backend=backend, return_aux=True, **options,
        )  # fmt: skip
    results = out.transpose(0, 1)[None], aux.lse[None]
    gradients = torch.autograd.grad(results, tuple(leaves.values()), (inputs.grad_out, inputs.grad_lse))
    found = {"out": results[0].detach(), "lse": results[1].detach()}
    return found | {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def _assert_part(
    found: dict[str, Tensor], exact: dict[str, Tensor], bounds: dict[str, Tensor], part: Part, inputs: Inputs
) -> None:
    sides = {"out": part[0], "lse": part[0], "grad_query": part[0], "grad_key": part[1], "grad_value": part[1]}
    own = {name: found[name][:, :, side] for name, side in sides.items()}
    assert_right(own, exact, inputs, {name: bound for name, bound in bounds.items() if name in sides})


def _assert_slopes(
    found: dict[str, Tensor], judged: list[tuple[dict[str, Tensor], dict[str, Tensor]]], inputs: Inputs
) -> None:
    """One gradient a sequence, or the sum of theirs."""
    for name in ("grad_slopes", "grad_future_slopes"):
        if name not in judged[0][1]:
            continue
        exact, bounds = (
            torch.stack(each) for each in zip(*((one[name], two[name]) for one, two in judged), strict=True)
        )
        if exact.shape != found[name].shape:
            exact, bounds = exact.sum(0), bounds.sum(0)
        assert_right(found, {name: exact}, inputs, {name: bounds})
