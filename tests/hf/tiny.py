# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family, and the float64 truth they are held against.

Importing this skips the test module where transformers is missing.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import linbias

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")

from linbias.hf.decoder import CACHE  # noqa: E402

VOCABULARY = 53
BLOOM, MPT, FALCON = "bloom", "mpt", "falcon"
# Every layout of Falcon's projection: one key head a query head, one for all, and groups (the 40B decoder).
FALCON_KINDS = {
    "falcon": {"multi_query": False, "parallel_attn": False, "bias": True},
    "falcon-multi-query": {"multi_query": True, "parallel_attn": True},
    "falcon-new-decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
}
KINDS = (BLOOM, MPT, *FALCON_KINDS)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
every_family = pytest.mark.parametrize("kind", (BLOOM, MPT, FALCON))

_CLASSES = {
    BLOOM: "Bloom",
    MPT: "Mpt",
    FALCON: "Falcon",
}
HEADS = {
    "lm": "ForCausalLM",
    "base": "Model",
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "qa": "ForQuestionAnswering",
}


def make(kind: str, head: str = "lm", *, heads: int = 6, layers: int = 3, width: int = 48, **options: Any) -> Any:
    """A random model in eval mode. Its weights are large enough that content and bias both matter."""
    family = kind.split("-", maxsplit=1)[0]
    if family == BLOOM:
        sizes = {"hidden_size": width, "n_layer": layers, "n_head": heads}
    elif family == MPT:
        sizes = {"d_model": width, "n_layers": layers, "n_heads": heads, "max_seq_len": 64}
        sizes["use_cache"] = True  # as for the others; MptConfig's own default is False, see TestUseCache
    else:
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "alibi": True}
        sizes |= FALCON_KINDS[kind]
    name = _CLASSES[family]
    settings = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, **sizes}
    config = getattr(transformers, f"{name}Config")(**{**settings, **options})
    model = getattr(transformers, name + HEADS[head])(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and label.endswith("weight")
            parameter.normal_(0, 0.2 if parameter.dim() == 1 else 1.5 / math.sqrt(parameter.shape[-1]))
            parameter.add_(1.0 if norm else 0.0)
    return model


def tokens(batch: int, length: int) -> Tensor:
    """Random ids, never the padding id 0."""
    return torch.randint(1, VOCABULARY, (batch, length))


def lengths_mask(*lengths: int, side: str = "left") -> Tensor:
    """(B, T) mask of texts of these lengths, padded to the longest."""
    longest = max(lengths)
    rows = [[0] * (longest - length) + [1] * length for length in lengths]
    mask = torch.tensor(rows)
    return mask if side == "left" else mask.flip(1)


def labels_of(ids: Tensor, mask: Tensor) -> Tensor:
    """Labels of real tokens that a real token comes before: no loss is asked of padding."""
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return ids.masked_fill((mask & before) == 0, -100)


def store(model_output: Any) -> Any:
    """The cache of an output, whatever this transformers calls it."""
    return getattr(model_output, CACHE)


@contextmanager
def exactly(model: Any) -> Iterator[Any]:
    """A float64 copy of an unpatched model, whose own code then rounds nothing to a lesser type on its way.

    Call it with an attention mask: BLOOM asks its bias builder only then.
    """
    copied = copy.deepcopy(model).double()

    def placed(heads: int, length: int, *_: Any, **__: Any) -> Tensor:
        steep = linbias.alibi_slopes(heads, max_bias=copied.config.attn_config.alibi_bias_max)
        return steep.double()[:, None, None] * torch.arange(1 - length, 1)

    softmax, to_float32 = torch.nn.functional.softmax, Tensor.float
    vars(base(copied)).update(build_alibi_tensor=_counted(linbias.alibi_slopes), build_mpt_alibi_tensor=placed)
    # BLOOM and MPT go through float32 in their softmax, whatever the model's type.
    with (
        mock.patch("torch.nn.functional.softmax", lambda x, dim, dtype=None: softmax(x, dim)),
        mock.patch.object(Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float32(x)),
        unrounded(copied),
    ):
        yield copied


@contextmanager
def unrounded(model: Any) -> Iterator[Any]:
    """The model, unpatched, adding Falcon's bias before it is rounded to bfloat16: its other rounding stays."""
    builder = _counted(lambda heads: linbias.alibi_slopes(heads).bfloat16())
    with mock.patch("transformers.models.falcon.modeling_falcon.build_alibi_tensor", builder):
        yield model


def _counted(slopes: Callable[[int], Tensor]) -> Callable[[Tensor, int, torch.dtype], Tensor]:
    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        places = ((mask.cumsum(-1) - 1) * mask)[:, None, :].double()
        return (slopes(num_heads).double()[:, None] * places).reshape(-1, 1, mask.shape[1]).to(dtype)

    return build


def checkpoint_activations(model: Any, *, reentrant: bool) -> None:
    """By the name this transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def generate(model: Any, ids: Tensor, *, cache: Any = None, **options: Any) -> Tensor:
    """model.generate, with the cache under the name this transformers has for it."""
    return model.generate(ids, **{CACHE: cache}, **options)


def base(model: Any) -> Any:
    """The decoder of a model."""
    return getattr(model, "transformer", model)


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, by name."""
    model.zero_grad()
    value = loss(model)
    value.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return {"loss": value.detach(), **found}
