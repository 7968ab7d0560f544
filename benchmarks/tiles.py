# SPDX-License-Identifier: Apache-2.0
"""How close the ledgers come to the fewest tiles possible: ``python -m benchmarks.tiles [--steps 150] [--symmetric]``.

For each strip of 64 rows and block of 64 keys, at the default tolerance, causal or as an encoder sees. "fewest" knows
the true weights, in float64: for each row alone it skips the smallest blocks that fit the tolerance, and a strip visits
what the row that needs the most visits, which no ledger can undercut. "exact ledger" judges strips as ours does, but by
true weights.

Inputs: standard normal (12 heads of 64), the same with a sink (the first key 30 times as long), and the layers of a
small decoder that the lab trains here for ``--steps`` updates, on text it has not seen.
"""

import argparse

import torch
from torch import Tensor

from benchmarks.inputs import trained, with_sink
from linbias import alibi_attention_weights
from linbias.backends import tiled
from linbias.backends.tiled.pieces import Call
from linbias.lab.bench.race import Content, normal
from linbias.lab.config import ModelConfig
from linbias.prepare import prepare

TILE = 64


def shares(content: Content, causal: bool) -> tuple[float, float, float]:
    """Visited by ours, by a ledger of true weights, and fewest possible, as shares of the visible tiles."""
    problem, operands = prepare(*content.qkv, content.slopes, {"causal": causal})
    ours = tiled.visits_of(Call.of(problem, operands)).table.sum()
    blocks = -(-problem.keys // TILE)
    exact_ledger = fewest = visible = 0
    for head in range(problem.heads):
        weights = _of_head(content, head, causal)
        for first in range(0, problem.queries, TILE):
            rows = weights[first : first + TILE]
            missing = blocks * TILE - problem.keys
            rows = torch.nn.functional.pad(rows, (0, missing)).unflatten(1, (blocks, TILE)).sum(-1)
            reachable = first // TILE + 1 if causal else blocks
            visible += reachable
            tolerance = problem.options.tolerance
            alone = (rows[:, :reachable].sort(1).values.cumsum(1) <= tolerance).sum(1)
            fewest += reachable - int(alone.min())
            together = rows[:, :reachable].amax(0).argsort()
            fits = (rows[:, together].cumsum(1) <= tolerance).all(0).sum()
            exact_ledger += reachable - int(fits)
    return float(ours) / visible, exact_ledger / visible, fewest / visible


def _of_head(content: Content, head: int, causal: bool) -> Tensor:
    """(T, S) float64 weights of one head: all heads at once would not fit."""
    one = slice(head, head + 1)
    query, key = content.query[:, one].double(), content.key[:, one].double()
    return alibi_attention_weights(query, key, content.slopes[one].double(), causal=causal)[0, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--steps", type=int, default=150, help="updates of the trained decoder; 0 leaves it out")
    parser.add_argument("--symmetric", action="store_true", help="both sides are visible; the decoder is left out")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("share of the visible 64 x 64 tiles that are visited")
    print(f"{'inputs':34}{'ours':>8}{'exact ledger':>14}{'fewest':>8}{'ours / fewest':>15}")
    for length in options.lengths:
        inputs = [normal(length), with_sink(length)]
        if options.steps and not options.symmetric and length == options.lengths[-1]:
            inputs += trained(ModelConfig(layers=3), options.steps, length)
        for content in inputs:
            ours, exact, fewest = shares(content, causal=not options.symmetric)
            print(
                f"{f'{content.name}, {length}':34}{ours:8.3f}{exact:14.3f}{fewest:8.3f}{ours / fewest:15.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
