# SPDX-License-Identifier: Apache-2.0
"""Whole models, patched against unpatched, in one run: ``python -m benchmarks.models [--quick] ...``.

Models have 2 layers of width 1,024 with 16 heads, a vocabulary of 1,000 and random weights as transformers draws them.
Every figure comes from a process of its own, so that its peak memory is its own too; a patched model must first agree
with the unpatched one there. With one thread, time is the process's CPU time, so that other load counts less.

- prefill: the base model over a text, no cache. "linear layers" is the time of its matrix products alone: no patch of
  attention can be faster.
- decode: tokens per second after a context, on transformers' DynamicCache and on ours. The patched model reads the
  first 1,024 tokens of it; the rest are the same keys again, which is fair as keys know no positions.
- training: one step of the language model, forward and backward.
- streaming (--stream 50000): tokens per second and memory along one endless generation with a window and sinks, with
  models of width 256, whose weights take little of a step.

The unpatched models need memory for several n x n tensors; a figure that would not fit in what is free is left out.
The record is written after every figure, and a run goes on from the one it finds there: --again starts anew.
`python -m benchmarks.models_page` makes tables and a picture of it.
"""

import argparse
import concurrent.futures
import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import linbias
from benchmarks.harness import carry_out, parser
from benchmarks.memory import peak_mib
from linbias.hf.cache import AlibiCache
from linbias.hf.decoder import CACHE
from linbias.hf.mask import AttentionMask
from linbias.lab.bench.race import told
from linbias.lab.bench.record import Finding, Measurement
from linbias.lab.bench.timing import now, seconds
from linbias.semantics.tokens import Tokens

HEADS, WIDTH, LAYERS, VOCABULARY = 16, 1024, 2, 1000
PATCHED, OURS = "patched", "patched, AlibiCache"
UNPATCHED = {"bloom": ["eager"], "mpt": ["eager"], "falcon": ["sdpa", "eager"]}
"""Falcon's eager path adds the bias twice, so its sdpa path is the one to compare with."""
CHECKED_TOKENS = 96
READ_TOKENS = 1024
# Peak of the unpatched models over heads * tokens^2 * 4 bytes, as measured: reading, and in training.
QUADRATIC_TENSORS = {"eager": 4.2, "falcon eager": 6.4, "sdpa": 1.4}
TRAINING_TENSORS = 8.0


# --- one figure, in a process of its own -----------------------------------------------------------------------------


def build(family: str, kind: str, head: str, tokens: int, width: int = WIDTH) -> Any:
    """A model of the family; `kind` is a row of the table."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {
        "bloom": {"hidden_size": width, "n_layer": LAYERS, "n_head": HEADS},
        "mpt": {"d_model": width, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": max(tokens, CHECKED_TOKENS)},
        "falcon": {
            "hidden_size": width,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
    }[family]
    name = {"bloom": "Bloom", "mpt": "Mpt", "falcon": "Falcon"}[family]
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **sizes)
    if kind in ("sdpa", "eager") and family == "falcon":
        config._attn_implementation = kind
    return getattr(transformers, name + head)(config).eval()


def check(model: Any, family: str) -> float:
    """Patch the model, and return the largest difference that made to a short text: rounding, or an error here."""
    ids = torch.randint(VOCABULARY, (1, CHECKED_TOKENS))

    def unrounded(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """Falcon's bias before its product with positions is rounded to bfloat16, as the patch has it."""
        slopes = linbias.alibi_slopes(heads).bfloat16().float()
        return (slopes[:, None] * (mask.cumsum(-1) - 1)[:, None]).reshape(-1, 1, mask.shape[1]).to(dtype)

    with torch.no_grad(), mock.patch("transformers.models.falcon.modeling_falcon.build_alibi_tensor", unrounded):
        before = model(ids, use_cache=False)[0]
    linbias.patch(model)
    with torch.no_grad():
        difference = float((model(ids, use_cache=False)[0] - before).abs().max() / before.abs().max())
    if difference > 1e-4:
        raise ValueError(f"the patched {family} differs by {difference:.1e}: nothing to time")
    return difference


def best(function: Callable[[], object], rounds: int = 5, enough: float = 30.0) -> float:
    """Seconds of the best of several runs; no further run once they have taken `enough` together."""
    found: list[float] = []
    while len(found) < rounds and sum(found) < enough:
        found.append(seconds(function))
    return min(found)


