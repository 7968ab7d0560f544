# SPDX-License-Identifier: Apache-2.0
"""The torch operators: what tracers, transforms and autograd see of a call."""

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from linbias import BackendUnavailable, alibi_attention, alibi_attention_varlen, alibi_slopes, backends, ops
from linbias.testing import PROBLEMS, Case, Inputs, make_inputs
from tests.every import every_backend, every_kernel, skip_unless_it_can


def slow(value: object):
    return pytest.param(value, marks=pytest.mark.slow)


CASES = (
    Case(batch=2, heads=6, kv_heads=2, queries=5, keys=9, head_dim=8, causal=True, window=(4, 0)),
    Case(queries=5, keys=9, head_dim=8, value_dim=6, future="items", unbiased=1, softcap=2.0, mask="full"),
    Case(queries=5, keys=9, head_dim=8, segments="mixed", padding="left", sinks=1, prefix=2, positions="items",
         causal=True, dropout_p=0.2),
    Case(queries=5, keys=9, head_dim=8, positions="points", metric="euclidean", slopes="items", bounds=4),
    Case(queries=5, keys=9, head_dim=8, causal=True, dtype=torch.bfloat16),
)  # fmt: skip
cases = pytest.mark.parametrize("case", CASES, ids=str)
# opcheck takes seconds.
few_cases = pytest.mark.parametrize("case", [CASES[0], *(slow(case) for case in CASES[1:])], ids=str)
# torch's own forward-mode rules still call torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
LEAVES = ("query", "key", "value", "slopes", "future_slopes")


def forward_call(inputs: Inputs, backend: str, *, grad: bool) -> tuple:
    """The arguments of torch.ops.linbias.attention."""
    problem, operands = inputs.resolve()
    if grad:
        leaves = {name: getattr(operands, name) for name in LEAVES if getattr(operands, name) is not None}
        operands = operands._replace(**{name: leaf.detach().requires_grad_() for name, leaf in leaves.items()})
    return (*operands, *problem.options, backend)


class TestContracts:
    @every_kernel
    @few_cases
    def test_forward_operator(self, backend: str, case: Case):
        inputs = make_inputs(case)
        skip_unless_it_can(backend, inputs)
        opcheck(torch.ops.linbias.attention.default, forward_call(inputs, backend, grad=True))

    @every_kernel
    @few_cases
    def test_backward_operator(self, backend: str, case: Case):
        inputs = make_inputs(case)
        skip_unless_it_can(backend, inputs)
        call = forward_call(inputs, backend, grad=False)
        out, lse, lse_low, _, _ = torch.ops.linbias.attention(*call)
        needs = [True, True, True, True, case.future is not None]
        opcheck(
            torch.ops.linbias.attention_backward.default,
            (inputs.grad_out, inputs.grad_lse, out, lse, lse_low, *call, needs),
            test_utils=("test_schema", "test_faketensor"),
        )
        opcheck(
            torch.ops.linbias.attention_backward.default,
            (inputs.grad_out, None, out, lse, lse_low, *call, [False, True, False, False, False]),
            test_utils=("test_schema", "test_faketensor"),
        )

    def test_the_operators_know_their_backend_must_exist(self):
        call = forward_call(make_inputs(CASES[0]), "cudnn", grad=False)
        with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
            torch.ops.linbias.attention(*call)

    @every_kernel
    def test_outputs_that_owe_nothing(self, backend: str):
        query = torch.randn(1, 2, 3, 4, requires_grad=True)
        _, aux = alibi_attention(query, query, query, alibi_slopes(2), causal=True, backend=backend, return_aux=True)
        assert aux.lse.requires_grad and not aux.skipped.requires_grad and not aux.computed.requires_grad

    @every_kernel
    def test_no_gradient_asked_none_computed(self, backend: str, monkeypatch: pytest.MonkeyPatch):
        asked = []
        module = getattr(backends, backend)
        backward = module.backward
        monkeypatch.setattr(module, "backward", lambda *call: asked.append(call[-1]) or backward(*call))
        query, key, value = (torch.randn(1, 2, 3, 4) for _ in range(3))
        out = alibi_attention(query, key, value.requires_grad_(), alibi_slopes(2), causal=True, backend=backend)
        out.sum().backward()
        assert asked == [(False, False, True, False, False)]
        assert value.grad is not None and query.grad is None and key.grad is None


