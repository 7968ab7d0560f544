# SPDX-License-Identifier: Apache-2.0
"""What surrounds a call: autocast, devices without contents, threads, modes, global settings of torch."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linbias import alibi_attention, alibi_slopes
from linbias.testing import Case, evaluate, make_inputs
from tests.every import every_backend


def qkv(queries: int = 5, keys: int = 7, heads: int = 3, dtype: torch.dtype = torch.float32):
    inputs = make_inputs(Case(heads=heads, queries=queries, keys=keys, head_dim=4, value_dim=6, dtype=dtype))
    return inputs.query, inputs.key, inputs.value, inputs.slopes


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_q_k_v_and_nothing_else(backend: str, dtype: torch.dtype):
    query, key, value, slopes = qkv()
    with torch.autocast("cpu", dtype):
        out, aux = alibi_attention(query, key, value, slopes, causal=True, backend=backend, return_aux=True)
    half = [tensor.to(dtype) for tensor in (query, key, value)]
    wanted, wanted_aux = alibi_attention(*half, slopes, causal=True, backend=backend, return_aux=True)
    assert out.dtype == dtype and out.equal(wanted)
    assert aux.lse.dtype == torch.float32 and aux.lse.equal(wanted_aux.lse)


@every_backend
def test_autocast_and_backward(backend: str):
    query, key, value, slopes = (tensor.requires_grad_() for tensor in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        out = alibi_attention(query, key, value, slopes, causal=True, backend=backend)
    out.float().sum().backward()
    for tensor in (query, key, value, slopes):
        assert tensor.grad.dtype == torch.float32 and tensor.grad.isfinite().all()


@every_backend
def test_autocast_leaves_float64_alone(backend: str):
    call = qkv(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = alibi_attention(*call, causal=True, backend=backend)
    assert out.dtype == torch.float64 and out.equal(alibi_attention(*call, causal=True, backend=backend))


@pytest.mark.parametrize("fake", [False, True])
def test_shapes_without_contents(fake: bool):
    """Nothing reads a value: on the meta device and under FakeTensorMode there is none to read."""
    with FakeTensorMode() if fake else torch.device("meta"):
        query = torch.empty(2, 6, 5, 4, dtype=torch.bfloat16, requires_grad=True)
        key, value = torch.empty(2, 3, 7, 4).bfloat16(), torch.empty(2, 3, 7, 8).bfloat16()
        rows = torch.empty(2, 7, dtype=torch.int64)
        out, aux = alibi_attention(
            query, key, value, torch.empty(6), causal=True, window=(3, 0), sinks=1, prefix=2,
            key_mask=torch.empty(7, dtype=torch.bool), query_segments=rows[:, :5], key_segments=rows,
            query_positions=rows[:, :5], key_positions=rows, future_slopes=torch.empty(2, 6), unbiased=1,
            softcap=2.0, dropout_p=0.1, return_aux=True,
        )  # fmt: skip
        out.sum().backward()
    assert out.shape == (2, 6, 5, 8) and out.dtype == torch.bfloat16 and aux.lse.dtype == torch.float32
    assert out.device.type == ("cpu" if fake else "meta") and query.grad.shape == query.shape


@every_backend
def test_threads_get_what_one_gets(backend: str):
    calls = [qkv(queries=5 + index, keys=33) for index in range(4)]
    wanted = [alibi_attention(*call, causal=True, backend=backend) for call in calls]
    found: list = [None] * 4

    def work(index: int) -> None:
        for _ in range(5):
            found[index] = alibi_attention(*calls[index], causal=True, backend=backend)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, wanted, strict=True):
        assert one.equal(other)


@every_backend
def test_modules_that_call_it_can_be_copied(backend: str):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(4, 4)

        def forward(self, tokens):
            mixed = self.mix(tokens)
            return alibi_attention(mixed, mixed, mixed, alibi_slopes(3), causal=True, backend=backend)

    layer, tokens = Layer(), torch.randn(1, 3, 5, 4)
    assert copy.deepcopy(layer)(tokens).equal(layer(tokens))


@every_backend
def test_no_state_is_left_behind(backend: str):
    first = alibi_attention(*qkv(), causal=True, backend=backend)
    for queries, keys in ((9, 9), (1, 40), (6, 3)):
        alibi_attention(*qkv(queries, keys), causal=False, backend=backend)
    assert alibi_attention(*qkv(), causal=True, backend=backend).equal(first)


@every_backend
def test_subclasses_and_parameters(backend: str):
    query, key, value, slopes = qkv()
    out = alibi_attention(
        torch.nn.Parameter(query), key, value, torch.nn.Parameter(slopes), causal=True, backend=backend
    )
    assert out.requires_grad
    assert out.equal(alibi_attention(query, key, value, slopes, causal=True, backend=backend))


def test_inference_mode():
    call = qkv()
    with torch.inference_mode():
        out = alibi_attention(*call, causal=True)
    assert out.equal(alibi_attention(*call, causal=True))


@every_backend
def test_gradients_reach_expanded_and_batched_slopes(backend: str):
    query, key, value, slopes = qkv()
    shared = slopes.clone().requires_grad_()
    alibi_attention(query, key, value, shared.expand(2, 3), causal=True, backend=backend).sum().backward()
    batched = slopes.expand(2, 3).clone().requires_grad_()
    alibi_attention(query, key, value, batched, causal=True, backend=backend).sum().backward()
    assert batched.grad.shape == (2, 3) and not batched.grad[0].equal(batched.grad[1])
    torch.testing.assert_close(shared.grad, batched.grad.sum(0), rtol=1e-5, atol=1e-6)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    """Also fills what torch.empty returns with NaN, so that nothing unwritten is read."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}
CASES = (
    Case(heads=4, kv_heads=2, queries=70, keys=133, causal=True),
    Case(mask="full", segments="mixed", positions="items", future="items", unbiased=2, softcap=4.0, poison=True),
    Case(positions="points", metric="euclidean", padding="left", dropout_p=0.25, slopes="mixed"),
    Case(batch=1, heads=3, kv_heads=1, queries=321, keys=321, causal=True, window=(70, 0), prefix=40, sinks=3),
)


@every_backend
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_global_settings_change_no_bit(backend: str, setting, case: Case):
    inputs = make_inputs(case)
    plain, aux = evaluate(inputs, backend)
    with setting():
        found, found_aux = evaluate(inputs, backend)
    for name, tensor in plain.items():
        assert found[name].equal(tensor), name
    assert found_aux.skipped.equal(aux.skipped) and found_aux.computed.equal(aux.computed)
