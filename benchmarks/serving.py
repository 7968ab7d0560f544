# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU with linbias and without: ``.venv-vllm/bin/python -m benchmarks.serving [--contexts 2048 8192 32768]``.

A random BLOOM of two layers, width 1,024 and 16 heads reads a few texts, a third of them shared, and goes on with each.
Every run is a process of its own, in turns: what the first token took, tokens a second after it, and peak memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

WHO = {"vLLM": "", "linbias": "linbias"}
WIDTH, HEADS, LAYERS, WORDS = 1024, 16, 2, 4096


def save(folder: str) -> None:
    """The model."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=WIDTH, n_head=HEADS, n_layer=LAYERS, vocab_size=WORDS)
    BloomForCausalLM(BloomConfig(**sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)


def run(folder: str, context: int, given: argparse.Namespace) -> dict[str, float]:
    """In this process: the time until the first tokens, and tokens a second after it."""
    import resource

    from vllm import LLM, SamplingParams

    torch.manual_seed(1)
    texts = [torch.randint(3, WORDS, (context,)).tolist() for _ in range(given.batch)]
    prompts: list[Any] = [{"prompt_token_ids": text} for text in texts]
    room = context + given.tokens + 64
    llm = LLM(
        model=folder, dtype=given.dtype, max_model_len=room, max_num_batched_tokens=2048, skip_tokenizer_init=True,
        enforce_eager=True, enable_prefix_caching=False, gpu_memory_utilization=0.3, block_size=64,
        num_gpu_blocks_override=given.batch * (room // 64 + 2),
    )  # fmt: skip

    def seconds(tokens: int) -> float:
        options = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - start

    llm.generate([{"prompt_token_ids": texts[0][:100]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    first, whole = seconds(1), seconds(given.tokens)
    rate = given.batch * (given.tokens - 1) / max(whole - first, 1e-9)
    return {"first": first, "rate": rate, "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def main() -> None:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print("found", json.dumps(run(given.one, given.contexts[0], given)))
        return
    print("| context | who | first tokens | tokens a second | peak memory |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        for context in given.contexts:
            found: dict[str, list[dict[str, float]]] = {who: [] for who in WHO}
            for _ in range(given.turns):
                for who in WHO:
                    found[who].append(_apart(folder, context, who))
            for who, runs in found.items():
                first, rate, most = (median(each[name] for each in runs) for name in ("first", "rate", "GB"))
                print(f"| {context:,} | {who} | {first:.2f} s | {rate:.1f} | {most:.2f} GB |", flush=True)


def _apart(folder: str, context: int, who: str) -> dict[str, float]:
    quiet = dict(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    environment = os.environ | quiet | dict(VLLM_PLUGINS=WHO[who], VLLM_ENABLE_V1_MULTIPROCESSING="0")
    command = [sys.executable, "-m", "benchmarks.serving", "--one", folder, *sys.argv[1:], "--contexts", str(context)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=root)
    return json.loads(done.stdout.partition("found ")[2].splitlines()[0])


if __name__ == "__main__":
    main()
