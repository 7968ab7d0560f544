# SPDX-License-Identifier: Apache-2.0
"""Implementations of causal attention against torch's without a bias, on the same inputs, in turns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ... import alibi_attention, alibi_slopes
from .record import Finding, Record
from .timing import best_in_turns

Direction = Literal["forward", "forward + backward"]
FORWARD, BOTH = "forward", "forward + backward"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, DIM = 12, 64
_CHECKED_ROWS = 64


@dataclass(frozen=True)
class Content:
    """Inputs of one causal attention: query, key and value (1, H, N, D), slopes (H,)."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor

    @property
    def heads(self) -> int:
        """H."""
        return self.query.shape[1]

    @property
    def length(self) -> int:
        """N."""
        return self.query.shape[2]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


def normal(length: int, *, dim: int = DIM) -> Content:
    """Return standard normal inputs, the same for the same arguments."""
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(1, HEADS, length, dim, generator=generator) for _ in range(3))
    return Content("normal", query, key, value, alibi_slopes(HEADS))


@dataclass(frozen=True)
class Contender:
    """One implementation; `prepare` makes what depends on length and slopes alone, which is not timed."""

    name: str
    prepare: Callable[[Content], Attend]
    longest: int
    """Beyond this length it is left out, because it would take minutes or more memory than machines have."""
    backward: bool = True

    @staticmethod
    def of_linbias(backend: str) -> "Contender":
        """The library's backend of that name."""
        return Contender(f"linbias {backend}", lambda content: _linbias(backend, content), _LONGEST[backend])


def _linbias(backend: str, content: Content) -> Attend:
    return lambda query, key, value: alibi_attention(query, key, value, content.slopes, causal=True, backend=backend)


_LONGEST = {"native": 2**20, "tiled": 2**14, "reference": 2**12}
PLAIN = Contender(
    "SDPA, no bias",
    lambda _: lambda query, key, value: scaled_dot_product_attention(query, key, value, is_causal=True),
    2**14,
)
"""Causal attention without any bias: what every ratio is taken to."""


def race(
    content: Content, contenders: Iterable[Contender], direction: Direction, rounds: int, record: Record
) -> list[Finding]:
    """Time each contender that can take this length, and the baseline, one way or both.

    A finding tells implementation, inputs, direction, length, seconds, baseline_seconds, and ratio: the baseline's time
    over this one's, above 1 is faster. Where the baseline is not run, its time at the longest length in `record`, grown
    with the square of the length, stands in (baseline_estimated). Forward it tells error, the largest difference from
    float64 over the last rows, which see most keys, and for linbias computed, the share of the visible pairs.
    """
    findings: list[Finding] = []
    runners = _ready([PLAIN, *contenders], content, direction, findings)
    times = best_in_turns({name: call for name, (_, call) in runners.items()}, rounds)
    baseline = times.pop(PLAIN.name, None)
    estimated = baseline is None
    if estimated:
        baseline = _estimate(record, direction, content)
    for name, taken in times.items():
        finding: Finding = {
            "implementation": name,
            "inputs": content.name,
            "direction": direction,
            "length": content.length,
            "seconds": taken,
            "baseline_seconds": baseline,
            "baseline_estimated": estimated and baseline is not None,
            "ratio": None if baseline is None else baseline / taken,
        }
        if direction == FORWARD:
            finding |= {"error": _error(runners[name][0], content), "computed": _computed(name, content)}
        findings.append(finding)
    return findings


def _estimate(record: Record, direction: Direction, content: Content) -> float | None:
    known = [
        (finding["length"], finding["baseline_seconds"])
        for finding in record.having("baseline_seconds")
        if (finding["direction"], finding["inputs"], finding["baseline_estimated"]) == (direction, content.name, False)
        and finding["baseline_seconds"] is not None
    ]
    if not known:
        return None
    length, taken = max(known)
    return taken * (content.length / length) ** 2


def told(reason: Exception) -> str:
    """Return the kind and the first line of an exception."""
    return f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}"


def _ready(
    contenders: list[Contender], content: Content, direction: Direction, findings: list[Finding]
) -> dict[str, tuple[Attend, Callable[[], object]]]:
    """Those that can run here, each run once: the attention, and the call to time."""
    runners: dict[str, tuple[Attend, Callable[[], object]]] = {}
    for contender in contenders:
        if content.length > contender.longest:
            beyond = f"{contender.name} beyond {contender.longest:,} tokens"
            why = "left out, it would take minutes or more memory than most machines have"
            findings.append({"not_run": beyond, "why": why})
            continue
        if direction == BOTH and not contender.backward:
            findings.append({"not_run": f"{contender.name}, backward", "why": "torch has none on CPU"})
            continue
        try:
            attend = contender.prepare(content)
            call = forward_call(attend, content) if direction == FORWARD else both_call(attend, content)
            call()
        except Exception as reason:  # a peer may fail in any way; the record says how
            what = f"{contender.name}, {direction} at {content.length:,} tokens"
            findings.append({"not_run": what, "why": told(reason)})
            continue
        runners[contender.name] = attend, call
    return runners


def forward_call(attend: Attend, content: Content) -> Callable[[], object]:
    """Return what runs a forward, without gradients."""

    def call() -> Tensor:
        with torch.no_grad():
            return attend(*content.qkv)

    return call


def both_call(attend: Attend, content: Content) -> Callable[[], object]:
    """Return what runs a forward and its backward."""
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
