# SPDX-License-Identifier: Apache-2.0
"""What the native kernels must reach besides ratios to peers, each in turns with what it is divided by."""

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import figure, ratio_figure
from benchmarks.inputs import rounded
from linbias import KVCache, alibi_attention, alibi_slopes
from linbias.lab.bench.race import DIM, HEADS, Content, both_call, forward_call, normal
from linbias.lab.bench.record import Finding
from linbias.lab.bench.timing import in_turns

_CACHED, _CACHED_HEADS = 131_072, 32
_CALLS = 200
"""Small calls are timed by the many: one takes less than a clock resolves well."""


def _ours(slopes: Tensor, causal: bool = True) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda query, key, value: alibi_attention(query, key, value, slopes, causal=causal, backend="native")


def _noise(heads: int, length: int) -> Tensor:
    return torch.randn(1, heads, length, DIM, generator=torch.Generator().manual_seed(heads + length))


def dense_rate(dim: int, goal: float) -> list[Finding]:
    """Two products of every pair, over the rate of a 1024^3 product."""
    length = 2048
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    dense = forward_call(_ours(torch.zeros(HEADS), causal=False), normal(length, dim=dim))
    times = in_turns({"attention": dense, "product": lambda: left @ right}, 9)
    work = 4 * HEADS * length**2 * dim / (2 * 1024**3)
    name = f"dense rate over SGEMM's, D={dim}, N={length:,}"
    return [ratio_figure(name, times["product"], times["attention"], ">=", goal, factor=work)]


def dense_training() -> list[Finding]:
    """Forward and backward where nothing can be skipped."""
    content = normal(2048)
    ours = both_call(_ours(torch.zeros(HEADS), causal=False), content)
    times = in_turns({"ours": ours, "peer": both_call(scaled_dot_product_attention, content)}, 5)
    name = "forward + backward, dense: SDPA's time over ours, N=2,048"
    return [ratio_figure(name, times["peer"], times["ours"], ">=", 1.3)]


def half_types() -> list[Finding]:
    """The same call in half types and in float32."""
    content = normal(4096)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    times = in_turns(
        {name: forward_call(_ours(content.slopes), rounded(content, dtype)) for name, dtype in dtypes.items()}, 7
    )
    return [
        ratio_figure(f"{name}: time over fp32's, N=4,096", times[name], times["fp32"], "<=", 1.1)
        for name in ("bf16", "fp16")
    ]


def decode() -> list[Finding]:
    """One token against a long cache: flat heads read all of it, ALiBi's heads what they can see."""
    query, key, value = _noise(_CACHED_HEADS, 1), _noise(_CACHED_HEADS, _CACHED), _noise(_CACHED_HEADS, _CACHED)
    cache, data = KVCache(), torch.ones(2**26)
    cache.append(key, value)
    flat, slopes = torch.zeros(_CACHED_HEADS), alibi_slopes(_CACHED_HEADS)
    with torch.no_grad():
        times = in_turns(
            {
                "flat": lambda: cache.attend(query, flat, backend="native"),
                "alibi": lambda: cache.attend(query, slopes, backend="native"),
                "peer": lambda: scaled_dot_product_attention(query, key, value),
                "sum": data.sum,
            },
            7,
        )
    of = f"{_CACHED_HEADS} heads, S={_CACHED:,}"
    read = (key.nbytes + value.nbytes) / data.nbytes
    reading = f"decode, all visible: bytes read over torch.sum's, {of}"
    return [
        ratio_figure(reading, times["sum"], times["flat"], ">=", 0.8, factor=read),
        ratio_figure(f"decode, ALiBi: SDPA's time over ours, {of}", times["peer"], times["alibi"], ">=", 40),
    ]


def overhead() -> list[Finding]:
    """The whole public call where there is almost nothing to compute."""
    content, slopes = _noise(8, 16), alibi_slopes(8)
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: alibi_attention(content, content, content, slopes, causal=True),
        "peer": lambda: scaled_dot_product_attention(content, content, content, is_causal=True),
    }
    with torch.no_grad():
        times = in_turns({name: partial(_many, call) for name, call in calls.items()}, 15)
    return [ratio_figure("one small call, T=S=16, H=8: time over SDPA's", times["ours"], times["peer"], "<=", 2)]


def _many(call: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        call()


def cache_step() -> list[Finding]:
    """A token appended to a short cache and attended from it: what surrounds the kernel."""
    token, slopes, cache = _noise(8, 1), alibi_slopes(8), KVCache()
    cache.append(_noise(8, 128), _noise(8, 128))

    def steps() -> None:
        for _ in range(_CALLS // 4):
            cache.append(token, token)
            cache.attend(token, slopes)
        cache.crop(128)

    with torch.no_grad():
        times = in_turns({"steps": steps}, 15)["steps"]
    return [figure("a KVCache step after 128 tokens, H=8: microseconds", min(times) / (_CALLS // 4) * 1e6, "<=", 50)]


def threads() -> list[Finding]:
    """Two threads against one on the wall, which means something only on a machine that is otherwise idle."""
    before = torch.get_num_threads()
    content: Content = normal(8192)
    ours = _ours(content.slopes)
    calls = {"forward": forward_call(ours, content), "forward + backward": both_call(ours, content)}
    found: list[Finding] = []
    try:
        for name, call in calls.items():
            times = in_turns({str(count): partial(_on, count, call) for count in (1, 2)}, 5, clock=_wall_seconds)
            found.append(ratio_figure(f"two threads over one, {name}, N=8,192", times["1"], times["2"], ">=", 1.85))
    finally:
        torch.set_num_threads(before)
    return found


def _on(count: int, call: Callable[[], object]) -> None:
    torch.set_num_threads(count)
    call()


def _wall_seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start