def shapes_of(results: tuple) -> list[tuple]:
    return [(each.shape, each.dtype, each.stride()) for each in results]


def assert_fakes_tell_the_truth(inputs: Inputs, backend: str, needs: tuple[bool, ...], *, grad_lse: bool = True):
    """Shape, dtype and strides of what both operators return are those that a tracer plans with."""
    problem, operands = inputs.resolve()
    call = (*operands, *problem.options, backend)
    found = ops._forward(*call)
    assert shapes_of(found) == shapes_of(ops._fake_forward(*call)), "forward"
    back = (inputs.grad_out, inputs.grad_lse if grad_lse else None, *found[:3], *call, list(needs))
    assert shapes_of(ops._backward(*back)) == shapes_of(ops._fake_backward(*back)), "backward"


class TestFakes:
    """A compiled graph reads gradients by the strides that the fake promised: wrong ones are wrong numbers."""

    @every_kernel
    @pytest.mark.parametrize("case", [case for case in PROBLEMS if case.queries * case.keys <= 40_000], ids=str)
    def test_of_every_problem(self, backend: str, case: Case):
        inputs = make_inputs(case)
        skip_unless_it_can(backend, inputs)
        assert_fakes_tell_the_truth(inputs, backend, (True, True, True, True, case.future is not None))

    @every_kernel
    @pytest.mark.parametrize("batch", [1, 2])
    @pytest.mark.parametrize("layout", ["tokens", "columns", "sliced", "expanded"])
    def test_of_every_layout_and_need(self, backend: str, layout: str, batch: int):
        for case in (
            Case(batch=batch, heads=6, kv_heads=2, causal=True, layout=layout, slopes="items", future="row"),
            Case(batch=batch, heads=1, queries=1, keys=9, layout=layout, future="items", dtype=torch.bfloat16),
            Case(batch=batch, queries=70, keys=131, value_dim=9, layout=layout, future="steeper", unbiased=1),
        ):
            inputs = make_inputs(case)
            # Gradients that come back have strides of their own.
            turned = replace(
                inputs, grad_out=inputs.grad_out.mT.contiguous().mT, grad_lse=inputs.grad_lse.mT.clone().mT
            )
            wide = replace(inputs, grad_out=inputs.grad_out[..., :1].expand_as(inputs.grad_out))
            for needs in ((True,) * 5, (True, False, False, False, False), (False, True, False, False, True)):
                for given in (inputs, turned, wide):
                    assert_fakes_tell_the_truth(given, backend, needs)
                assert_fakes_tell_the_truth(inputs, backend, needs, grad_lse=False)

    @every_kernel
    def test_of_sequences_laid_end_to_end(self, backend: str, monkeypatch: pytest.MonkeyPatch):
        given = []
        true = ops.attention
        monkeypatch.setattr(ops, "attention", lambda *call: given.append(call) or true(*call))
        tokens, ends = torch.randn(11, 4, 8), torch.tensor([0, 4, 11])
        for slopes in (alibi_slopes(4), torch.rand(2, 4)):
            alibi_attention_varlen(tokens, tokens, tokens, slopes, ends, ends, 7, 7, causal=True, backend=backend)
        for problem, operands, _ in given:
            call = (*operands, *problem.options, backend)
            found = ops._forward(*call)
            assert shapes_of(found) == shapes_of(ops._fake_forward(*call))
            back = (torch.randn(found[0].shape), None, *found[:3], *call, [True] * 4 + [False])
            assert shapes_of(ops._backward(*back)) == shapes_of(ops._fake_backward(*back))
        assert len(given) == 2

    def test_a_fake_that_errs_is_found(self, monkeypatch: pytest.MonkeyPatch):
        backward = backends.tiled.backward

        def permuted(*call):
            found = backward(*call)
            return found._replace(query=found.query.transpose(1, 2).contiguous().transpose(1, 2))

        monkeypatch.setattr(backends.tiled, "backward", permuted)
        with pytest.raises(AssertionError, match="backward"):
            assert_fakes_tell_the_truth(make_inputs(CASES[0]), "tiled", (True, True, True, True, False))


