# SPDX-License-Identifier: Apache-2.0
"""torch.compile and torch.export: one graph, whatever the lengths."""

import pytest
import torch
import torch._dynamo.testing

from linbias import alibi_attention, alibi_attention_varlen, alibi_slopes, backends
from linbias.testing import Case, make_inputs
from tests.every import every_backend, every_kernel, skip_unless_it_can

kernels_first = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.slow if getattr(backends, name).COMPOSITE else [])
        for name in backends.available()
    ],
)
# torch's compiler still calls torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


def make_call(backend: str, **options):
    def call(query, key, value, slopes, key_mask):
        out, aux = alibi_attention(
            query, key, value, slopes, causal=True, window=(6, 0), sinks=1, key_mask=key_mask, unbiased=1,
            backend=backend, return_aux=True, **options,
        )  # fmt: skip
        return out, aux.lse

    return call


def make_arguments(queries: int = 5, keys: int = 9, grad: bool = True) -> tuple:
    inputs = make_inputs(Case(heads=6, kv_heads=2, queries=queries, keys=keys, head_dim=8, causal=True))
    leaves = [getattr(inputs, name).clone().requires_grad_(grad) for name in ("query", "key", "value", "slopes")]
    return (*leaves, torch.arange(keys) != 3)


def compare(compiled, plain, arguments: tuple) -> None:
    leaves = arguments[:4]
    found, wanted = compiled(*arguments), plain(*arguments)
    directions = [torch.randn_like(result) for result in wanted]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    gradients = [torch.autograd.grad(results, leaves, directions) for results in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@every_backend
def test_compiles_once_for_all_lengths(backend: str):
    torch._dynamo.reset()
    # What autograd sees through has no backward of its own to trace.
    composite = getattr(backends, backend).COMPOSITE
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager" if composite else "aot_eager")
    call = make_call(backend)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    compare(compiled, call, make_arguments(5, 9))
    count = counter.frame_count
    for queries, keys in ((11, 17), (3, 12), (7, 8)):
        compare(compiled, call, make_arguments(queries, keys))
    assert counter.frame_count == count


@pytest.mark.slow
@every_kernel
def test_compiles_with_inductor(backend: str):
    torch._dynamo.reset()
    call = make_call(backend)
    compare(torch.compile(call, fullgraph=True), call, make_arguments())


@every_kernel
@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_compiled_training_step_over_transposed_heads(backend: str, batch: int):
    """(B, T, H, D) projections, seen as (B, H, T, D): inductor checks the strides of every gradient it is given."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    weight, tokens = torch.randn(12, 36, requires_grad=True), torch.randn(batch, 9, 12)
    slopes = alibi_slopes(3).requires_grad_()

    def step(weight, slopes):
        query, key, value = (tokens @ weight).view(batch, 9, 3, 3, 4).unbind(2)
        heads = (each.transpose(1, 2) for each in (query, key, value))
        return alibi_attention(*heads, slopes, causal=True, backend=backend).transpose(1, 2).square().sum()

    compiled = torch.compile(step, fullgraph=True)
    found, wanted = (torch.autograd.grad(run(weight, slopes), (weight, slopes)) for run in (compiled, step))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@every_backend
def test_compiles_with_dropout(backend: str):
    torch._dynamo.reset()
    compiled = torch.compile(make_call(backend, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    arguments = make_arguments(grad=False)
    first, second = compiled(*arguments)[0], compiled(*arguments)[0]
    assert not first.equal(second), "the seed is drawn anew in each call"


@pytest.mark.slow
def test_compiles_varlen():
    torch._dynamo.reset()
    ends, slopes = torch.tensor([0, 3, 7]), alibi_slopes(2)

    def call(tokens):
        return alibi_attention_varlen(tokens, tokens, tokens, slopes, ends, ends, 4, 4, causal=True)

    tokens = torch.randn(7, 2, 4)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), call(tokens))


def test_compiled_calls_check_their_arguments():
    torch._dynamo.reset()

    def call(query, slopes):
        return alibi_attention(query, query, query, slopes, causal=True)

    compiled = torch.compile(call, backend="eager")
    with pytest.raises(Exception, match="slopes must have shape"):
        compiled(torch.zeros(1, 2, 3, 4), torch.zeros(5))


@kernels_first
def test_exports_with_dynamic_lengths(backend: str):
    skip_unless_it_can(backend, make_inputs(Case()))

    class Module(torch.nn.Module):
        def forward(self, query, key, value, slopes, key_mask):
            return call(query, key, value, slopes, key_mask)

    call = make_call(backend)
    queries, keys = torch.export.Dim("queries", min=2, max=4096), torch.export.Dim("keys", min=2, max=4096)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys}, None, {0: keys})
    program = torch.export.export(Module(), make_arguments(grad=False), dynamic_shapes=shapes)
    for sizes in ((5, 9), (31, 40), (40, 31)):
        arguments = make_arguments(*sizes, grad=False)
        for one, other in zip(program.module()(*arguments), call(*arguments), strict=True):
            torch.testing.assert_close(one, other)
