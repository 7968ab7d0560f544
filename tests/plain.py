# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases written as loops over single pairs, in Python and numpy float64.

It takes what the user passes and shares no line with linbias, so that the reference backend has something to answer to.
"""

import math
from typing import Any

import numpy as np
import torch

from linbias.testing import Inputs

_WORD = 0xFFFFFFFF


def attend(inputs: Inputs) -> dict[str, np.ndarray]:
    """Output, lse and gradients of one call, by the names that `linbias.testing.evaluate` uses."""
    query, key, value, grad_out, grad_lse = (
        tensor.double().numpy() for tensor in (inputs.query, inputs.key, inputs.value, inputs.grad_out, inputs.grad_lse)
    )
    (batch, heads, queries, _), (_, kv_heads, keys, width) = query.shape, value.shape
    pairs = Pairs(inputs)
    found = {
        "out": np.zeros((batch, heads, queries, width)),
        "lse": np.full((batch, heads, queries), -math.inf),
        "grad_query": np.zeros(query.shape),
        "grad_key": np.zeros(key.shape),
        "grad_value": np.zeros(value.shape),
        "grad_slopes": np.zeros((batch, heads)),
        "grad_future_slopes": np.zeros((batch, heads)),
    }
    for b, h, i in np.ndindex(batch, heads, queries):
        g = h // (heads // kv_heads)
        row = [(j, *pairs.bias(b, h, i, j)) for j in range(keys) if pairs.visible(b, h, i, j)]
        row = [(j, slope * distance if distance else 0.0, distance, later) for j, slope, distance, later in row]
        row = [pair for pair in row if pair[1] != math.inf]
        if not row:
            continue
        one = Row(
            query=query[b, h, i],
            keys=key[b, g, [pair[0] for pair in row]],
            values=value[b, g, [pair[0] for pair in row]],
            bias=np.array([pair[1] for pair in row]),
            kept=np.array([pairs.kept(b, h, i, pair[0]) for pair in row]),
            options=inputs.options,
        )
        found["out"][b, h, i], found["lse"][b, h, i] = one.out, one.lse
        scores, content, values = one.gradients(grad_out[b, h, i], grad_lse[b, h, i])
        found["grad_query"][b, h, i] = content @ one.keys
        for (j, _, distance, later), score, product, weight in zip(row, scores, content, values, strict=True):
            found["grad_key"][b, g, j] += product * query[b, h, i]
            found["grad_value"][b, g, j] += weight * grad_out[b, h, i]
            side = "grad_future_slopes" if later and inputs.future_slopes is not None else "grad_slopes"
            found[side][b, h] -= distance * score
    for name in ("slopes", "future_slopes"):
        given = getattr(inputs, name)
        summed = torch.from_numpy(found.pop(f"grad_{name}"))
        if given is not None:
            found[f"grad_{name}"] = summed.sum_to_size(given.shape).numpy()
    return found


class Row:
    """One query and the keys it sees."""

    def __init__(self, *, query, keys, values, bias, kept, options) -> None:
        self.query, self.keys, self.values = query, keys, values
        self.scale = 1 / math.sqrt(len(query)) if options["scale"] is None else options["scale"]
        self.cap, self.share = options["softcap"], kept / (1 - options["dropout_p"])
        self.product = self.scale * np.array([math.fsum(query * key) for key in keys])
        content = self.product if self.cap is None else self.cap * np.tanh(self.product / self.cap)
        scores = content - bias
        self.lse = scores.max() + math.log(math.fsum(np.exp(scores - scores.max())))
        self.weights = np.exp(scores - self.lse)
        self.out = (self.weights * self.share) @ values

    def gradients(self, grad_out, grad_lse):
        """Of the scores, of the dot products, and what each value receives of grad_out."""
        grad_weights = self.share * (self.values @ grad_out)
        scores = self.weights * (grad_weights - math.fsum(self.weights * grad_weights) + grad_lse)
        inner = 1.0 if self.cap is None else 1 - np.tanh(self.product / self.cap) ** 2
        return scores, scores * inner * self.scale, self.weights * self.share


class Pairs:
    """What the options say about single pairs."""

    def __init__(self, inputs: Inputs) -> None:
        self.options, self.seed = inputs.options, inputs.seed
        self.batch, self.heads, self.queries, _ = inputs.query.shape
        self.keys = inputs.key.shape[2]
        self.slopes = inputs.slopes.double().expand(self.batch, self.heads).tolist()
        future = inputs.slopes if inputs.future_slopes is None else inputs.future_slopes
        self.future_slopes = future.double().expand(self.batch, self.heads).tolist()
        self.query_at, self.key_at = self._positions()
        self.masks = {
            "key_mask": self._rows("key_mask"),
            "query_segments": self._rows("query_segments"),
            "key_segments": self._rows("key_segments"),
            "attn_mask": self._attn_mask(),
        }
        self.ranks = [[self._rank(b, j) for j in range(self.keys)] for b in range(self.batch)]
        if self.options["dropout_p"]:
            torch.manual_seed(self.seed)
            self.drop_seed = int(torch.randint(2**63 - 1, ()))

    def _rows(self, name: str) -> list[list[Any]] | None:
        given = self.options.get(name)
        if given is None:
            return None
        return given.tolist() if given.dim() == 2 else [given.tolist()] * self.batch

    def _attn_mask(self):
        given = self.options.get("attn_mask")
        return None if given is None else given.expand(self.batch, self.heads, self.queries, self.keys).tolist()

    def _positions(self):
        flat = 1 if self.options["metric"] is None else 2
        rows = {}
        for name in ("query_positions", "key_positions"):
            given = self.options.get(name)
            rows[name] = given if given is None else given.tolist()
            if given is not None and given.dim() == flat:
                rows[name] = [rows[name]] * self.batch
        keys = rows["key_positions"] or [list(range(self.keys))] * self.batch
        late = self.keys - self.queries
        if rows["query_positions"] is not None:
            return rows["query_positions"], keys
        if rows["key_positions"] is not None:
            return [row[late:] for row in keys], keys
        return [[late + i for i in range(self.queries)]] * self.batch, keys

    def _rank(self, b: int, j: int) -> int:
        mask, segments = self.masks["key_mask"], self.masks["key_segments"]
        return sum(
            (mask is None or mask[b][other]) and (segments is None or segments[b][other] == segments[b][j])
            for other in range(j)
        )

    def visible(self, b: int, h: int, i: int, j: int) -> bool:
        masks, options = self.masks, self.options
        if masks["key_mask"] is not None and not masks["key_mask"][b][j]:
            return False
        if masks["attn_mask"] is not None and not masks["attn_mask"][b][h][i][j]:
            return False
        if masks["key_segments"] is not None and masks["query_segments"][b][i] != masks["key_segments"][b][j]:
            return False
        if options["metric"] is not None:
            return True
        back, rank = self.query_at[b][i] - self.key_at[b][j], self.ranks[b][j]
        if options["causal"] and back < 0 and rank >= options["prefix"]:
            return False
        left, right = options["window"] or (None, None)
        inside = (left is None or back <= left) and (right is None or back >= -right)
        return inside or rank < options["sinks"]

    def bias(self, b: int, h: int, i: int, j: int) -> tuple[float, float, bool]:
        """Slope, distance and whether the key is later; distance 0 for tokens without bias."""
        unbiased = self.options["unbiased"]
        if unbiased and (j < unbiased or self.keys - self.queries + i < unbiased):
            return 0.0, 0.0, False
        here, there = self.query_at[b][i], self.key_at[b][j]
        if self.options["metric"] == "euclidean":
            return self.slopes[b][h], math.dist(here, there), False
        if self.options["metric"] == "manhattan":
            return self.slopes[b][h], sum(abs(x - y) for x, y in zip(here, there, strict=True)), False
        later = there > here
        return (self.future_slopes if later else self.slopes)[b][h], abs(here - there), later

    def kept(self, b: int, h: int, i: int, j: int) -> bool:
        p = self.options["dropout_p"]
        if not p:
            return True
        key = (self.drop_seed & _WORD, self.drop_seed >> 32)
        return philox4x32((j // 4, i, h, b), key)[j % 4] >= math.floor(p * 2**32)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 on Python's integers."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ left, second & _WORD, (first >> 32) ^ d ^ right, first & _WORD
        left, right = (left + 0x9E3779B9) & _WORD, (right + 0xBB67AE85) & _WORD
    return a, b, c, d
