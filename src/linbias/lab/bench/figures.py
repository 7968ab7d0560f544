# SPDX-License-Identifier: Apache-2.0
"""What the native kernels must reach besides ratios to peers, each in turns with what it is divided by."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...attention import alibi_attention
from ...cache import KVCache
from ...semantics.slopes import alibi_slopes
from .inputs import DIM, HEADS, Content, normal
from .record import Figure, Found
from .timing import Call, in_turns, read_bandwidth, wall_seconds

_CACHED, _CACHED_HEADS = 131_072, 32
_CALLS = 200
"""Small calls are timed by the many: one takes less than a clock resolves well."""


def _attend(content: Content, slopes: Tensor, causal: bool) -> Call:
    return lambda: alibi_attention(*content.qkv, slopes, causal=causal, backend="native")


def dense_rate(dim: int, goal: float) -> Found:
    """Two products of every pair, over the rate of a 1024^3 product."""
    length = 2048
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    with torch.no_grad():
        dense = _attend(normal(length, dim=dim), torch.zeros(HEADS), causal=False)
        times = in_turns({"attention": dense, "product": lambda: left @ right}, 9)
    rate = 4 * HEADS * length**2 * dim / times["attention"] / (2 * 1024**3 / times["product"])
    name = f"dense rate over SGEMM's, D={dim}, N={length:,}"
    return Found(figures=[Figure(name=name, reached=rate, relation=">=", goal=goal)])


def dense_training() -> Found:
    """Forward and backward where nothing can be skipped."""
    content, flat = normal(2048), torch.zeros(HEADS)
    leaves = [tensor.requires_grad_() for tensor in content.qkv]
    grad = torch.randn_like(content.value)

    def both(attend: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(attend(), leaves, grad)

    ours = both(lambda: alibi_attention(*content.qkv, flat, causal=False, backend="native"))
    peer = both(lambda: scaled_dot_product_attention(*content.qkv))
    times = in_turns({"ours": ours, "peer": peer}, 5)
    name = "forward + backward, dense: SDPA's time over ours, N=2,048"
    return Found(figures=[Figure(name=name, reached=times["peer"] / times["ours"], relation=">=", goal=1.3)])


def half_types() -> Found:
    """The same call in half types and in float32."""
    slopes = alibi_slopes(HEADS)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    with torch.no_grad():
        calls = {name: _attend(normal(4096, dtype=dtype), slopes, causal=True) for name, dtype in dtypes.items()}
        times = in_turns(calls, 7)
    return Found(
        figures=[
            Figure(
                name=f"{name}: time over fp32's, N=4,096", reached=times[name] / times["fp32"], relation="<=", goal=1.1
            )
            for name in ("bf16", "fp16")
        ]
    )


def decode() -> Found:
    """One token against a long cache: flat heads read all of it, ALiBi's heads what they can see."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, _CACHED_HEADS, _CACHED, DIM, generator=generator) for _ in range(2))
    query = torch.randn(1, _CACHED_HEADS, 1, DIM, generator=generator)
    cache = KVCache()
    cache.append(key, value)
    flat, slopes = torch.zeros(_CACHED_HEADS), alibi_slopes(_CACHED_HEADS)
    with torch.no_grad():
        times = in_turns(
            {
                "flat": lambda: cache.attend(query, flat, backend="native"),
                "alibi": lambda: cache.attend(query, slopes, backend="native"),
                "peer": lambda: scaled_dot_product_attention(query, key, value),
            },
            7,
        )
    read = (key.nbytes + value.nbytes) / times["flat"] / 1e9 / read_bandwidth()
    gain = times["peer"] / times["alibi"]
    of = f"{_CACHED_HEADS} heads, S={_CACHED:,}"
    return Found(
        figures=[
            Figure(
                name=f"decode, all visible: bytes read over torch.sum's, {of}", reached=read, relation=">=", goal=0.8
            ),
            Figure(name=f"decode, ALiBi: SDPA's time over ours, {of}", reached=gain, relation=">=", goal=40),
        ]
    )


def overhead() -> Found:
    """The whole public call where there is almost nothing to compute."""
    query = torch.randn(1, 8, 16, DIM, generator=torch.Generator().manual_seed(0))
    slopes = alibi_slopes(8)

    def many(call: Call) -> Call:
        return lambda: [call() for _ in range(_CALLS)]

    with torch.no_grad():
        times = in_turns(
            {
                "ours": many(lambda: alibi_attention(query, query, query, slopes, causal=True)),
                "peer": many(lambda: scaled_dot_product_attention(query, query, query, is_causal=True)),
            },
            15,
        )
    name = "one small call, T=S=16, H=8: time over SDPA's"
    return Found(figures=[Figure(name=name, reached=times["ours"] / times["peer"], relation="<=", goal=3)])


def threads() -> Found:
    """Two threads against one on the wall, which means something only on a machine that is otherwise idle."""
    before = torch.get_num_threads()
    content, slopes = normal(8192), alibi_slopes(HEADS)
    query, key, value = leaves = tuple(tensor.clone().requires_grad_() for tensor in content.qkv)
    grad = torch.randn(content.value.shape, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], object]] = {
        "forward": _attend(content, slopes, causal=True),
        "forward + backward": lambda: torch.autograd.grad(
            alibi_attention(query, key, value, slopes, causal=True, backend="native"), leaves, grad
        ),
    }

    def on(count: int, call: Call) -> None:
        torch.set_num_threads(count)
        call()

    figures: list[Figure] = []
    for name, call in calls.items():
        turns = {str(count): partial(on, count, call) for count in (1, 2)}
        times = in_turns(turns, 5, clock=wall_seconds)
        label = f"two threads over one, {name}, N=8,192"
        figures.append(Figure(name=label, reached=times["1"] / times["2"], relation=">=", goal=1.85))
    torch.set_num_threads(before)
    return Found(figures=figures)
