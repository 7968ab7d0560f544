# SPDX-License-Identifier: Apache-2.0
"""Mixed precision that casts what modules are given: slopes and positions keep their digits, and models train."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

import linbias
from linbias.hf.mask import read_mask
from tests.hf.tiny import base, checkpoint_activations, every_family, labels_of, lengths_mask, make, tokens

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: Any, kind: str, *, root: bool) -> Any:
    """Every block by itself, and the model around them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    # What is not sharded itself goes on in float32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=None if root else torch.float32)
    for block in base(model).blocks if kind == "mpt" else base(model).h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy) if root else model


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("root", [False, True], ids=["blocks", "all"])
@pytest.mark.parametrize("fidelity", ["exact", "checkpoint"])
@every_family
def test_fsdp2_in_bfloat16(kind: str, fidelity: Any, root: bool, recomputed: bool):
    """The loss of the unsharded float32 model, and a gradient for every parameter."""
    model, ids, mask = make(kind, layers=2), tokens(2, 13), lengths_mask(13, 8)
    linbias.patch(model, fidelity=fidelity)
    labels = labels_of(ids, mask)
    expected = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.item()
    if recomputed:
        checkpoint_activations(model, reentrant=False)
    model = shard(model.train(), kind, root=root)
    loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    assert abs(loss.item() - expected) < 0.03 * expected
    assert all(parameter.grad is not None for parameter in model.parameters())


def cast_all(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What FSDP, DeepSpeed and others do to a module's inputs."""

    def half(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    return _pytree.tree_map(half, args), _pytree.tree_map(half, kwargs)


@every_family
def test_inputs_cast_by_any_hook(kind: str):
    """Slopes that no half type holds: one cast of them would show at once."""
    model, ids = make(kind, layers=1, heads=6).bfloat16(), tokens(1, 300)
    linbias.patch(model)
    with torch.no_grad():
        expected = model(ids).logits
        for block in base(model).blocks if kind == "mpt" else base(model).h:
            block.register_forward_pre_hook(cast_all, with_kwargs=True)
        assert torch.equal(model(ids).logits, expected)


def test_a_mask_is_one_leaf():
    """And nothing that FSDP1 looks into: it knows dataclasses, too."""
    mask = read_mask(None, None, torch.zeros(1, 5, 8), torch.ones(3), causal=True, counted=True)
    assert _pytree.tree_leaves(mask) == [mask] and not hasattr(mask, "__dataclass_fields__")
