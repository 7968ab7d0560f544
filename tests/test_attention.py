# SPDX-License-Identifier: Apache-2.0
"""The public operation: what it defaults to, what it returns, and how a backend is chosen."""

import inspect
import math
import sys

import pytest
import torch

import linbias
from linbias import BackendUnavailable, alibi_attention, alibi_attention_weights, alibi_slopes, merge
from linbias.testing import Case, make_inputs
from tests.every import every_backend


def qkv(queries: int = 5, keys: int = 7, heads: int = 3, dtype: torch.dtype = torch.float32):
    case = Case(heads=heads, queries=queries, keys=keys, head_dim=4, value_dim=6, dtype=dtype)
    inputs = make_inputs(case)
    return inputs.query, inputs.key, inputs.value, inputs.slopes


class TestDefaults:
    def test_causal_must_be_said(self):
        with pytest.raises(TypeError, match="causal"):
            alibi_attention(*qkv())

    def test_options_are_keywords(self):
        with pytest.raises(TypeError):
            alibi_attention(*qkv(), True)

    def test_positions_written_out_change_nothing(self):
        call = qkv()
        positions = {"query_positions": torch.arange(2, 7), "key_positions": torch.arange(7)}
        for causal in (True, False):
            plain = alibi_attention(*call, causal=causal)
            torch.testing.assert_close(alibi_attention(*call, causal=causal, **positions), plain)
            only_keys = {"key_positions": positions["key_positions"]}
            torch.testing.assert_close(alibi_attention(*call, causal=causal, **only_keys), plain)
            only_queries = {"query_positions": positions["query_positions"]}
            torch.testing.assert_close(alibi_attention(*call, causal=causal, **only_queries), plain)

    def test_queries_take_the_last_key_positions(self):
        call, at = qkv(), torch.tensor([0, 1, 5, 5, 9, 11, 30])
        given = alibi_attention(*call, causal=True, key_positions=at, query_positions=at[2:])
        torch.testing.assert_close(alibi_attention(*call, causal=True, key_positions=at), given)

    def test_scale_is_one_over_root_d_and_zero_is_zero(self):
        query, key, value, slopes = qkv()
        default = alibi_attention(query, key, value, slopes, causal=True)
        torch.testing.assert_close(alibi_attention(query, key, value, slopes, causal=True, scale=0.5), default)
        flat = alibi_attention(query, key, value, slopes, causal=True, scale=0.0)
        torch.testing.assert_close(flat, alibi_attention(0 * query, key, value, slopes, causal=True))
        assert not torch.allclose(flat, default)

    def test_future_slopes_default_to_slopes(self):
        query, key, value, slopes = qkv()
        given = alibi_attention(query, key, value, slopes, causal=False, future_slopes=slopes)
        torch.testing.assert_close(alibi_attention(query, key, value, slopes, causal=False), given)

    def test_shapes_of_slopes_that_mean_the_same(self):
        query, key, value, slopes = qkv()
        plain = alibi_attention(query, key, value, slopes, causal=True)
        for same in (slopes[None], slopes.expand(2, 3), slopes.double()):
            torch.testing.assert_close(alibi_attention(query, key, value, same, causal=True), plain)

    def test_masks_broadcast(self):
        call, hidden = qkv(), torch.rand(5, 7) < 0.7
        full = alibi_attention(*call, causal=False, attn_mask=hidden.expand(2, 3, 5, 7))
        for same in (hidden, hidden[None], hidden[None, None], hidden.expand(3, 5, 7)):
            torch.testing.assert_close(alibi_attention(*call, causal=False, attn_mask=same), full)
        row = torch.tensor([True] * 6 + [False])
        by_key = alibi_attention(*call, causal=False, key_mask=row)
        for same in ({"key_mask": row.expand(2, 7)}, {"attn_mask": row}):
            torch.testing.assert_close(alibi_attention(*call, causal=False, **same), by_key)

    def test_integer_types_of_positions_and_segments(self):
        call = qkv()
        options = {"causal": True}
        plain = alibi_attention(*call, **options, key_positions=torch.arange(7) * 3)
        for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
            narrow = {"key_positions": (torch.arange(7) * 3).to(dtype)}
            torch.testing.assert_close(alibi_attention(*call, **options, **narrow), plain)
        segments = {"query_segments": torch.ones(5).int(), "key_segments": torch.ones(2, 7).char()}
        torch.testing.assert_close(alibi_attention(*call, **options, **segments), alibi_attention(*call, **options))


