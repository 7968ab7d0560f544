# SPDX-License-Identifier: Apache-2.0
"""The triton backend's work and its balance, without a GPU: python -m benchmarks.gpu_paper

For causal bf16 attention with 32 heads of width 64: what the backend's own judgement visits (lengths of standard normal
vectors, weights of rows by their nearest block), how evenly 132 processors share it in the order of its schedule, and
the time no kernel can beat: its products and exponentials at the rates of the card, its bytes at the bandwidth of it.
"""

import heapq

import torch

from linbias import alibi_slopes
from linbias.backends.triton.judge import Lengths, Shares, Table, fitting
from linbias.backends.triton.launch import tiles_of
from linbias.prepare import prepare

HEADS, WIDTH, PROCESSORS = 32, 64, 132
# NVIDIA H100 SXM, from its data sheet: dense bf16 products and bytes a second; 16 exponentials a clock and processor.
PRODUCTS, BYTES, EXPONENTIALS = 989e12, 3.35e12, 16 * PROCESSORS * 1.755e9


def visits(length: int, heads: torch.Tensor) -> tuple[Table, torch.Tensor]:
    """The table of some heads, and what is visited of it."""
    empty = torch.empty(1, len(heads), length, WIDTH, dtype=torch.bfloat16)
    problem, operands = prepare(empty, empty[:, :1], empty[:, :1], heads, {"causal": True})
    table = Table.of(problem, operands, tiles_of(problem)[:2])
    norms = torch.randn(length, WIDTH).norm(dim=-1).expand(1, len(heads), length)
    blocks = torch.randn(table.near.shape[3] * table.block, WIDTH).norm(dim=-1).unflatten(0, (-1, table.block)).amax(1)
    # What the keys of the nearest block weigh: e^(1/2) each on average, less their bias.
    near = torch.exp(-heads[:, None] * torch.arange(table.block)).sum(1).log() + 0.5
    lengths = Lengths(norms, blocks[None, None])
    shares = Shares.of(table, lengths, near[None, :, None].expand(1, -1, length)).rows()
    return table, table.every() & ~fitting(shares, -1)[0]


def makespan(work: list[int]) -> int:
    """The busiest processor's work, each taking the next strip when it is free."""
    free = [0] * PROCESSORS
    for strip in sorted(work, reverse=True):
        heapq.heapreplace(free, free[0] + strip)
    return max(free)


def main() -> None:
    torch.manual_seed(0)
    print("tokens | pairs visited | busiest / mean, longest first | in order | products | exponentials | bytes")
    for length in (8192, 32768, 131072):
        work: list[int] = []
        pairs = 0
        for slope in alibi_slopes(HEADS).split(4):
            table, visited = visits(length, slope)
            counts = visited.sum(-1).flatten()
            each = table.strip // table.tiles[0]
            work += (counts * (table.block // table.tiles[1])).repeat_interleave(each).tolist()
            pairs += int(table.pairs(visited).sum())
        mean = sum(work) / PROCESSORS
        free = [0] * PROCESSORS
        for strip in work:
            heapq.heapreplace(free, free[0] + strip)
        products, exponentials = 4 * WIDTH * pairs / PRODUCTS, pairs / EXPONENTIALS
        size = HEADS * length * WIDTH * 2 * 4 / BYTES
        share = pairs / (HEADS * length * (length + 1) / 2)
        times = " | ".join(f"{1e3 * each:.3f} ms" for each in (products, exponentials, size))
        print(f"{length} | {share:.3f} | {makespan(work) / mean:.3f} | {max(free) / mean:.3f} | {times}")


if __name__ == "__main__":
    main()
