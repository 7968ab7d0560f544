# SPDX-License-Identifier: Apache-2.0
"""Baichuan: names, NormHead, z-loss, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.hf.models.dense import VOCABULARY, make

from linbias.hf.models.baichuan import PUBLISHED, BaichuanConfig, BaichuanForCausalLM, NormHead  # isort: skip

_LAYER = (
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.W_pack.weight",
    "self_attn.o_proj.weight",
)


@pytest.mark.parametrize("kind", ["baichuan", "baichuan2"])
def test_a_file_has_the_published_names(kind: str, tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as held:
        names = set(held.keys())
    layers = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in _LAYER}
    assert names == layers | {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}


def test_norm_head_has_rows_of_length_one_and_keeps_its_weight() -> None:
    head = NormHead(5, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[3.0, 4, 0, 0, 0], [0, 0, 2, 0, 0], [0, 0, 0, 0, 0]]))
    before, x = head.weight.clone(), torch.tensor([[1.0, 1, 1, 1, 1]])
    for training in (True, False):
        torch.testing.assert_close(head.train(training)(x), torch.tensor([[1.4, 1.0, 0.0]]))
        assert torch.equal(head.weight, before)


def test_training_and_inference_have_the_same_logits() -> None:
    model, ids = make("baichuan2").double(), torch.randint(VOCABULARY, (2, 7))
    torch.testing.assert_close(model.train()(ids).logits, model.eval()(ids).logits)


def test_norm_head_follows_the_vocabulary_and_can_be_told() -> None:
    assert BaichuanConfig(vocab_size=125696).norm_head is True
    assert BaichuanConfig(vocab_size=64000).norm_head is False
    assert BaichuanConfig(vocab_size=64000, norm_head=True).norm_head is True


def test_z_loss_is_added() -> None:
    model, ids = make("baichuan2"), torch.randint(1, VOCABULARY, (2, 7))
    plain, logits = model(ids, labels=ids).loss, model(ids).logits
    model.config.z_loss_weight = 0.25
    expected = plain + 0.25 * logits[:, :-1].amax(-1).square().mean()
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)


def test_rotary_models_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="hidden_size=4096 is a Baichuan of 7B, whose positions are rotary"):
        BaichuanForCausalLM(BaichuanConfig(hidden_size=4096, num_hidden_layers=1))
    published = {"model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"], "hidden_size": 5120}
    assert "BaiChuanForCausalLM" in PUBLISHED.refusals(published)[0]
    assert PUBLISHED.refusals({"model_type": "baichuan", "hidden_size": 5120}) == []
    assert PUBLISHED.claims({"model_type": "baichuan"}) and not PUBLISHED.claims({"model_type": "llama"})