class TestResults:
    @every_backend
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_shapes_and_dtypes(self, backend: str, dtype: torch.dtype):
        query, key, value, slopes = qkv(dtype=dtype)
        out, aux = alibi_attention(query, key, value, slopes, causal=True, return_aux=True, backend=backend)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert out.shape == (2, 3, 5, 6) and out.dtype == dtype
        assert aux.lse.shape == aux.skipped.shape == (2, 3, 5)
        assert aux.lse.dtype == aux.skipped.dtype == wide
        assert aux.computed.shape == (3,) and aux.computed.dtype == torch.int64

    def test_lse_is_the_log_of_the_sum_of_scores(self):
        query, key, value, slopes = qkv(dtype=torch.float64)
        _, aux = alibi_attention(query, key, value, slopes, causal=False, return_aux=True)
        bias = linbias.alibi_bias(slopes.double(), torch.arange(2, 7), torch.arange(7))
        expected = (query @ key.mT / 2 + bias).logsumexp(-1)
        torch.testing.assert_close(aux.lse, expected)

    @every_backend
    def test_a_row_that_sees_nothing(self, backend: str):
        query, key, value, slopes = (tensor.requires_grad_() for tensor in qkv())
        seen = torch.ones(2, 7, dtype=torch.bool)
        seen[1] = False
        out, aux = alibi_attention(
            query, key, value, slopes, causal=True, key_mask=seen, return_aux=True, backend=backend
        )
        assert (out[1] == 0).all() and (aux.lse[1] == -math.inf).all() and (aux.skipped[1] == 0).all()
        (out.sum() + aux.lse[0].sum()).backward()
        for tensor in (query, key, value):
            assert (tensor.grad[1] == 0).all() and tensor.grad[0].isfinite().all()
        assert slopes.grad.isfinite().all()

    @every_backend
    def test_inputs_of_nothing(self, backend: str):
        slopes = alibi_slopes(3)
        for batch, queries, keys in ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)):
            query = torch.zeros(batch, 3, queries, 4, requires_grad=True)
            key = torch.zeros(batch, 3, keys, 4, requires_grad=True)
            out, aux = alibi_attention(query, key, key, slopes, causal=True, return_aux=True, backend=backend)
            assert out.shape == (batch, 3, queries, 4) and (out == 0).all() and (aux.lse == -math.inf).all()
            out.sum().backward()
            assert query.grad.shape == query.shape and key.grad.shape == key.shape

    def test_a_value_dim_of_zero(self):
        query, key, _, slopes = qkv()
        out, aux = alibi_attention(query, key, key[..., :0], slopes, causal=True, return_aux=True)
        assert out.shape == (2, 3, 5, 0)
        torch.testing.assert_close(
            aux.lse, alibi_attention(query, key, key, slopes, causal=True, return_aux=True)[1].lse
        )


class TestPositions:
    @every_backend
    @pytest.mark.parametrize("base", [2**31, -(2**33), 2**53, 2**62, -(2**63)])
    def test_far_from_zero_nothing_changes(self, backend: str, base: int):
        call = qkv()
        for options in ({"causal": True, "window": (3, 0)}, {"causal": False, "window": (4, 1)}, {"causal": True}):
            near = alibi_attention(*call, **options, backend=backend)
            at = {"query_positions": torch.arange(2, 7) + base, "key_positions": torch.arange(7) + base}
            torch.testing.assert_close(alibi_attention(*call, **options, **at, backend=backend), near)

    @every_backend
    def test_gaps_no_float_could_hold(self, backend: str):
        query, key, value, slopes = qkv(queries=1, keys=2)
        # One key at hand, one 2**40 away: only the first is left, and the second's distance must not wrap.
        at = {"query_positions": torch.tensor([2**40]), "key_positions": torch.tensor([0, 2**40])}
        out, aux = alibi_attention(query, key, value, slopes, causal=True, **at, return_aux=True, backend=backend)
        torch.testing.assert_close(out, value[:, :, 1:])
        torch.testing.assert_close(aux.lse, (query * key[:, :, 1:]).sum(-1) / 2)

    @every_backend
    def test_causal_at_the_ends_of_int64(self, backend: str):
        query, key, value, _ = qkv(queries=2, keys=2)
        ends = torch.tensor([-(2**62), 2**62 - 1])
        out = alibi_attention(
            query, key, value, torch.zeros(3), causal=True, query_positions=ends, key_positions=ends, backend=backend
        )
        torch.testing.assert_close(out[:, :, 0], value[:, :, 0])
        assert not torch.allclose(out[:, :, 1], value[:, :, 1])

    @every_backend
    @pytest.mark.parametrize("causal", [True, False])
    def test_counts_as_large_as_int64(self, backend: str, causal: bool):
        call, most = qkv(queries=70, keys=133), sys.maxsize
        plain = alibi_attention(*call, causal=causal, backend=backend)
        at = {"query_positions": torch.arange(63, 133) - 2**62, "key_positions": torch.arange(133) - 2**62}
        for options in (
            {"window": (most, most)},
            {"window": (most, most), "sinks": most},
            {"window": (most, most)} | at,
        ):
            torch.testing.assert_close(alibi_attention(*call, causal=causal, **options, backend=backend), plain)
        everything = alibi_attention(*call, causal=causal, prefix=most, backend=backend)
        torch.testing.assert_close(everything, alibi_attention(*call, causal=False, backend=backend))
        unbiased = alibi_attention(*call, causal=causal, unbiased=most, backend=backend)
        zero = alibi_attention(*call[:3], torch.zeros(3), causal=causal, backend=backend)
        torch.testing.assert_close(unbiased, zero)


