# SPDX-License-Identifier: Apache-2.0
"""Implementations against each other, on the same inputs, in turns."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ...attention import alibi_attention
from .inputs import Content
from .peers import PLAIN, Attend, Contender
from .record import BOTH, FORWARD, Direction, Found, Record, Timing
from .timing import Call, in_turns

_CHECKED_ROWS = 64


def race(content: Content, contenders: Iterable[Contender], direction: Direction, rounds: int, record: Record) -> Found:
    """Time each contender that can take this length, and the baseline, one way or both."""
    found = Found()
    runners = _ready([PLAIN, *contenders], content, direction, found)
    times = in_turns({name: call for name, (_, call) in runners.items()}, rounds)
    baseline = times.pop(PLAIN.name, None)
    estimate = record.baseline(direction, content.name) if baseline is None else None
    for name, seconds in times.items():
        timing = Timing(
            implementation=name,
            inputs=content.name,
            direction=direction,
            length=content.length,
            seconds=seconds,
            baseline_seconds=baseline,
        )
        if estimate is not None:
            length, known = estimate
            grown = known * (content.length / length) ** 2
            timing = replace(timing, baseline_seconds=grown, baseline_estimated=True)
        if direction == FORWARD:
            timing = replace(timing, error=_error(runners[name][0], content), computed=_computed(name, content))
        found.timings.append(timing)
    return found


def told(reason: Exception) -> str:
    """Return the kind and the first line of an exception."""
    return f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}"


def _ready(
    contenders: list[Contender], content: Content, direction: Direction, found: Found
) -> dict[str, tuple[Attend, Call]]:
    """Those that can run here, each run once: the attention, and the call to time."""
    runners: dict[str, tuple[Attend, Call]] = {}
    for contender in contenders:
        if content.length > contender.longest:
            beyond = f"{contender.name} beyond {contender.longest:,} tokens"
            found.not_run[beyond] = "left out, it would take minutes or more memory than most machines have"
            continue
        if direction == BOTH and not contender.backward:
            found.not_run[f"{contender.name}, backward"] = "torch has none on CPU"
            continue
        try:
            attend = contender.make(content)
            call = _forward(attend, content) if direction == FORWARD else _both_ways(attend, content)
            call()
        except Exception as reason:  # a peer may fail in any way; the record says how
            found.not_run[f"{contender.name}, {direction} at {content.length:,} tokens"] = told(reason)
            continue
        runners[contender.name] = attend, call
    return runners


def _forward(attend: Attend, content: Content) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return attend(*content.qkv)

    return call


def _both_ways(attend: Attend, content: Content) -> Call:
    leaves = [tensor.clone().requires_grad_() for tensor in content.qkv]
    grad = torch.randn(content.value.shape, generator=torch.Generator().manual_seed(0))
    return lambda: torch.autograd.grad(attend(*leaves), leaves, grad)


def _error(attend: Attend, content: Content) -> float:
    """Head by head: float64 copies of long inputs would take gigabytes."""
    rows = min(_CHECKED_ROWS, content.length)
    with torch.no_grad():
        out = attend(*content.qkv)[:, :, -rows:].double()
    largest = 0.0
    for head in range(content.heads):
        one = slice(head, head + 1)
        query, key, value = (tensor[:, one].double() for tensor in content.qkv)
        slopes = content.slopes[one].double()
        exact = alibi_attention(query[:, :, -rows:], key, value, slopes, causal=True, backend="reference")
        largest = max(largest, float((out[:, one] - exact).abs().max()))
    return largest


def _computed(name: str, content: Content) -> float | None:
    library, _, backend = name.partition(" ")
    if library != "linbias":
        return None
    with torch.no_grad():
        aux = alibi_attention(*content.qkv, content.slopes, causal=True, backend=backend, return_aux=True)[1]
    return float(aux.computed.sum()) / (content.heads * content.length * (content.length + 1) / 2)
