# SPDX-License-Identifier: Apache-2.0
"""JAIS and BTLM: names, the scales of muP, `alibi_scaling`, stored slopes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.hf.models.dense import KINDS, VOCABULARY, logits, make, slopes

from linbias.hf.cache import AlibiCache  # isort: skip
from linbias.hf.models.btlm import BTLMConfig, BTLMLMHeadModel  # isort: skip
from linbias.hf.models.jais import PUBLISHED, JAISConfig, JAISLMHeadModel, JAISModel  # isort: skip
from transformers import DynamicCache, StaticCache  # isort: skip

_LAYER = [
    f"{part}.{kind}"
    for part in ("attn.c_attn", "attn.c_proj", "ln_1", "ln_2", "mlp.c_fc", "mlp.c_fc2", "mlp.c_proj")
    for kind in ("weight", "bias")
]


@pytest.mark.parametrize("kind", ["jais", "jais-gelu", "btlm-factor"])
def test_a_file_has_the_published_names(kind: str, tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as held:
        names = set(held.keys())
    layers = {f"transformer.h.{n}.{name}" for n in (0, 1) for name in _LAYER if "fc2" not in name or "gelu" not in kind}
    outside = ("ln_f.bias", "ln_f.weight", "relative_pe.slopes", "wte.weight")
    assert names == layers | {f"transformer.{name}" for name in outside}


def test_scales_are_the_first_models_names_too() -> None:
    first = JAISConfig(scale_qk_dot_by_d=True, embeddings_scale=14.6, width_scale=0.11)
    assert (first.mup_scale_qk_dot_by_d, first.mup_embeddings_scale) == (True, 14.6)
    assert first.mup_output_alpha * first.mup_width_scale == 0.11


def test_scores_are_over_d_under_mup_only() -> None:
    for options, expected in (
        ({}, 1 / 8),
        ({"mup_scale_qk_dot_by_d": False}, 8**-0.5),
        ({"scale_attn_weights": False}, 1),
    ):
        attention = make("jais", **options).transformer.h[0].attn
        assert attention.score_scale == expected


@pytest.mark.parametrize("cache", [DynamicCache, AlibiCache, None], ids=["dynamic", "alibi", "static"])
def test_slopes_shrink_as_a_cached_text_grows(cache: Any) -> None:
    # Trained with 6 tokens: a pass of 4, one that reaches 8, then one token at a time.
    model, ids = make("btlm-trained").double(), torch.randint(1, VOCABULARY, (2, 10))
    kept = StaticCache(config=model.config, max_cache_len=12) if cache is None else cache()
    stops, steps = (4, 8, 9, 10), []
    with torch.no_grad():
        for start, stop in zip((0, *stops), stops, strict=False):
            steps.append(model(ids[:, start:stop], use_cache=True, cache=kept).logits)
    lengths = torch.tensor([4] * 4 + [8] * 4 + [9, 10]).double()
    sizes = {**KINDS["btlm-trained"][1], "lengths": lengths}
    weights = model.state_dict()
    from tests.hf.models.dense import _jais

    expected = _jais(weights, sizes, ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(torch.cat(steps, 1), expected)


def test_slopes_are_whole_up_to_the_length_of_training() -> None:
    model = make("btlm-trained").transformer
    assert torch.equal(model.slopes_of_pass(None, None, 6), slopes())
    torch.testing.assert_close(model.slopes_of_pass(None, None, 9), slopes() * 6 / 9)
    padded = torch.tensor([[0] * 5 + [1] * 6, [1] * 11])
    torch.testing.assert_close(model.slopes_of_pass(padded, None, 11), torch.stack([slopes(), slopes() * 6 / 11]))
    torch.testing.assert_close(make("btlm-factor").transformer.slopes_of_pass(None, None, 1), slopes() / 2.5)


def test_stored_slopes_are_kept_and_must_be_the_rules(tmp_path: Path) -> None:
    model = make("jais")
    torch.testing.assert_close(model.transformer.relative_pe.slopes.double(), slopes()[:, None], rtol=0, atol=0)
    model.half().save_pretrained(tmp_path)  # rounded by whoever saved it
    JAISLMHeadModel.from_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["transformer.relative_pe.slopes"][2] *= 2
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for kind in (JAISModel, JAISLMHeadModel):
        with pytest.raises(ValueError, match="for head 2, and the rule of 6 heads"):
            kind.from_pretrained(tmp_path)


def test_masks_that_older_files_store_and_slopes_they_lack_are_no_error(tmp_path: Path) -> None:
    model, ids = make("jais"), torch.randint(1, VOCABULARY, (1, 5))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.relative_pe.slopes"]
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = JAISLMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    torch.testing.assert_close(loaded.transformer.relative_pe.slopes.double(), slopes()[:, None], rtol=0, atol=0)


def test_btlm_is_jais() -> None:
    jais = make("jais").double()
    btlm = BTLMLMHeadModel(BTLMConfig(**{**jais.config.to_dict(), "model_type": "btlm"})).double().eval()
    btlm.load_state_dict(jais.state_dict())
    ids = torch.randint(1, VOCABULARY, (1, 5))
    torch.testing.assert_close(btlm(ids).logits, logits("jais", jais.state_dict(), ids))
    assert btlm.config.model_type == "btlm"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_embedding_type": "learned"}, "position_embedding_type='learned'"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"alibi_scaling": {"type": "dynamic", "factor": 2.0}}, "alibi_scaling must be None or"),
        ({"alibi_scaling": {"type": "linear", "factor": 0.5}}, "alibi_scaling must be None or"),
        ({"alibi_scaling": {"type": "linear", "factor": 2.0, "train_seq_len": 9}}, "alibi_scaling must be None or"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("jais", **options)


def test_a_folder_that_does_not_say_alibi_is_refused() -> None:
    assert "published default: 'learned'" in PUBLISHED.refusals({"model_type": "jais"})[0]
    with pytest.raises(ValueError, match="'learned'"):
        JAISModel(JAISConfig(n_layer=1))
