# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from linbias.lab.config import ALL_SCHEMES, ModelConfig
from linbias.lab.model import build_decoder, count_parameters
from tests.lab.small import MODEL


def test_case_l6_what_a_scheme_learns_is_all_it_adds():
    layers, width, length = MODEL.layers, MODEL.width, 16
    expected = 256 * width + layers * (12 * width**2 + 2 * width) + width
    counts = {scheme: count_parameters(build_decoder(MODEL, scheme, length, seed=1)) for scheme in ALL_SCHEMES}
    assert counts == {
        "alibi": expected,
        "sinusoidal": expected,
        "rope": expected,
        "none": expected,
        "learned": expected + length * width,
        "t5": expected + 32 * MODEL.heads,
        "kerple": expected + 2 * MODEL.heads,
        "alibi-learned": expected + MODEL.heads,
        "alibi-half": expected,
    }


def test_parameters_are_named_as_in_an_mpt_checkpoint():
    names = set(build_decoder(ModelConfig(layers=1, width=8, heads=2), "alibi", 4, seed=1).state_dict())
    block = "transformer.blocks.0"
    assert names == {
        "transformer.wte.weight",
        f"{block}.norm_1.weight",
        f"{block}.attn.Wqkv.weight",
        f"{block}.attn.out_proj.weight",
        f"{block}.norm_2.weight",
        f"{block}.ffn.up_proj.weight",
        f"{block}.ffn.down_proj.weight",
        "transformer.norm_f.weight",
    }


def test_logits_are_those_of_transformers_mpt():
    transformers = pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    decoder = build_decoder(MODEL, "alibi", 16, seed=1)
    config = transformers.MptConfig(
        d_model=MODEL.width, n_heads=MODEL.heads, n_layers=MODEL.layers, vocab_size=256, max_seq_len=64
    )
    mpt = transformers.MptForCausalLM(config).eval()
    absent, unexpected = mpt.load_state_dict(decoder.state_dict(), strict=False)
    assert (absent, unexpected) in (([], []), (["lm_head.weight"], []))
    mpt.tie_weights()
    tokens = torch.randint(256, (2, 21))
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), mpt(tokens).logits)


def test_schemes_share_their_first_weights():
    reference = build_decoder(MODEL, "none", 16, seed=5).state_dict()
    for scheme in ALL_SCHEMES:
        weights = build_decoder(MODEL, scheme, 16, seed=5).state_dict()
        assert all(torch.equal(weights[name], value) for name, value in reference.items())
    other = build_decoder(MODEL, "none", 16, seed=6).state_dict()
    assert not torch.equal(other["transformer.wte.weight"], reference["transformer.wte.weight"])


def test_matrices_start_with_variance_one_over_width():
    config = ModelConfig(layers=2, width=64, heads=2)
    for name, weight in build_decoder(config, "learned", 16, seed=5).named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all()
            continue
        residual = name.endswith(("out_proj.weight", "down_proj.weight"))
        assert weight.std().item() == pytest.approx(0.125 / (2 if residual else 1), rel=0.1)


def test_building_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    build_decoder(MODEL, "learned", 16, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_nats_are_the_negative_log_probabilities():
    decoder = build_decoder(MODEL, "alibi", 16, seed=5)
    tokens, targets = torch.randint(256, (2, 7)), torch.randint(256, (2, 7))
    probabilities = decoder(tokens).softmax(-1)
    for b, t in [(0, 0), (1, 3), (1, 6)]:
        expected = -probabilities[b, t, targets[b, t]].log()
        torch.testing.assert_close(decoder.nats(tokens, targets)[b, t], expected)


def test_batches_of_different_sizes_follow_each_other():
    """Case L4: nothing of one batch's size stays behind."""
    decoder = build_decoder(MODEL, "alibi", 16, seed=5)
    tokens = torch.randint(256, (4, 9))
    whole = decoder(tokens)
    torch.testing.assert_close(decoder(tokens[:3]), whole[:3])
    torch.testing.assert_close(decoder(tokens[:, :5]), whole[:, :5])
