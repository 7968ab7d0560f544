# SPDX-License-Identifier: Apache-2.0
"""Small models on disk, and what they answer in vLLM and in transformers."""

import os
from pathlib import Path
from typing import Any

# Before vLLM is imported: one process, offline, and a cache that a test can fill.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
import transformers
from torch import Tensor, nn

import linbias

WORDS = 131
CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": dict(vocab_size=WORDS, hidden_size=192, n_layer=2, n_head=6),
    "mpt": dict(
        vocab_size=WORDS, d_model=192, n_layers=2, n_heads=6, max_seq_len=512, attn_config={"alibi_bias_max": 16}
    ),
    "falcon": dict(
        vocab_size=WORDS, hidden_size=192, num_hidden_layers=2, num_attention_heads=6, alibi=True, bias=True,
        new_decoder_architecture=False, parallel_attn=False, multi_query=False,
    ),
    "gpt2": dict(vocab_size=WORDS, n_embd=192, n_layer=2, n_head=6, n_positions=1024),
}  # fmt: skip


def save(kind: str, folder: Path) -> Any:
    """A model with weights large enough to matter, written to `folder`; in float64, with the GELU that vLLM has."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind], bos_token_id=1, eos_token_id=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() == 2 else 1)
    model.save_pretrained(folder)
    for part in model.modules():
        if type(part).__name__ == "BloomMLP":
            part.gelu_impl = nn.GELU()
    if kind in {"falcon", "mpt"}:
        # transformers rounds Falcon's bias to bfloat16 in every dtype, and ignores MPT's largest bias.
        linbias.patch(model)
    return model.double()


def texts(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Random tokens; the first `shared` are the same in all."""
    draw = torch.Generator().manual_seed(5)
    start = torch.randint(4, WORDS, (shared,), generator=draw).tolist()
    return [start + torch.randint(4, WORDS, (length - shared,), generator=draw).tolist() for length in lengths]


@torch.no_grad()
def expected(model: Any, text: list[int]) -> Tensor:
    """(tokens - 1,) log-probability of each token after the first."""
    logits = model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(text[1:])[:, None])[:, 0]


def answered(llm: Any, prompts: list[list[int]], **options: Any) -> list[tuple[list[int], Tensor]]:
    """For each prompt and sample the whole text, and the log-probabilities of its last tokens: of all but the first, or
    of the new ones alone under ``prompt_logprobs=None``."""
    from vllm import SamplingParams

    given = dict(temperature=0.0, max_tokens=7, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0)
    found: list[tuple[list[int], Tensor]] = []
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**given | options))
    for prompt, answer in zip(prompts, answers, strict=True):
        known = answer.prompt_logprobs or []
        for sample in answer.outputs:
            text = prompt + list(sample.token_ids)
            steps = [*known[1:], *sample.logprobs]
            tokens = text[-len(steps) :]
            found.append((text, torch.tensor([step[token].logprob for step, token in zip(steps, tokens, strict=True)])))
    return found
