# SPDX-License-Identifier: Apache-2.0
"""Refact: names, sizes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.hf.models.dense import VOCABULARY, make

from linbias.hf.models.refact import PUBLISHED, GPTRefactConfig, RefactMLP  # isort: skip

_LAYER = (
    "attn.c_proj.weight",
    "attn.kv.weight",
    "attn.q.weight",
    "ln_1.weight",
    "ln_2.weight",
    "mlp.c_proj.weight",
    "mlp.gate_up_proj.weight",
)


def test_a_file_has_the_published_names(tmp_path: Path) -> None:
    make("refact").save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as held:
        names = set(held.keys())
    layers = {f"transformer.h.{layer}.{name}" for layer in (0, 1) for name in _LAYER}
    assert names == layers | {"lm_head.weight", "ln_f.weight", "transformer.wte.weight"}


def test_the_published_mlp_is_5632_wide() -> None:
    with torch.device("meta"):
        mlp = RefactMLP(GPTRefactConfig(n_embd=2048, n_head=32))
    assert mlp.gate_up_proj.weight.shape == (2 * 5632, 2048)


def test_the_cache_holds_one_head() -> None:
    model, ids = make("refact"), torch.randint(1, VOCABULARY, (2, 5))
    from tests.hf.tiny import store

    assert store(model(ids, use_cache=True)).layers[0].keys.shape == (2, 1, 5, 8)


@pytest.mark.parametrize("options", [{"multi_query": False}, {"scale_attn_weights": False}])
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}=False"):
        make("refact", **options)
    assert PUBLISHED.claims({"model_type": "gpt_refact"}) and not PUBLISHED.claims({"model_type": "gpt2"})
