# SPDX-License-Identifier: Apache-2.0
"""A step of a cache in pages beside one of a cache in a stretch: ``python -m benchmarks.paged [--pages 64 16 8]``.

4 sequences, 16 heads of 64, float32: one token is appended to each and attends to all that is kept. CPU time of one
thread, the caches in turns; a ratio is the median over the rounds of paged / unpaged, and its interval covers that
median with 95 %. "flat": slopes of 0, where every key is read.
"""

import argparse
import time

import torch

from benchmarks.pairs import ratio_of_pairs
from linbias import KVCache, alibi_slopes

BATCH, HEADS, DIM = 4, 16, 64


def filled(tokens: int, page: int | None) -> KVCache:
    cache = KVCache(page_size=page)
    cache.append(*torch.randn(2, BATCH, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(tokens)))
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32_768])
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 16, 8], help="tokens a page")
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    token = torch.randn(BATCH, HEADS, 1, DIM)
    print(f"{'':<24}{'unpaged':>10}" + "".join(f"{f'pages of {page}':>26}" for page in options.pages))
    for length in options.lengths:
        caches = [filled(length, page) for page in (None, *options.pages)]
        for name, slopes in (("ALiBi", alibi_slopes(HEADS)), ("flat", torch.zeros(HEADS))):
            times: list[list[float]] = [[] for _ in caches]
            for _ in range(options.rounds + 1):
                for cache, own in zip(caches, times, strict=True):
                    start = time.process_time()
                    cache.append(token, token)
                    cache.attend(token, slopes)
                    own.append(1e3 * (time.process_time() - start))
            unpaged, *paged = (own[1:] for own in times)  # the first round only warms
            middle = sorted(unpaged)[len(unpaged) // 2]
            row = "".join(f"{ratio_of_pairs(each, unpaged)!s:>26}" for each in paged)
            print(f"{f'{length:,} tokens, {name}':<24}{middle:>7.2f} ms{row}", flush=True)


if __name__ == "__main__":
    main()