class TestSteepSlopes:
    @every_backend
    @pytest.mark.parametrize("slope", [1e38, -1e38, math.inf])
    @pytest.mark.parametrize("nearest", [0, 3, 5, 200])
    def test_a_bias_that_no_float_holds_hides(self, backend: str, slope: float, nearest: int):
        """As the tokens' positions are, so far is the nearest key: 3 * 1e38 is a float32, 4 * 1e38 is not."""
        query, key, value = (torch.randn(1, 1, 150, 4) for _ in range(3))
        at = {"query_positions": torch.full((150,), nearest), "key_positions": -torch.arange(150)}
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        if slope < 0:
            # Rewarded without bound: what a float cannot hold is no number, and no tile of it may be skipped.
            out = alibi_attention(*leaves, torch.tensor([slope]), causal=True, **at, backend=backend)
            assert out.isnan().all()
            return
        out, aux = alibi_attention(*leaves, torch.tensor([slope]), causal=True, **at, backend=backend, return_aux=True)
        gradients = torch.autograd.grad(out.sum(), leaves)
        if nearest == 0 or (nearest == 3 and slope < math.inf):
            torch.testing.assert_close(out, value[:, :, :1].expand_as(out))
            assert aux.lse.isfinite().all()
            assert gradients[2][:, :, 0].allclose(torch.tensor(150.0))
            # A weight that is nothing beside 1 may be anything below the square of eps, but for what is hidden.
            assert (gradients[2][:, :, 1:4] <= 150 * torch.finfo(torch.float32).eps ** 2).all()
            assert (gradients[2][:, :, 4:] == 0).all()
        else:
            assert (out == 0).all() and (aux.lse == -math.inf).all()
            assert all((gradient == 0).all() for gradient in gradients)


class TestWeights:
    def test_are_the_softmax_that_the_output_uses(self):
        query, key, value, slopes = qkv()
        options = {"causal": True, "softcap": 3.0, "window": (3, 0), "unbiased": 1}
        weights = alibi_attention_weights(query, key, slopes, **options)
        assert weights.shape == (2, 3, 5, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
        torch.testing.assert_close(weights @ value, alibi_attention(query, key, value, slopes, **options))

    def test_grouped_heads_half_types_and_empty_rows(self):
        query, key, _, slopes = qkv(dtype=torch.bfloat16)
        weights = alibi_attention_weights(query, key[:, :1], slopes, causal=True, key_mask=torch.zeros(7).bool())
        assert weights.dtype == torch.bfloat16 and (weights == 0).all()

    def test_differentiable(self):
        query, key, _, slopes = (tensor.requires_grad_() for tensor in qkv())
        alibi_attention_weights(query, key, slopes, causal=True)[..., 0].sum().backward()
        assert query.grad.abs().sum() > 0 and key.grad.abs().sum() > 0 and slopes.grad.abs().sum() > 0

    @pytest.mark.parametrize("name", ["dropout_p", "tolerance", "key_bounds", "backend", "return_aux", "nonsense"])
    def test_refuse_what_means_nothing(self, name: str):
        query, key, _, slopes = qkv()
        with pytest.raises(TypeError, match=name):
            alibi_attention_weights(query, key, slopes, causal=True, **{name: None})

    def test_need_causal_too(self):
        query, key, _, slopes = qkv()
        with pytest.raises(TypeError, match="causal"):
            alibi_attention_weights(query, key, slopes)


class TestMerge:
    def test_halves_make_the_whole(self):
        query, key, value, slopes = qkv(dtype=torch.float64)
        whole, aux = alibi_attention(query, key, value, slopes, causal=True, return_aux=True)
        parts = []
        for half in (slice(0, 3), slice(3, 7)):
            at = {"query_positions": torch.arange(2, 7), "key_positions": torch.arange(7)[half]}
            parts += [key[:, :, half], value[:, :, half], at]
        (out_a, aux_a), (out_b, aux_b) = (
            alibi_attention(query, keys, values, slopes, causal=True, **at, return_aux=True)
            for keys, values, at in (parts[:3], parts[3:])
        )
        # The first query sees nothing of the second half: its lse there is -inf.
        assert (aux_b.lse[:, :, 0] == -math.inf).all()
        out, lse = merge(out_a, aux_a.lse, out_b, aux_b.lse)
        torch.testing.assert_close(out, whole)
        torch.testing.assert_close(lse, aux.lse)

    def test_two_empty_sets_stay_empty_with_zero_gradients(self):
        out = torch.zeros(1, 1, 1, 2, requires_grad=True)
        lse = torch.full((1, 1, 1), -math.inf, requires_grad=True)
        merged, merged_lse = merge(out, lse, out, lse)
        assert (merged == 0).all() and (merged_lse == -math.inf).all()
        merged.sum().backward()
        assert (out.grad == 0).all() and (lse.grad == 0).all()

    def test_large_sums_do_not_overflow(self):
        ones, big = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 1e30)
        out, lse = merge(ones, big, 3 * ones, big)
        assert out.item() == 2 and lse.item() == pytest.approx(1e30)

    def test_gradients(self):
        def call(*tensors):
            return merge(*tensors)

        tensors = [torch.randn(2, 1, 3, 2), torch.randn(2, 1, 3), torch.randn(2, 1, 3, 2), torch.randn(2, 1, 3)]
        assert torch.autograd.gradcheck(call, [tensor.double().requires_grad_() for tensor in tensors])

    @pytest.mark.parametrize("wrong", range(4))
    def test_shapes_must_fit(self, wrong: int):
        tensors = [torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)]
        tensors[wrong] = tensors[wrong].transpose(1, 2)
        with pytest.raises(ValueError, match="merge needs out_a and out_b of one shape"):
            merge(*tensors)


