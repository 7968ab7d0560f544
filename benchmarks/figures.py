# SPDX-License-Identifier: Apache-2.0
"""What the native kernels must reach, beside what they reach: ``python -m benchmarks.figures [--output FILE]``.

Ratios to torch's `scaled_dot_product_attention` are in benchmarks/attention.py; here are the other figures: the dense
rate against the machine's matrix product, decode against its read bandwidth, half types against fp32, two threads
against one, memory, and the overhead of a small call. Each is measured in turns with what it is divided by.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linbias import KVCache, alibi_attention, alibi_slopes
from linbias.testing import conform

from .attention import CHECKS, DIM, HEADS, in_turns, read_bandwidth

CACHED = 131_072
CACHED_HEADS = 32


@dataclass(frozen=True)
class Reached:
    """One line of the table."""

    figure: str
    reached: float
    goal: str


def normal(length: int, dim: int = DIM, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(length)
    query, key, value = (torch.randn(1, HEADS, length, dim).to(dtype) for _ in range(3))
    return query, key, value


def dense_rate(dim: int, goal: str) -> Reached:
    """Two products of every pair, over the rate of a 1024^3 product."""
    length = 2048
    inputs, flat = normal(length, dim), torch.zeros(HEADS)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = in_turns(
        {
            "attention": lambda: alibi_attention(*inputs, flat, causal=False, backend="native"),
            "product": lambda: left @ right,
        },
        7,
    )
    rate = 4 * HEADS * length**2 * dim / times["attention"] / (2 * 1024**3 / times["product"])
    return Reached(f"dense rate over SGEMM, D={dim}, N={length}", rate, goal)


def dense_training() -> Reached:
    inputs, flat = normal(2048), torch.zeros(HEADS)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    grad = torch.randn_like(inputs[0])
    times = in_turns(
        {
            "ours": lambda: torch.autograd.grad(
                alibi_attention(*leaves, flat, causal=False, backend="native"), leaves, grad
            ),
            "SDPA": lambda: torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, grad),
        },
        3,
    )
    return Reached("forward + backward, dense, SDPA's time over ours, N=2048", times["SDPA"] / times["ours"], ">= 1.3")


def half_types() -> Iterator[Reached]:
    slopes = alibi_slopes(HEADS)
    calls = {
        str(dtype).removeprefix("torch."): normal(4096, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    times = in_turns(
        {name: lambda t=t: alibi_attention(*t, slopes, causal=True, backend="native") for name, t in calls.items()}, 5
    )
    for name in ("bfloat16", "float16"):
        yield Reached(f"{name}: time over fp32's, N=4096", times[name] / times["float32"], "<= 1.1")


def decode() -> Iterator[Reached]:
    """One token against a long cache: flat heads read all of it, ALiBi's heads what they can see."""
    torch.manual_seed(0)
    cache = KVCache()
    cache.append(*(torch.randn(1, CACHED_HEADS, CACHED, DIM) for _ in range(2)))
    query = torch.randn(1, CACHED_HEADS, 1, DIM)
    key, value, _ = cache._opened().read(CACHED)
    flat, slopes = torch.zeros(CACHED_HEADS), alibi_slopes(CACHED_HEADS)
    times = in_turns(
        {
            "flat": lambda: cache.attend(query, flat, backend="native"),
            "alibi": lambda: cache.attend(query, slopes, backend="native"),
            "SDPA": lambda: scaled_dot_product_attention(query, key, value),
        },
        5,
    )
    bandwidth = cache.nbytes / times["flat"] / 1e9 / read_bandwidth()
    yield Reached(f"decode, all keys visible: bytes read a second over torch.sum's, S={CACHED}", bandwidth, ">= 0.8")
    yield Reached(f"decode, ALiBi: SDPA's time over ours, S={CACHED}", times["SDPA"] / times["alibi"], ">= 40")


def overhead() -> Reached:
    query = torch.randn(1, 8, 16, DIM)
    slopes = alibi_slopes(8)

    def many(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(200)]

    times = in_turns(
        {
            "ours": many(lambda: alibi_attention(query, query, query, slopes, causal=True)),
            "SDPA": many(lambda: scaled_dot_product_attention(query, query, query, is_causal=True)),
        },
        9,
    )
    return Reached("a call with T=S=16, H=8: time over SDPA's", times["ours"] / times["SDPA"], "<= 3")


def threads() -> Iterator[Reached]:
    """Wall time, so it means something only on an idle machine."""
    inputs, slopes = normal(8192), alibi_slopes(HEADS)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    grad = torch.randn_like(inputs[0])
    calls = {
        "forward": lambda: alibi_attention(*inputs, slopes, causal=True, backend="native"),
        "forward + backward": lambda: torch.autograd.grad(
            alibi_attention(*leaves, slopes, causal=True, backend="native"), leaves, grad
        ),
    }
    before = torch.get_num_threads()
    times: dict[tuple[str, int], float] = {}
    for count in (2, 1):
        torch.set_num_threads(count)
        # Wall time of both: process time would add the threads up.
        times |= {(name, count): _wall(call) for name, call in calls.items()}
    torch.set_num_threads(before)
    for name in calls:
        yield Reached(f"two threads over one, {name}, N=8192", times[name, 1] / times[name, 2], ">= 1.85")


def _wall(call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


MEMORY = """
import resource, sys, torch
torch.set_num_threads(1)
from linbias import alibi_attention, alibi_slopes
batch, heads, length, dim = map(int, sys.argv[1:])
def call(batch, length):
    leaves = [torch.ones(batch, heads, length, dim, requires_grad=True) for _ in range(3)]
    slopes, grad = alibi_slopes(heads), torch.ones(batch, heads, length, dim)
    # What the call must hold: output, lse and its bound, the gradients.
    needed = 4 * leaves[0].nbytes + 2 * leaves[0].nbytes // dim
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = alibi_attention(*leaves, slopes, causal=True, backend="native")
    torch.autograd.grad(out, leaves, grad)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 - needed / 2**20
call(1, 64)
print(call(batch, length))
"""


def memory() -> Iterator[Reached]:
    for batch in (1, 2):
        arguments = [sys.executable, "-c", MEMORY, str(batch), "32", "8192", str(DIM)]
        grown = float(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
        what = f"MiB beyond inputs, outputs and gradients, forward + backward, H=32, N=8192, B={batch}"
        yield Reached(what, grown, "< 64")


def table() -> Iterator[Reached]:
    with torch.no_grad():
        yield dense_rate(64, ">= 0.93")
        yield dense_rate(128, ">= 0.97")
        yield from half_types()
        yield overhead()
        yield from decode()
    yield dense_training()
    yield from threads()
    yield from memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/figures.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CHECKS:
        conform(case, "native")
    found: list[Reached] = []
    print(f"{'figure':88}{'reached':>9}  goal")
    for line in table():
        found.append(line)
        print(f"{line.figure:88}{line.reached:9.2f}  {line.goal}", flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        part = options.output.with_suffix(".part")
        part.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
        part.replace(options.output)


if __name__ == "__main__":
    main()
