# SPDX-License-Identifier: Apache-2.0
"""llm-foundry's MPT: names, transformers' own MPT as a second judge, options, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.hf.models.dense import VOCABULARY, make

from linbias.hf.models.mpt_foundry import PUBLISHED, LPLayerNorm, MPTConfig  # isort: skip
from transformers import MptConfig, MptForCausalLM  # isort: skip

_LAYER = {
    "mpt": [
        f"{part}.{kind}"
        for part in ("attn.Wqkv", "attn.out_proj", "ffn.down_proj", "ffn.up_proj", "norm_1", "norm_2")
        for kind in ("weight", "bias")
    ],
    "mpt-grouped": [
        f"{part}.weight"
        for part in ("attn.Wqkv", "attn.k_ln", "attn.out_proj", "attn.q_ln", "ffn.down_proj", "ffn.up_proj")
        + ("norm_1", "norm_2")
    ],
    "mpt-single": [
        f"{part}.weight"
        for part in ("attn.Wk", "attn.Wq", "attn.Wv", "attn.k_ln", "attn.out_proj", "attn.q_ln", "ffn.down_proj")
        + ("ffn.gate_proj", "ffn.up_proj", "norm_1", "norm_2")
    ],
}


@pytest.mark.parametrize("kind", _LAYER)
def test_a_file_has_the_published_names(kind: str, tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as held:
        names = set(held.keys())
    layers = {f"transformer.blocks.{layer}.{name}" for layer in (0, 1) for name in _LAYER[kind]}
    norms = {"transformer.norm_f.weight"} | ({"transformer.norm_f.bias"} if kind == "mpt" else set())
    assert names == layers | norms | {"transformer.wte.weight"}


def test_an_untied_head_is_in_the_file(tmp_path: Path) -> None:
    make("mpt", tie_word_embeddings=False).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as held:
        assert "lm_head.weight" in held.keys()


def test_a_plain_model_is_transformers_own() -> None:
    model, ids = make("mpt", no_bias=True, expansion_ratio=4), torch.randint(1, VOCABULARY, (2, 9))
    sizes = {"d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": 16}
    own = MptForCausalLM(MptConfig(**sizes)).eval()
    report = own.load_state_dict(model.state_dict(), strict=False)
    assert not report.missing_keys and not report.unexpected_keys
    mask = torch.tensor([[0, 0] + [1] * 7, [1] * 9])
    with torch.no_grad():
        expected, found = own(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


def test_sequence_ids_are_documents_where_the_configuration_has_them() -> None:
    attention = {"alibi": True, "attn_uses_sequence_id": True}
    model, ids = make("mpt", attn_config=attention).double(), torch.randint(1, VOCABULARY, (1, 7))
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        found = model(ids, sequence_id=numbers, use_cache=False).logits
        torch.testing.assert_close(found[:, 3:], model(ids[:, 3:]).logits)
    with pytest.raises(ValueError, match="sequence_id has no effect"):
        make("mpt")(ids, sequence_id=numbers)


def test_low_precision_norms_stay_in_autocasts_dtype() -> None:
    norm, x = LPLayerNorm(8), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), torch.nn.LayerNorm(8)(x))


def test_embedding_fraction_is_of_the_gradient() -> None:
    ids, found = torch.randint(1, VOCABULARY, (1, 5)), []
    for fraction in (1.0, 0.25):
        torch.manual_seed(1)
        model = make("mpt", embedding_fraction=fraction).double().base_model
        out = model(ids).last_hidden_state
        out.sum().backward()
        found.append((out.detach(), model.wte.weight.grad))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1] * 0.25, found[1][1])


def test_it_is_told_from_transformers_own() -> None:
    assert PUBLISHED.claims({"model_type": "mpt", "architectures": ["MPTForCausalLM"]})
    assert PUBLISHED.claims({"model_type": "mpt", "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}})
    assert not PUBLISHED.claims({"model_type": "mpt", "architectures": ["MptForCausalLM"]})
    assert PUBLISHED.claims(MPTConfig().to_dict())


def _attention(**options: Any) -> dict[str, Any]:
    return {"attn_config": {"alibi": True, **options}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_config": {}}, "'alibi'.=False: without ALiBi"),
        (_attention(rope=True), "'rope'.=True"),
        (_attention(prefix_lm=True), "'prefix_lm'.=True"),
        (_attention(attn_type="linear"), "'attn_type'.='linear'"),
        (_attention(attn_type="grouped_query_attention", kv_n_heads=4), "'kv_n_heads'.=4: it must divide n_heads"),
        (_attention(attn_type="grouped_query_attention"), "'kv_n_heads'.=None"),
        (_attention(sliding_window_size=9), "'sliding_window_size'.=9"),
        (_attention(attn_logit_softcapping=2.0), "'attn_logit_softcapping'.=2.0"),
        ({**_attention(), "norm_type": "batchnorm"}, "norm_type='batchnorm'"),
        ({**_attention(), "logit_scale": "half"}, "logit_scale='half'"),
        ({**_attention(), "ffn_config": {"ffn_type": "mb_moe"}}, "'ffn_type'.='mb_moe'"),
        ({**_attention(), "ffn_config": {"ffn_act_fn": {"name": "dropout"}}}, "names 'dropout'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("mpt", **options)


def test_the_form_of_before_is_refused() -> None:
    assert "alibi stands by itself" in PUBLISHED.refusals({"model_type": "mpt", "alibi": True})[0]