class TestSecondOrder:
    @every_kernel
    def test_double_backward_says_who_can(self, backend: str):
        query = torch.randn(1, 2, 3, 4, requires_grad=True)
        out = alibi_attention(query, query, query, alibi_slopes(2), causal=True, backend=backend)
        (gradient,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        with pytest.raises(BackendUnavailable) as caught:
            gradient.sum().backward()
        assert repr(backend) in str(caught.value) and "backend='reference'" in str(caught.value)

    def test_reference_has_every_order(self):
        query = torch.randn(1, 1, 2, 2, dtype=torch.float64, requires_grad=True)
        out = alibi_attention(query, query, query, alibi_slopes(1), causal=True, backend="reference").square().sum()
        for _ in range(3):
            (out,) = torch.autograd.grad(out.sum(), query, create_graph=True)
        assert out.isfinite().all() and out.abs().sum() > 0


class TestFunctorch:
    """vmap works on every backend; gradients inside a transform are the reference's."""

    def call(self, inputs: Inputs, backend: str):
        options = inputs.options

        def attention(query, key, value, slopes):
            return alibi_attention(query, key, value, slopes, **options, backend=backend, return_aux=True)

        def results(*leaves):
            out, aux = attention(*leaves)
            return out, aux.lse

        return results

    def stack(self, count: int = 3) -> list[Inputs]:
        cases = [
            Case(heads=4, kv_heads=2, queries=5, keys=9, head_dim=8, causal=True, spread=1 + n) for n in range(count)
        ]
        return [make_inputs(case) for case in cases]

    @every_backend
    @pytest.mark.parametrize(
        "in_dims", [(0, 0, 0, 0), (0, 0, 0, None), (0, None, None, None), (None, 0, 0, None), (None, None, None, 0),
                    (1, 2, 0, 1), (-1, 0, 3, 0)],
        ids=str,
    )  # fmt: skip
    def test_vmap(self, backend: str, in_dims: tuple):
        examples = self.stack()
        examples = [replace(one, slopes=(0.5 + n) * one.slopes) for n, one in enumerate(examples)]
        per_name = [[getattr(one, name) for one in examples] for name in LEAVES[:4]]
        stacked = [
            given[0] if dim is None else torch.stack(given, dim) for given, dim in zip(per_name, in_dims, strict=True)
        ]
        attention = self.call(examples[0], backend)
        out, lse = torch.vmap(attention, in_dims=in_dims)(*stacked)
        for n in range(3):
            wanted, wanted_lse = attention(
                *(g[0 if dim is None else n] for g, dim in zip(per_name, in_dims, strict=True))
            )
            torch.testing.assert_close(out[n], wanted)
            torch.testing.assert_close(lse[n], wanted_lse)

    @every_backend
    def test_vmap_over_masks_positions_and_batched_slopes(self, backend: str):
        inputs = make_inputs(Case(queries=5, keys=9, head_dim=8, causal=True, slopes="items"))
        masks = torch.rand(3, 2, 9) < 0.7
        positions = torch.randint(0, 12, (3, 9))
        slopes = torch.stack([inputs.slopes, 2 * inputs.slopes, 3 * inputs.slopes])

        def attention(mask, key_positions, slopes):
            return alibi_attention(
                inputs.query, inputs.key, inputs.value, slopes, causal=True, window=(5, 0), sinks=1, key_mask=mask,
                key_positions=key_positions, backend=backend,
            )  # fmt: skip

        found = torch.vmap(attention)(masks, positions, slopes)
        for n in range(3):
            torch.testing.assert_close(found[n], attention(masks[n], positions[n], slopes[n]))

    @every_backend
    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_vmap_with_dropout(self, backend: str, randomness: str):
        query = torch.randn(3, 2, 4, 5, 8, requires_grad=True)
        slopes = alibi_slopes(4).requires_grad_()

        def run(backend):
            def attention(query):
                return alibi_attention(query, query, query, slopes, causal=True, dropout_p=0.5, backend=backend)

            torch.manual_seed(1)
            out = torch.vmap(attention, randomness=randomness)(query)
            return out, *torch.autograd.grad(out.square().sum(), (query, slopes))

        for one, other in zip(run(backend), run("reference"), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        equal = torch.vmap(lambda query: alibi_attention(query, query, query, slopes, causal=True, dropout_p=0.5,
                           backend=backend), randomness=randomness)(query[:1].expand_as(query))  # fmt: skip
        assert equal[0].equal(equal[1]) == (randomness == "same")

    @every_backend
    def test_vmap_of_empty_batches(self, backend: str):
        query = torch.zeros(3, 0, 2, 4, 8, requires_grad=True)
        out = torch.vmap(lambda one: alibi_attention(one, one, one, alibi_slopes(2), causal=True, backend=backend))(
            query
        )
        assert out.shape == query.shape
        out.sum().backward()
        assert query.grad.shape == query.shape

    @every_backend
    def test_vmap_inside_vmap(self, backend: str):
        query = torch.randn(2, 3, 1, 2, 4, 8)
        slopes = alibi_slopes(2)

        def attention(query):
            return alibi_attention(query, query, query, slopes, causal=True, backend=backend)

        found = torch.vmap(torch.vmap(attention))(query)
        for n in range(2):
            for m in range(3):
                torch.testing.assert_close(found[n, m], attention(query[n, m]))

    @every_backend
    @pytest.mark.parametrize("shared_slopes", [True, False])
    def test_autograd_through_vmap(self, backend: str, shared_slopes: bool):
        query = torch.randn(3, 2, 4, 5, 8, requires_grad=True)
        key = torch.randn(3, 2, 2, 9, 8, requires_grad=True)
        slopes = (alibi_slopes(4) if shared_slopes else torch.rand(3, 4)).requires_grad_()

        def attention(query, key, slopes):
            out, aux = alibi_attention(query, key, key, slopes, causal=True, backend=backend, return_aux=True)
            return out, aux.lse

        leaves, in_dims = (query, key, slopes), (0, 0, None if shared_slopes else 0)
        results = torch.vmap(attention, in_dims=in_dims)(*leaves)
        gradients = [torch.randn_like(result) for result in results]
        found = torch.autograd.grad(results, leaves, gradients)
        rows = [attention(query[n], key[n], slopes if shared_slopes else slopes[n]) for n in range(3)]
        wanted = torch.autograd.grad([torch.stack(result) for result in zip(*rows, strict=True)], leaves, gradients)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    @every_backend
    @pytest.mark.parametrize("shared_slopes", [True, False])
    def test_vmap_over_gradients(self, backend: str, shared_slopes: bool):
        """As torch.autograd.functional.jacobian(vectorize=True) and is_grads_batched do."""
        query = torch.randn(2, 4, 5, 8, requires_grad=True)
        slopes = (alibi_slopes(4) if shared_slopes else torch.rand(2, 4)).requires_grad_()
        out = alibi_attention(query, query, query, slopes, causal=True, backend=backend)
        directions = torch.randn(3, *out.shape)
        found = torch.autograd.grad(out, (query, slopes), directions, is_grads_batched=True, retain_graph=True)
        for n in range(3):
            wanted = torch.autograd.grad(out, (query, slopes), directions[n], retain_graph=True)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one[n], other, rtol=1e-5, atol=1e-5)

    @every_kernel
    @pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "forward_ad"])
    def test_gradients_inside_a_transform_are_refused_by_name(self, backend: str, transform: str):
        with pytest.raises(BackendUnavailable) as caught:
            self.transformed(transform, backend)
        assert repr(backend) in str(caught.value) and "'auto'" in str(caught.value)
        assert "transform" in str(caught.value) or "functorch" in str(caught.value)

    @pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "forward_ad"])
    def test_gradients_inside_a_transform_are_the_references_under_auto(self, transform: str):
        torch.testing.assert_close(self.transformed(transform, "auto"), self.transformed(transform, "reference"))

    def transformed(self, transform: str, backend: str) -> torch.Tensor:
        query = torch.sin(torch.arange(24.0)).reshape(1, 2, 3, 4)
        tangent = torch.cos(torch.arange(24.0)).reshape(1, 2, 3, 4)

        def attention(query):
            return alibi_attention(query, query, query, alibi_slopes(2), causal=True, backend=backend)

        if transform == "grad":
            return torch.func.grad(lambda query: attention(query).square().sum())(query)
        if transform == "vjp":
            return torch.func.vjp(attention, query)[1](tangent)[0]
        if transform == "jvp":
            return torch.func.jvp(attention, (query,), (tangent,))[1]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(query, tangent)
            return torch.autograd.forward_ad.unpack_dual(attention(dual)).tangent

    def test_per_sample_gradients_agree_with_a_loop(self):
        query = torch.randn(3, 1, 2, 5, 8)

        def loss(query, slopes):
            return alibi_attention(query, query, query, slopes, causal=True).square().sum()

        slopes = alibi_slopes(2)
        found = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(query, slopes)
        for n in range(3):
            leaves = (query[n].clone().requires_grad_(), slopes.clone().requires_grad_())
            for one, other in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
                torch.testing.assert_close(one[n], other, rtol=1e-5, atol=1e-6)


