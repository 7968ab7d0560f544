# SPDX-License-Identifier: Apache-2.0
"""What trainers do with decoders of our own: batches without padding, casts of what modules are given, rollouts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from linbias.errors import BackendUnavailable
from tests.hf.models.dense import KINDS, VOCABULARY, every_kind, make
from tests.hf.tiny import checkpoint_activations, lengths_mask, transformers

from linbias.hf.decoder import CACHE  # isort: skip

SIZES = (5, 2, 7)
# Its slopes follow the length of the row, so that a document in a row is not what it is alone.
every_steady_kind = pytest.mark.parametrize("kind", [name for name in every_kind.args[1] if name != "btlm-trained"])


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


@every_steady_kind
def test_the_collators_batch_is_each_text_alone(kind: str) -> None:
    """All that DataCollatorWithFlattening can say, lengths of the longest among it, and each part of it."""
    model = make(kind).double()
    texts = [ids_of(1, size) for size in SIZES]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator([{"input_ids": text[0].tolist()} for text in texts])
    losses = [model(text, labels=text).loss * (text.shape[1] - 1) for text in texts]
    torch.testing.assert_close(model(**batch).loss, torch.stack(losses).sum() / (sum(SIZES) - len(SIZES)))
    with torch.no_grad():
        alone = torch.cat([model(text).logits for text in texts], 1)
        for name in ("position_ids", "seq_idx", "cu_seq_lens_q"):
            found = model(batch["input_ids"], **{name: batch[name]}, use_cache=False)
            torch.testing.assert_close(found.logits, alone)


@every_kind
@pytest.mark.parametrize("hidden", [-1e9, -torch.inf])
def test_a_mask_of_floats_is_read_as_one_of_four_dimensions(kind: str, hidden: float) -> None:
    model, ids, mask = make(kind), ids_of(2, 9), lengths_mask(9, 6)
    floats = torch.zeros(2, 9).masked_fill(mask == 0, hidden)
    with torch.no_grad():
        found, wanted = (model(ids, attention_mask=given).logits for given in (floats, mask))
    assert torch.equal(found[mask.bool()], wanted[mask.bool()])


@pytest.mark.parametrize("sizes", [(4, 5), (7, 7), (4, 7), (13, 1)], ids=str)
def test_slopes_that_follow_the_length_follow_the_documents(sizes: tuple[int, int]) -> None:
    """Not the row's; and documents that need different ones, one being longer than the 6 tokens of training, raise."""
    model, ids = make("btlm-trained").double(), ids_of(1, sum(sizes))
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    numbers = (positions == 0).long().cumsum(-1)
    for way in ({"position_ids": positions}, {"attention_mask": numbers}, {"attention_mask": numbers * 40}):
        if len({max(size, 6) for size in sizes}) > 1:
            with pytest.raises(ValueError, match=r"train_seq_len=6, got lengths .*: give each a row, padded"):
                model(ids, use_cache=False, **way)
            continue
        with torch.no_grad():
            found = model(ids, use_cache=False, **way).logits
            torch.testing.assert_close(found, torch.cat([model(part).logits for part in ids.split(sizes, 1)], 1))


@every_kind
def test_a_rollout_in_training_mode_with_checkpointing(kind: str) -> None:
    undropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = make(kind, **undropped if "n_embd" in KINDS[kind][1] else {})
    ids, mask = ids_of(2, 9), lengths_mask(9, 6)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    checkpoint_activations(model, reentrant=False)
    with torch.no_grad():
        assert torch.equal(model.train().generate(ids, **options), wanted)
    model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()


@every_kind
def test_the_paged_cache_is_named(kind: str) -> None:
    """Not what generate_batch hands in beside it."""
    paged = type("PagedAttentionCache", (), {})()
    more = {"logits_indices": torch.zeros(1), "read_index": [], "use_cache": False}
    with pytest.raises(TypeError, match="the paged cache of generate_batch .* is not supported; call generate"):
        make(kind)(ids_of(1, 5), **{CACHE: paged}, **more)


@every_kind
def test_inputs_cast_by_any_hook(kind: str) -> None:
    """Slopes that no half type holds: one cast of them would show at once."""
    model, ids = make(kind).bfloat16(), ids_of(1, 200)

    def half(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    with torch.no_grad():
        wanted = model(ids).logits
        for part in model.modules():
            cast = lambda _, *given: _pytree.tree_map(half, given)  # noqa: E731
            part.register_forward_pre_hook(cast, with_kwargs=True)
        assert torch.equal(model(ids).logits, wanted)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("kind", ["baichuan2", "jais", "refact", "mpt-grouped"])
def test_fsdp2_in_bfloat16(kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, ids = make(kind), ids_of(2, 13)
    wanted = model.eval()(ids, labels=ids, use_cache=False).loss.item()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, policy = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in getattr(model.base_model, model.base_model.blocks_name):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        loss = fully_shard(model, mesh=mesh, mp_policy=policy)(ids, labels=ids, use_cache=False).loss
        loss.backward()
    finally:
        dist.destroy_process_group()
    assert abs(loss.item() - wanted) < 0.05 * wanted
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_a_second_derivative_says_that_there_is_none() -> None:
    model, ids = make("refact"), ids_of(1, 5)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    (first,) = torch.autograd.grad(logits.square().sum(), embedded, create_graph=True)
    with pytest.raises(BackendUnavailable, match="models of linbias.hf.models cannot be asked for another backend"):
        first.square().sum().backward()
