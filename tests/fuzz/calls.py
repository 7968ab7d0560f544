# SPDX-License-Identifier: Apache-2.0
"""Random calls of the public operation, padded and packed, on every backend and instruction set."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from linbias.testing import Case, Inputs, evaluate, largest_error, make_inputs
from linbias.testing.inputs import _poisoned as poisoned
from tests.fuzz.loop import Fuzzer, runners, running
from tests.fuzz.packed import check_packed
from tests.fuzz.rounding import assert_right, bounds_of, tolerance_of
from tests.judged import answers

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Call(Case):
    """A case and what else can happen to it."""

    far: str | None = None
    """Positions moved to "seconds" (nanoseconds since 1970), "2^53", "ends" (of int64), or kept in "int32"."""
    hidden: bool = False
    """Nonsense in places, segments and slopes that nothing may look at."""
    seen: str | None = None
    """"nan", "inf": a key that is seen holds it; the outputs are compared, and which of their rows are NaN."""
    gradients: str = "plain"
    """"expanded" (one number for all rows) or "transposed"."""
    flush: bool = False
    """The processor takes subnormal numbers for 0."""
    threads: int = 1
    sequences: int = 0
    """A varlen call of that many sequences, some of them empty; the batch counts for nothing."""


def draw(given: random.Random) -> Call:
    """Any call that is legal."""
    pick = given.choice
    kv_heads = pick((1, 1, 2, 3))
    sizes = pick((0, 1, 1, 2, 5, 17, 33, 63, 64, 65, 66)), pick((127, 128, 129, 192, 200, 257, 300))
    keys = sizes[given.random() < 0.2]
    queries = pick((0, 1, 1, 2, keys, keys, keys, 9, 31, 64, 65, 100))
    metric = pick((None, None, None, "euclidean", "manhattan"))
    small = given.random() < 0.05
    drawn: dict[str, Any] = dict(
        batch=pick((0, 1, 1, 2, 2, 3)), heads=kv_heads * pick((1, 1, 2, 3)), kv_heads=kv_heads, queries=queries,
        keys=keys, head_dim=pick((1, 3, 8, 16, 33, 64)), value_dim=pick((None, None, 1, 5, 16)),
        padding=pick((None, None, "left", "right", "holes", "shared", "nothing")),
        mask=pick((None, None, None, "keys", "pairs", "heads", "items", "full")),
        segments=pick((None, None, "packed", "mixed")), metric=metric,
        slopes=pick(("press",) * 3 + ("steeper", "zero", "inf", "negative", "mixed", "double", "row", "items")),
        unbiased=pick((0, 0, 0, 1, 5, 70, 1000)), softcap=pick((None, None, None, 5.0, 0.3)),
        scale=2.0**28 if small else pick((None, None, None, 0.0, -0.5, 1.0, 3.0)),
        dropout_p=pick((0.0, 0.0, 0.0, 0.3, 0.9)), tolerance=pick((None, None, None, 0.0, 1e-3, 0.1)),
        bounds=pick((0, 0, 0, 1, 7, 64, 100)), spread=2.0**-15 if small else pick((1.0, 1.0, 0.01, 3.0, 10.0)),
        layout=pick(("plain", "plain", "tokens", "columns", "sliced", "expanded")), poison=pick((True, False)),
        dtype=pick(DTYPES), hidden=pick((True, False)), gradients=pick(("plain", "plain", "expanded", "transposed")),
        flush=given.random() < 0.2, threads=pick((1, 1, 1, 2, 3)),
        seen=pick(("nan", "inf")) if given.random() < 0.04 else None,
    )  # fmt: skip
    if metric is not None:
        return Call(**drawn, positions=pick(("grid", "points")))
    drawn |= _ordered(given, queries <= keys)
    if drawn["seen"]:
        drawn["far"] = None  # beside such distances no other number has digits that could be compared
    if given.random() < 0.15:
        return _packed(Call(**drawn), given)
    return Call(**drawn)


def _ordered(given: random.Random, fewer: bool) -> dict[str, Any]:
    """What needs positions of one dimension."""
    pick = given.choice
    positions = pick((None, None, "shifted", "keys" if fewer else "items", "jumps", "repeats", "unsorted", "items"))
    drawn: dict[str, Any] = dict(
        causal=pick((True, False)),
        window=pick((None, None, None, (0, 0), (3, 0), (64, 0), (5, 9), (None, 2), (100, None), (130, 70))),
        sinks=pick((0, 0, 1, 4, 70, 500)), prefix=pick((0, 0, 1, 3, 70, 400)), positions=positions,
        future=pick((None, None, "press", "zero", "inf", "negative", "mixed", "steeper", "items", "row")),
    )  # fmt: skip
    if positions in ("shifted", "jumps", "repeats", "unsorted", "items"):
        drawn["far"] = pick((None, None, "seconds", "2^53", "int32", "ends"))
    return drawn


def _packed(call: Call, given: random.Random) -> Call:
    """The options that varlen has no use for as they were not given."""
    shared = call.dropout_p > 0  # whose pairs are numbered from the start of the call
    slopes, future = ("press" if word == "row" or (shared and word == "items") else word
                      for word in (call.slopes, call.future))  # fmt: skip
    return replace(
        call, mask=None, segments=None, seen=None, far=None, bounds=0, batch=1, hidden=False, poison=False,
        slopes=slopes, future=future, unbiased=0 if shared else call.unbiased, sequences=given.randint(1, 5),
        positions=None if call.positions == "keys" else call.positions,
    )  # fmt: skip


def inputs_of(call: Call) -> Inputs:
    """`make_inputs`, and then what only the fuzzer does."""
    inputs = make_inputs(replace(call, poison=False))
    if call.far is not None:
        inputs = _moved(inputs, call.far)
    if call.poison:  # of what nothing sees where it stands now
        inputs = poisoned(inputs)
    if call.hidden:
        inputs = _hidden(inputs)
    if call.gradients == "expanded":
        inputs = replace(inputs, grad_out=torch.tensor(0.7, dtype=call.dtype).expand_as(inputs.grad_out),
                         grad_lse=torch.tensor(-0.3).to(inputs.grad_lse).expand_as(inputs.grad_lse))  # fmt: skip
    elif call.gradients == "transposed":
        inputs = replace(inputs, grad_out=inputs.grad_out.mT.contiguous().mT)
    return inputs


def _moved(inputs: Inputs, far: str) -> Inputs:
    places = {name: inputs.options[name].long() for name in ("query_positions", "key_positions")}
    if far == "int32":
        moved = {name: given.int() for name, given in places.items()}
    elif far == "ends":  # every third token at one end, every fifth at the other
        at = {name: torch.arange(given.shape[-1]) for name, given in places.items()}
        high = {name: torch.where(at[name] % 3 == 0, 2**63 - 1, given) for name, given in places.items()}
        moved = {name: torch.where(at[name] % 5 == 0, -(2**63), given) for name, given in high.items()}
    else:
        moved = {name: given + (1_700_000_000_000_000_000 if far == "seconds" else 2**53 - 7)
                 for name, given in places.items()}  # fmt: skip
    return replace(inputs, options=inputs.options | moved)


def _hidden(inputs: Inputs) -> Inputs:
    """Nonsense where a key is padding: its segment, and its place unless the queries take theirs from it."""
    options, mask = dict(inputs.options), inputs.options.get("key_mask")
    names = ["key_segments"] + ["key_positions"] * ("query_positions" in options)
    for name in names if mask is not None else []:
        given = options.get(name)
        if given is None:
            continue
        coordinates = name == "key_positions" and options["metric"] is not None
        real = torch.atleast_2d(mask)[(..., *(None,) * coordinates)]
        given = given.double() if coordinates else given
        options[name] = torch.where(real, given, torch.nan if coordinates else torch.iinfo(given.dtype).max)
        if coordinates:
            options["query_positions"] = options["query_positions"].double()
    return replace(inputs, options=options)


def check(call: Call) -> list[str]:
    """Raise where a backend is wrong; the names of what was asked."""
    inputs = inputs_of(call)
    if call.sequences:
        return check_packed(inputs, call)
    if call.seen is not None:
        return _check_seen(call, inputs)
    exact, bounds = answers(inputs), bounds_of(inputs)
    given = {name: tensor.clone() for name, tensor in inputs.tensors().items()}
    for runner in runners():
        with running(runner, threads=call.threads, flush=call.flush) as backend:
            found, aux = evaluate(inputs, backend)
            assert_right(found, exact, inputs, bounds)
            assert (aux.skipped >= 0).all() and (aux.skipped <= tolerance_of(inputs)).all(), "skipped beyond tolerance"
            for name, tensor in inputs.tensors().items():
                assert tensor.allclose(given[name], 0, 0, equal_nan=True), f"{name} was modified"
    return [runner.name for runner in runners()]


def _check_seen(call: Call, inputs: Inputs) -> list[str]:
    """A key in the middle holds what is no number: the same rows show it as by the oracle, and the others are right."""
    at, content = inputs.key.shape[2] // 2, {"nan": torch.nan, "inf": torch.inf}[call.seen or "nan"]
    key = inputs.key.clone()
    key[:, :, at : at + 1] = content
    inputs = replace(inputs, key=key)
    exact, dtype = answers(inputs), inputs.dtype_of("out")
    for runner in runners():
        with running(runner, threads=call.threads, flush=call.flush) as backend:
            found = evaluate(inputs, backend)[0]
            for name in ("out", "lse"):
                lost = exact[name].isnan()
                assert found[name].isnan().equal(lost), f"{name} holds NaN elsewhere"
                one, other = (torch.where(lost, 0.0, each[name].double()) for each in (found, exact))
                error, size = largest_error(one, other), float(other[other.isfinite()].abs().sum())
                bound = 64 * torch.finfo(dtype).eps * (1 + size) + 4 * inputs.options.get("tolerance", 0.0) * (1 + size)
                assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"
    return [runner.name for runner in runners()]


FUZZER = Fuzzer(draw, check)