def peak() -> float:
    """GB this process has held at most."""
    return peak_mib() * 2**20 / 1e9


def linear_layers(model: Any, tokens: int) -> float:
    """Seconds of the model's matrix products alone, each on rows that are already there."""
    total = 0.0
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            rows = torch.randn(tokens, part.in_features)
            total += best(lambda part=part, rows=rows: torch.nn.functional.linear(rows, part.weight, part.bias))
    return total


def prefill(family: str, kind: str, tokens: int) -> dict[str, float]:
    model = build(family, kind, "Model", tokens)
    found = {"difference": check(model, family)} if kind == PATCHED else {}
    ids = torch.randint(VOCABULARY, (1, tokens))
    with torch.no_grad():
        model(ids[:, :64], use_cache=False)
        found["seconds"] = best(lambda: model(ids, use_cache=False))
        found["gigabytes"] = peak()
        if kind == PATCHED:
            found["linear_seconds"] = linear_layers(model, tokens)
    return found


def read(model: Any, kind: str, tokens: int) -> Any:
    """A cache of that many tokens. Keys know no positions, so a longer text repeats those of one that was read."""
    import transformers

    once, cache = transformers.DynamicCache(config=model.config), transformers.DynamicCache(config=model.config)
    model(torch.randint(VOCABULARY, (1, min(tokens, READ_TOKENS))), use_cache=True, **{CACHE: once})
    if kind == OURS:
        cache = AlibiCache()
    for number, layer in enumerate(once.layers):
        key, value = (
            part.repeat(1, 1, -(-tokens // READ_TOKENS), 1)[:, :, :tokens] for part in (layer.keys, layer.values)
        )
        if kind == OURS:
            new = Tokens(tokens, 0, key.device)
            cache.layer(number).append(key, value, AttentionMask(torch.empty(0), new, new, causal=True))
        else:
            cache.update(key, value, number)
    return cache


def decode(family: str, kind: str, tokens: int, steps: int = 32) -> dict[str, float]:
    model = build(family, kind, "ForCausalLM", tokens + 4 * steps)
    found = {"difference": check(model, family)} if kind in (PATCHED, OURS) else {}
    if not found:
        linbias.patch(model)
    ids = torch.randint(VOCABULARY, (1, 1))
    with torch.no_grad():
        cache = read(model, kind, tokens)
        if kind not in (PATCHED, OURS):
            linbias.unpatch(model)

        def run() -> None:
            for _ in range(steps):
                model(ids, use_cache=True, **{CACHE: cache})

        run()
        found["tokens_per_second"] = steps / best(run, 3)
    return found


def train(family: str, kind: str, tokens: int) -> dict[str, float]:
    model = build(family, kind, "ForCausalLM", tokens)
    found = {"difference": check(model, family)} if kind == PATCHED else {}
    model.train()
    ids = torch.randint(VOCABULARY, (1, tokens))

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    found["seconds"] = best(step)
    found["gigabytes"] = peak()
    return found


def stream(family: str, kind: str, tokens: int) -> dict[str, Any]:
    """Through `generate`, ten pieces; memory is what is held after each, not the peak."""
    model = build(family, kind, "ForCausalLM", 64, width=256)
    linbias.patch(model)
    cache = AlibiCache(window=(1023, 0), sinks=4)
    ids = torch.randint(3, VOCABULARY, (1, 16))
    end = model.config.eos_token_id  # MPT's configuration names none
    speeds, held = [], []
    for piece in range(10):
        start, before = now(), ids.shape[1]
        ids = model.generate(
            ids,
            **{CACHE: cache},
            attention_mask=torch.ones_like(ids),
            max_length=16 + tokens * (piece + 1) // 10,
            do_sample=False,
            use_cache=True,
            suppress_tokens=None if end is None else [end],
            pad_token_id=0,
        )
        if (seen := cache.get_seq_length()) != ids.shape[1] - 1:
            raise ValueError(f"the cache has seen {seen} tokens of {ids.shape[1] - 1}: nothing to time")
        speeds.append((ids.shape[1] - before) / (now() - start))
        with open("/proc/self/statm") as pages:
            held.append(int(pages.read().split()[1]) * resource.getpagesize() / 1e9)
    return {"text_tokens": ids.shape[1], "tokens_per_second": speeds, "gigabytes": held}


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "prefill": prefill,
    "decode": decode,
    "train": train,
    "stream": stream,
}


# --- the run ---------------------------------------------------------------------------------------------------------


def measured(work: str, family: str, kind: str, tokens: int, threads: int) -> list[Finding]:
    """One row of a table; where it failed, why."""
    found = apart(work, family, kind, tokens, threads)
    return [{"work": work, "family": family, "kind": kind, "tokens": tokens, **found}]


def apart(work: str, family: str, kind: str, tokens: int, threads: int) -> dict[str, Any]:
    """One figure from a process of its own, which starts with the imports done; where it failed, why."""
    needed = 0.0
    if kind not in (PATCHED, OURS):
        reading = QUADRATIC_TENSORS.get(f"{family} {kind}", QUADRATIC_TENSORS.get(kind, 0.0))
        needed = {"prefill": reading, "train": TRAINING_TENSORS}.get(work, 0.0) * HEADS * tokens**2 * 4
    if needed > 0.8 * free_bytes():
        return gap(f"needs about {needed / 1e9:.0f} GB, {free_bytes() / 1e9:.0f} GB are free")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "linbias", *(f"linbias.hf.{name}" for name in UNPATCHED)])
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as alone:
        try:
            return alone.submit(one, work, family, kind, tokens, threads).result()
        except BrokenProcessPool:
            return gap("the process was ended, as the system does where memory runs out")
        except Exception as error:
            return gap(told(error))


