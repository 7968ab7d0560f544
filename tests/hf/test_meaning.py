# SPDX-License-Identifier: Apache-2.0
"""What a patched model computes where people were served something else, one test a report.

"Flat" models have queries and keys of 0, so that a softmax shows bias and mask alone.
"""

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import linbias
from linbias.hf.cache import AlibiCache
from linbias.testing import largest_error
from tests.hf.tiny import (
    BLOOM,
    CACHE,
    MPT,
    base,
    every_family,
    every_kind,
    lengths_mask,
    make,
    store,
    tokens,
    transformers,
)

DISTANCES_3210 = [0.1015363, 0.1674051, 0.2760043, 0.4550542]
DISTANCES_210 = [0.1863237, 0.3071959, 0.5064804]


def flat(kind: str, heads: int, head_dim: int = 4) -> Any:
    """One patched layer without content."""
    model = make(kind, layers=1, heads=heads, width=heads * head_dim)
    for name, parameter in model.named_parameters():
        if "query_key_value" in name or "Wqkv" in name:
            parameter.data.zero_()
    linbias.patch(model)
    return model


def weights(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """(B, H, T, S) of the only layer."""
    with torch.no_grad():
        return model(ids, attention_mask=mask, output_attentions=True, **options).attentions[0]


def logits(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits


def in_steps(model: Any, ids: Tensor, stops: tuple[int, ...], cache: Any = None) -> Tensor:
    """The logits of one text, piece by piece on a cache."""
    pieces, start = [], 0
    for stop in stops:
        with torch.no_grad():
            out = model(ids[:, start:stop], use_cache=True, **{CACHE: cache})
        cache, start = store(out), stop
        pieces.append(out.logits)
    return torch.cat(pieces, 1)


class TestBias:
    def test_heads_that_are_no_power_of_two(self):
        found = weights(flat(BLOOM, 6), tokens(1, 5))
        assert found.shape == (1, 6, 5, 5)
        expected = torch.softmax(-linbias.alibi_slopes(6)[:, None] * torch.tensor([4, 3, 2, 1, 0]), -1)
        torch.testing.assert_close(found[0, :, 4], expected)

    @pytest.mark.parametrize("kind", [BLOOM, MPT])
    def test_bias_after_the_scale(self, kind: str):
        found = weights(flat(kind, 8, 64), tokens(1, 4))[0, 0, 3]
        torch.testing.assert_close(found, torch.tensor(DISTANCES_3210))

    def test_falcon_scales_the_bias_too(self):
        found = weights(flat("falcon", 8, 64), tokens(1, 4))[0, 0, 3]
        torch.testing.assert_close(found, torch.tensor([0.2270728, 0.2417178, 0.2573072, 0.2739021]))

    @every_family
    def test_the_variant_is_an_option(self, kind: str):
        """In float32 both forms agree; at 4,096 bfloat16 keys the original's ties show, and the option chooses."""
        model, ids = make(kind, layers=2, heads=4), tokens(1, 13)
        found = {}
        for fidelity in ("exact", "checkpoint"):
            with linbias.patch(model, fidelity=fidelity):
                found[fidelity] = logits(model, ids)
        torch.testing.assert_close(found["exact"], found["checkpoint"], atol=2e-5, rtol=0)


class TestPadding:
    @every_kind
    def test_left_padding_shifts_nothing(self, kind: str):
        mask = torch.tensor([[0, 0, 1, 1, 1]])
        row = weights(flat(kind, 6), tokens(1, 5), mask)[0, :, 4]
        assert row[:, :2].count_nonzero() == 0
        torch.testing.assert_close(row[:, 2:], weights(flat(kind, 6), tokens(1, 3))[0, :, 2])

    def test_numbers(self):
        row = weights(flat(BLOOM, 8), tokens(1, 5), torch.tensor([[0, 0, 1, 1, 1]]))[0, 0, 4]
        torch.testing.assert_close(row, torch.tensor([0.0, 0.0, *DISTANCES_210]))

    @every_kind
    def test_a_text_is_the_same_alone_and_padded_on_either_side(self, kind: str):
        model, ids = make(kind, layers=2), tokens(1, 6)
        linbias.patch(model)
        alone = logits(model, ids)
        left, right = torch.cat([tokens(1, 3), ids], 1), torch.cat([ids, tokens(1, 3)], 1)
        for padded, mask in ((left, lengths_mask(9, 6)[1:]), (right, lengths_mask(9, 6, side="right")[1:])):
            found = logits(model, padded, mask)[mask.bool()]
            torch.testing.assert_close(found, alone[0], atol=2e-5, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
    @every_kind
    def test_rows_that_see_nothing(self, kind: str, dtype: torch.dtype):
        model, ids, mask = make(kind, layers=2).to(dtype), tokens(2, 7), lengths_mask(7, 4)
        linbias.patch(model)
        out = model(ids, attention_mask=mask, labels=ids)
        assert out.logits.isfinite().all()
        out.loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)

    def test_pages_of_sequences_of_different_lengths(self):
        model, ids, mask = make(BLOOM, layers=2), tokens(2, 9), lengths_mask(5, 9)
        linbias.patch(model)
        cache = AlibiCache(page_size=4)
        logits(model, ids[:, :8], mask[:, :8], **{CACHE: cache})
        last = logits(model, ids[:, 8:], mask, **{CACHE: cache})
        for row, start in ((0, 4), (1, 0)):
            alone = logits(model, ids[row : row + 1, start:])[0, -1]
            torch.testing.assert_close(last[row, 0], alone, atol=2e-5, rtol=0)


class TestSteps:
    @pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
    def test_bias_at_a_single_step(self, static: bool):
        model, ids = flat(BLOOM, 2), tokens(1, 5)
        cache = transformers.StaticCache(config=model.config, max_cache_len=5) if static else None
        with torch.no_grad():
            cache = store(model(ids[:, :4], use_cache=True, **{CACHE: cache}))
        row = weights(model, ids[:, 4:], use_cache=True, **{CACHE: cache})[0, :, 0]
        expected = torch.tensor([0.1758119, 0.1871507, 0.1992209, 0.2120696, 0.2257469])
        torch.testing.assert_close(row[0], expected)
        assert abs(row[1, 0].item() - 0.1984406) < 1e-6 and abs(row[1, 4].item() - 0.2015655) < 1e-6

    @pytest.mark.parametrize("ours", [False, True], ids=["dynamic", "ours"])
    @every_kind
    def test_steps_of_any_size(self, kind: str, ours: bool):
        """Seven, three single ones, four."""
        model, ids = make(kind, layers=2), tokens(2, 14)
        linbias.patch(model)
        steps = in_steps(model, ids, (7, 8, 9, 10, 14), AlibiCache() if ours else None)
        torch.testing.assert_close(steps, logits(model, ids), atol=2e-5, rtol=0)

    @every_family
    def test_nothing_is_kept_from_call_to_call(self, kind: str):
        models = {heads: make(kind, layers=1, heads=heads) for heads in (4, 8)}
        texts = [tokens(1, length) for length in (5, 6, 3, 9, 8)]
        expected = {}
        for heads, model in models.items():
            for text in texts:
                with linbias.patch(model):
                    expected[heads, text.shape[1]] = logits(model, text)
        for model in models.values():
            linbias.patch(model)
        for text in texts:
            for heads, model in models.items():
                assert torch.equal(logits(model, text), expected[heads, text.shape[1]])

    @every_kind
    def test_queries_align_with_the_last_keys(self, kind: str):
        """One query on six keys sees all six; of two, the first sees five."""
        model, ids = flat(kind, 6), tokens(1, 6)
        for queries in (1, 2):
            with torch.no_grad():
                cache = store(model(ids[:, : 6 - queries], use_cache=True))
            rows = weights(model, ids[:, 6 - queries :], use_cache=True, **{CACHE: cache})[0]
            assert (rows > 0).sum(-1).unique().tolist() == list(range(7 - queries, 7))
            assert (rows.argmax(-1) == torch.arange(6 - queries, 6)).all()

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @every_kind
    def test_steps_and_prefill_agree_in_half_precision(self, kind: str, cache: str):
        """A distance that is off by one shows in fp16, where the softmax of a step and of a prompt then differ."""
        model, ids = make(kind, layers=1).half(), tokens(1, 14)
        linbias.patch(model)
        expected = weights(model, ids)[0, :, 9:]
        static = transformers.StaticCache(config=model.config, max_cache_len=14) if cache == "static" else None
        with torch.no_grad():
            kept = store(model(ids[:, :9], use_cache=True, **{CACHE: static}))
        for n in range(9, 14):
            row = weights(model, ids[:, n : n + 1], use_cache=True, **{CACHE: kept})[0, :, 0, : n + 1]
            assert largest_error(row, expected[:, n - 9, : n + 1].double()) < 2e-3

    @every_kind
    def test_every_path_has_a_bias(self, kind: str):
        """The guard against a path that forgets it: with slopes of 0 each gives something else."""
        model, ids, mask = make(kind, layers=2), tokens(2, 14), lengths_mask(14, 9)
        window = AlibiCache(window=(9, 0), sinks=1)
        static = transformers.StaticCache(config=model.config, max_cache_len=14)
        stops = (9, 10, 14)
        paths = {
            "prefill": lambda: logits(model, ids),
            "padded": lambda: logits(model, ids, mask)[mask.bool()],
            "4-D": lambda: logits(model, ids, torch.ones(14, 14, dtype=torch.bool).tril()[None, None]),
            "dynamic": lambda: in_steps(model, ids, stops),
            "static": lambda: in_steps(model, ids, stops, static),
            "ours": lambda: in_steps(model, ids, stops, AlibiCache()),
            "pages": lambda: in_steps(model, ids, stops, AlibiCache(page_size=4)),
            "window": lambda: in_steps(model, ids, stops, window),
        }
        linbias.patch(model)
        decoder = type(base(model))
        for name, path in paths.items():
            biased = path()
            window.reset(), static.reset()
            with mock.patch.object(decoder, "alibi_slopes", lambda self: torch.zeros(6)):
                unbiased = path()
            assert largest_error(biased, unbiased) > 1e-2, name

    @every_family
    def test_training_and_inference_agree(self, kind: str):
        model, ids = make(kind), tokens(2, 9)
        linbias.patch(model)
        calm = logits(model, ids)
        model.train()
        assert torch.equal(logits(model, ids), calm)


class TestDtypes:
    @every_family
    def test_autocast_leaves_the_bias_alone(self, kind: str):
        model, ids = flat(kind, 6), tokens(1, 9)
        expected = weights(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            found = weights(model, ids)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected.bfloat16()), "one rounding, of the result"

    @every_family
    def test_autocast_trains(self, kind: str):
        model, ids = make(kind, layers=2), tokens(2, 9)
        linbias.patch(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)

    @pytest.mark.slow
    def test_far_keys_do_not_tie_in_bfloat16(self):
        """4,096 tokens, slope 1/2: the last keys weigh as they should; the original makes eight of them equal."""
        model = flat(BLOOM, 8).bfloat16()
        with torch.no_grad():
            cache = store(model(tokens(1, 4095), use_cache=True))
        row = weights(model, tokens(1, 1), use_cache=True, **{CACHE: cache})[0, 0, 0]
        expected = torch.softmax(-0.5 * torch.arange(4095, -1, -1).double(), 0)
        assert (row.double() - expected).abs().sum() / 2 < 4e-3


@pytest.mark.slow
@every_family
def test_memory_is_linear(kind: str):
    """16 heads at 4,096 tokens would be a gigabyte of bias; a fresh process grows by less than a tenth."""
    code = f"""
import resource, torch
from tests.hf.tiny import make, tokens
import linbias
model = make({kind!r}, "base", layers=1, heads=16, width=64)
linbias.patch(model)
ids = tokens(1, 4096)
with torch.no_grad():
    model(ids[:, :256], use_cache=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model(ids, use_cache=False)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class TestLengths:
    @every_family
    def test_any_length(self, kind: str):
        """MPT was built for 64."""
        model = make(kind, layers=1)
        linbias.patch(model)
        for length in (17, 65, 300, 1):
            assert logits(model, tokens(1, length)).shape == (1, length, 53)


class TestPaths:
    @every_kind
    def test_causal_with_and_without_a_mask(self, kind: str):
        model, ids = make(kind, heads=4, layers=2), tokens(5, 20)
        changed = ids.clone()
        changed[:, 15] = (changed[:, 15] + 1) % 53
        linbias.patch(model)
        for mask in (None, torch.ones(5, 20), lengths_mask(20, 18, 15, 12, 9)):
            before, after = logits(model, ids, mask), logits(model, changed, mask)
            assert torch.equal(before[:, :15], after[:, :15])
            assert largest_error(before[:, 15:], after[:, 15:]) > 1e-3

    @every_kind
    def test_weights_rise_toward_the_query(self, kind: str):
        row = weights(flat(kind, 6), tokens(1, 5))[0, :, 4]
        assert (row.diff(dim=-1) > 0).all()


class TestPlaces:
    def test_window_of_two_keeps_three_keys(self):
        """left = 2: the numbers of distances 2, 1, 0; left = 0: only itself."""
        model, ids = make(BLOOM, layers=1, heads=8), tokens(1, 7)
        linbias.patch(model)
        for left, kept in ((2, 3), (0, 1)):
            steps = in_steps(model, ids, (4, 5, 6, 7), AlibiCache(window=(left, 0)))
            torch.testing.assert_close(steps[:, -1], logits(model, ids[:, -kept:])[:, -1], atol=2e-5, rtol=0)

    def test_a_text_may_start_anywhere(self):
        """Positions are differences: what was cut off in front changes nothing that cannot see it."""
        model, ids = make(BLOOM, layers=1), tokens(1, 30)
        linbias.patch(model)
        long = in_steps(model, ids, (25, 26, 27, 28, 29, 30), AlibiCache(window=(4, 0)))
        late = in_steps(model, ids[:, 20:], (5, 6, 7, 8, 9, 10), AlibiCache(window=(4, 0)))
        torch.testing.assert_close(long[:, -5:], late[:, -5:], atol=2e-5, rtol=0)