class TestBackends:
    def test_unknown_names_list_the_known(self):
        with pytest.raises(ValueError) as caught:
            alibi_attention(*qkv(), causal=True, backend="cudnn")
        for name in ("auto", *linbias.backends._BY_NAME, "cudnn"):
            assert repr(name) in str(caught.value)

    def test_explicit_requests_never_fall_back(self, monkeypatch: pytest.MonkeyPatch):
        tiled = linbias.backends.tiled
        monkeypatch.setattr(tiled, "why_not", lambda problem: f"dislikes head_dim {problem.head_dim}")
        with pytest.raises(BackendUnavailable) as caught:
            alibi_attention(*qkv(), causal=True, backend="tiled")
        assert isinstance(caught.value, NotImplementedError)
        assert str(caught.value) == (
            "backend 'tiled' cannot run this call: dislikes head_dim 4; backend='auto' picks one that can"
        )

    def test_auto_takes_the_first_that_can(self, monkeypatch: pytest.MonkeyPatch):
        ran = []
        for name in linbias.backends.available():
            module = getattr(linbias.backends, name)
            output = module.output
            monkeypatch.setattr(
                module, "output", lambda *call, name=name, output=output: ran.append(name) or output(*call)
            )
        alibi_attention(*qkv(), causal=True)
        for name in linbias.backends.available():
            monkeypatch.setattr(getattr(linbias.backends, name), "why_not", lambda problem: "taken away")
            if name != "reference":
                monkeypatch.setattr(linbias.backends.reference, "why_not", lambda problem: None)
                alibi_attention(*qkv(), causal=True)
        assert ran[-1] == "reference" and len(ran) == len(linbias.backends.available())

    def test_explain_says_who_runs_and_why_not_the_others(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(linbias.backends.tiled, "why_not", lambda problem: "for a reason")
        lines = linbias.backends.explain(*qkv(), causal=True, window=(3, 0)).splitlines()
        assert [line.split()[0] for line in lines] == list(linbias.backends._BY_NAME)
        assert sum("runs this call" in line for line in lines) == 1
        assert "cannot: for a reason" in dict(zip(linbias.backends._BY_NAME, lines, strict=True))["tiled"]

    def test_explain_checks_like_the_call(self):
        with pytest.raises(ValueError, match="window must be"):
            linbias.backends.explain(*qkv(), causal=True, window=3)

    def test_what_is_not_installed_is_not_available(self, monkeypatch: pytest.MonkeyPatch):
        for name in ("native", "triton"):
            monkeypatch.setattr(getattr(linbias.backends, name), "INSTALLED", False)
        assert linbias.backends.available() == ("tiled", "reference")
        assert "native     cannot: its kernels were not built" in linbias.backends.explain(*qkv(), causal=True)

    def test_every_backend_has_what_the_protocol_asks(self):
        for name in linbias.backends.available():
            module = getattr(linbias.backends, name)
            assert name == module.NAME and isinstance(module.COMPOSITE, bool)
            names = ["problem", "operands", "out", "lse", "lse_low", "grad_out", "grad_lse", "needs"]
            assert list(inspect.signature(module.forward).parameters) == names[:2]
            assert list(inspect.signature(module.backward).parameters) == names