def gap(why: str) -> dict[str, Any]:
    return {"not_run": "this row", "why": why}


def one(work: str, family: str, kind: str, tokens: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return WORK[work](family, kind, tokens)


def free_bytes() -> int:
    """What a new process could take."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def rows_of(work: str, family: str) -> list[str]:
    ours = {"decode": [PATCHED, OURS], "stream": [OURS]}.get(work, [PATCHED])
    return ours if work == "stream" else [*ours, *UNPATCHED[family]]


def gist(findings: list[Finding]) -> str:
    (found,) = findings
    if "not_run" in found:
        return f"not run: {found['why']}"
    cells: list[str] = []
    for name, unit in (("seconds", "s"), ("gigabytes", "GB"), ("tokens_per_second", "tokens/s")):
        values = found.get(name, [])
        values = values if isinstance(values, list) else [values]
        cells += [" ".join(f"{value:.2f}" for value in values) + f" {unit}"] if values else []
    if "linear_seconds" in found:
        cells.append(f"(linear layers {found['linear_seconds']:.2f} s)")
    return ", ".join(cells)


def plan(options: argparse.Namespace) -> list[Measurement]:
    return [
        # How slow the unpatched rows are nobody knows beforehand: the cost tells little more than their number.
        Measurement(
            f"{work} {family}, {kind}, {tokens:,}",
            10 + tokens / 1000,
            partial(measured, work, family, kind, tokens, options.threads),
        )
        for work in WORK
        for family in options.families
        for tokens in getattr(options, work)
        for kind in rows_of(work, family)
        if kind in (options.kinds or [kind])
    ]


def parse() -> argparse.Namespace:
    told = parser(__doc__, "models.json")
    told.add_argument("--families", nargs="+", default=list(UNPATCHED), choices=list(UNPATCHED))
    told.add_argument("--kinds", nargs="*", help="rows; default all: 'patched', 'patched, AlibiCache', eager, sdpa")
    told.add_argument("--prefill", type=int, nargs="*", help="lengths; default 1024 4096 8192 16384")
    told.add_argument("--decode", type=int, nargs="*", help="contexts; default 1024 8192 32768")
    told.add_argument("--train", type=int, nargs="*", help="lengths of a training step; default 2048")
    told.add_argument("--stream", type=int, nargs="*", default=[], help="endless generation, e.g. 50000; default none")
    options = told.parse_args()
    defaults = {"prefill": [1024, 4096, 8192, 16384], "decode": [1024, 8192, 32768], "train": [2048]}
    quick = {"prefill": [512, 1024], "decode": [1024], "train": [512]}
    for name, value in (quick if options.quick else defaults).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    options = parse()
    carry_out("models", lambda record: plan(options), options, gist)


if __name__ == "__main__":
    main()