class TestTheDirectPath:
    """Where nothing watches, the dispatcher's detour is saved; its results must not differ."""

    @every_kernel
    @cases
    def test_same_bits_as_through_the_operator(self, backend: str, case: Case):
        inputs = make_inputs(case)
        skip_unless_it_can(backend, inputs)
        problem, operands = inputs.resolve()
        direct = ops.attention(problem, operands, backends.select(backend, problem))
        through = torch.ops.linbias.attention(*operands, *problem.options, backend)
        for one, other in zip(direct, through, strict=True):
            assert one.equal(other)

    def test_modes_see_the_operator(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        problem, operands = make_inputs(CASES[0]).resolve()
        with Watch():
            ops.attention(problem, operands, backends.tiled)
        assert "linbias.attention.default" in seen

    @every_kernel
    def test_a_tensor_that_is_negative_by_a_mark_is_read_as_such(self, backend: str):
        lazy = torch.randn(1, 2, 9, 4, dtype=torch.complex64).conj().imag
        assert lazy.is_neg()
        for place in range(3):
            given = [torch.randn(1, 2, 9, 4) for _ in range(3)]
            given[place] = lazy
            found = alibi_attention(*given, alibi_slopes(2), causal=True, backend=backend)
            resolved = [tensor.resolve_neg() for tensor in given]
            assert found.equal(alibi_attention(*resolved, alibi_slopes(2), causal=True, backend=backend))

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # shapes become constants, as in any trace
    @every_kernel
    def test_a_jit_trace_records_the_operator(self, backend: str):
        def call(query):
            return alibi_attention(query, query, query, alibi_slopes(2), causal=True, backend=backend)

        traced = torch.jit.trace(call, torch.randn(1, 2, 9, 4), check_trace=False)
        query = torch.randn(1, 2, 9, 4)
        assert traced(query).equal(call(query))

    @every_kernel
    @cases
    def test_gradients_are_the_operators(self, backend: str, case: Case):
        inputs = make_inputs(case)
        skip_unless_it_can(backend, inputs)
        problem, operands = inputs.resolve()
        names = [name for name in LEAVES if getattr(operands, name) is not None]
        operands = operands._replace(**{n: getattr(operands, n).detach().requires_grad_() for n in names})
        leaves = [getattr(operands, name) for name in names]
        direct = ops.attention(problem, operands, backends.select(backend, problem))
        assert "Eager" in type(direct.out.grad_fn).__name__
        through = torch.ops.linbias.attention(*operands, *problem.options, backend)
        grads = (inputs.grad_out, inputs.grad_lse)
        found = torch.autograd.grad((direct.out, direct.lse), leaves, grads)
        for one, other in zip(found, torch.autograd.grad(through[:2], leaves, grads), strict=True):
            assert one.equal(other)

    @every_kernel
    def test_subclasses_go_through_the_operator(self, backend: str):
        class Marked(torch.Tensor):
            pass

        tensor = torch.randn(1, 2, 3, 4)
        out = alibi_attention(tensor.as_subclass(Marked), tensor, tensor, alibi_slopes(2), causal=True, backend=backend)
        assert isinstance(out, Marked)
        plain = alibi_attention(tensor, tensor, tensor, alibi_slopes(2), causal=True, backend=backend)
        assert out.as_subclass(torch.Tensor).equal(plain)


def test_checkpointing_recomputes_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    query = torch.randn(1, 2, 9, 4, requires_grad=True)

    def call(query):
        return alibi_attention(query, query, query, alibi_slopes(2), causal=True, dropout_p=0.5)

    torch.manual_seed(3)
    (wanted,) = torch.autograd.grad(call(query).square().sum(), query)
    torch.manual_seed(3)
    (found,) = torch.autograd.grad(checkpoint(call, query, use_reentrant=False).square().sum(), query)
    assert found.equal(wanted)
