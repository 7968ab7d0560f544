# SPDX-License-Identifier: Apache-2.0
"""Every family from a folder as its authors published it, by `load`, and what users then do with the model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import linbias
from tests.hf.models import dense, encoders, folders
from tests.hf.models.folders import ENCODERS, FACTS, WEIGHTS, make, publish

import transformers  # isort: skip
from linbias.hf import load  # isort: skip
from safetensors import safe_open  # isort: skip

every_kind = pytest.mark.parametrize("kind", FACTS)
every_decoder = pytest.mark.parametrize("kind", [kind for kind in FACTS if kind not in ENCODERS])
# Its steps have slopes of their own, see test_jais.py.
every_steady_decoder = pytest.mark.parametrize("kind", [k for k in FACTS if k not in (*ENCODERS, "btlm-trained")])


def ids_of(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(1, 53, (batch, length))


@every_kind
def test_a_published_folder_computes_the_formula(kind: str, tmp_path: Path) -> None:
    model, ids = make(kind), ids_of()
    found = load(publish(tmp_path, kind, model), dtype=torch.float64)
    assert type(found) is type(model)
    with torch.no_grad():
        if kind in ENCODERS:
            for row, vectors in zip(ids, found.bert(ids).last_hidden_state, strict=True):
                encoders.assert_close(vectors, folders.states(kind, model.bert, row).numpy())
        else:
            exact = dense.logits(kind, {name: part.double() for name, part in model.state_dict().items()}, ids)
            encoders.assert_close(found(ids).logits, exact.detach().numpy())


@every_kind
def test_what_was_loaded_saves_and_loads_again(kind: str, tmp_path: Path) -> None:
    model, ids = make(kind), ids_of()
    names = set(folders.stored(model))
    found = load(publish(tmp_path, kind, model), dtype=torch.float32)
    found.save_pretrained(tmp_path / "whole")
    found.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    with safe_open(tmp_path / "whole" / WEIGHTS, "pt") as held:
        assert set(held.keys()) == names  # the published ones
    for place in ("whole", "cut"):
        again = load(tmp_path / place)
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits), place
    base = load(tmp_path / "whole", task="base")
    with torch.no_grad():
        assert torch.equal(base(ids)[0], model.base_model(ids)[0])
    auto = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    assert type(auto) is type(base)


@every_kind
def test_the_dtype_is_what_the_folder_says(kind: str, tmp_path: Path) -> None:
    publish(tmp_path, kind, make(kind))
    assert load(tmp_path).dtype == getattr(torch, FACTS[kind]["torch_dtype"])


@every_kind
def test_weights_may_be_spread_by_a_device_map(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs accelerate for a device_map")
    model, ids = make(kind), ids_of()
    found = load(publish(tmp_path, kind, model), dtype=torch.float32, device_map="cpu")
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


@every_steady_decoder
@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_from_padded_prompts_is_each_prompts_own(kind: str, side: str, tmp_path: Path) -> None:
    model, real = load(publish(tmp_path, kind, make(kind)), dtype=torch.float64), torch.ones(3, 7, dtype=torch.int64)
    real[0, :3] = real[2, :6] = 0
    real = real if side == "left" else real.flip(1)
    ids, options = ids_of(3, 7), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached, plain = (
        model.generate(ids, attention_mask=real, use_cache=cache, **options)[:, 7:] for cache in (True, False)
    )
    assert cached.tolist() == plain.tolist()
    if side == "left":  # after padding on the right a text goes on at a distance
        alone = [
            model.generate(row[keep][None], **options)[0, int(keep.sum()) :]
            for row, keep in zip(ids, real > 0, strict=True)
        ]
        assert cached.tolist() == torch.stack(alone).tolist()


@every_decoder
def test_a_head_is_the_embeddings_only_where_the_folder_says_so(kind: str, tmp_path: Path) -> None:
    model, head = make(kind), torch.randn(53, 48)
    own = publish(tmp_path, kind, {**folders.stored(model), "lm_head.weight": head}, tie_word_embeddings=False)
    assert torch.equal(load(own, dtype=torch.float32).lm_head.weight, head)
    tensors = {name: part for name, part in folders.stored(model).items() if name != "lm_head.weight"}
    tied = load(publish(tmp_path, kind, tensors, tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    with pytest.raises(ValueError, match="lack lm_head.weight; that is its head"):
        load(publish(tmp_path, kind, tensors, tie_word_embeddings=False))


@every_kind
def test_a_grown_vocabulary_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model, ids = make(kind), ids_of()
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(61)
        grown = model(ids).logits
        model.save_pretrained(tmp_path)
        assert torch.equal(load(tmp_path)(ids).logits, grown)
    # A product with more rows may add in another order: of 48 terms, each rounded once, and of a norm near 1.
    assert grown.shape[-1] == 61
    assert (grown[..., :53] - before).abs().max() <= 48 * torch.finfo(torch.float32).eps * before.abs().max()


@every_decoder
def test_a_caller_may_say_none_of_what_is_returned(kind: str) -> None:
    """As peft's models do."""
    model, ids = make(kind), ids_of()
    with torch.no_grad():
        found = model(ids, labels=ids, return_dict=None, output_attentions=None, use_cache=None)
    assert found.loss is not None and isinstance(model(ids, return_dict=False), tuple)


ALIBI = {"alibi": True}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mosaic", {"num_attention_heads": 7}, "hidden_size=30 is no multiple of num_attention_heads=7"),
    ("baichuan", {"num_attention_heads": 7}, "hidden_size=48 is no multiple of num_attention_heads=7"),
    ("baichuan", {"hidden_act": "spam"}, "hidden_act='spam' is no activation of transformers"),
    ("baichuan", {"pad_token_id": 60}, "pad_token_id=60 lies outside of the vocabulary of 53"),
    ("jais", {"n_head": 7}, "n_embd=48 is no multiple of n_head=7"),
    ("jais", {"activation_function": "spam"}, "activation_function='spam' is no activation"),
    ("jais", {"width_scale": "0.1"}, "width_scale='0.1' must be a number"),
    ("btlm-trained", {"position_embedding_type": "learned"}, "position_embedding_type='learned' .* is not ALiBi"),
    ("refact", {"n_head": 7}, "n_embd=48 is no multiple of n_head=7"),
    ("mpt", {"n_heads": 7}, "d_model=48 is no multiple of n_heads=7"),
    ("mpt", {"attn_config": {"alibi": False}}, r"attn_config\['alibi'\]=False: without ALiBi there is nothing"),
    ("mpt", {"attn_config": {**ALIBI, "alibi_bias_max": 0}}, r"\['alibi_bias_max'\]=0: a number above 0"),
    ("mpt", {"attn_config": {**ALIBI, "softmax_scale": "x"}}, r"\['softmax_scale'\]='x': null or a number"),
    ("mpt", {"attn_config": {**ALIBI, "clip_qkv": -1}}, r"\['clip_qkv'\]=-1: null or a number of at least 0"),
    ("mpt", {"attn_config": {**ALIBI, "attn_pdrop": 2}}, r"\['attn_pdrop'\]=2: a number from 0 to 1"),
    (
        "mpt",
        {"ffn_config": {"ffn_act_fn": "gelu"}},
        r"\['ffn_act_fn'\] names 'gelu': known are .'name': .* of gelu",
    ),
]


@pytest.mark.parametrize(("kind", "wrong", "message"), WRONG, ids=lambda part: str(part)[:40])
def test_what_cannot_be_is_refused_before_the_weights_are_read(
    kind: str, wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    publish(tmp_path, kind, {}, **wrong)
    with pytest.raises(ValueError, match=f"cannot load the .* model of .*: .*{message}"):
        load(tmp_path)


ADAPTED = {"baichuan": "W_pack", "baichuan2": "W_pack", "mpt": "Wqkv", "mpt-grouped": "Wqkv", "refact": "kv"}


@every_decoder
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers renames
def test_adapters_train_generate_and_merge(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    target, conv = ADAPTED.get(kind, "c_attn"), kind not in ADAPTED
    options = peft.LoraConfig(target_modules=[target], task_type="CAUSAL_LM", fan_in_fan_out=conv)
    adapted, ids = peft.get_peft_model(make(kind), options), ids_of()
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert sum("lora_B" in name and part.grad is not None for name, part in adapted.named_parameters()) == 2
    assert adapted.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape == (2, 11)
    adapted.merge_and_unload().save_pretrained(tmp_path)
    assert type(load(tmp_path)) is type(make(kind))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A group of one process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@every_kind
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # a linear layer with a bias gives a view
def test_layers_may_be_sharded(kind: str, alone: Any) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP")
    model, ids = make(kind), ids_of()
    with torch.no_grad():
        before = model(ids).logits
    layers = model.bert.encoder.layer if kind in ENCODERS else getattr(model.base_model, model.base_model.blocks_name)
    for part in (*layers, model):
        fsdp.fully_shard(part, mesh=alone)
    out = model(ids, labels=ids)
    assert torch.equal(out.logits, before)
    out.loss.backward()
    assert all(part.grad is not None for part in layers.parameters())


NATIVE: dict[str, Any] = {
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
    "mpt": {"d_model": 48, "n_layers": 2, "n_heads": 6, "expansion_ratio": 2, "attn_config": {"alibi": True}},
    "falcon": {
        **{"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "alibi": True, "multi_query": False},
        **{"new_decoder_architecture": False, "parallel_attn": False, "bos_token_id": 1, "eos_token_id": 2},
    },
}


@pytest.mark.parametrize("prefixed", [True, False], ids=["as saved", "as BLOOM's authors did"])
@pytest.mark.parametrize("kind", NATIVE)
def test_what_transformers_holds_loads_patched_from_either_form(kind: str, prefixed: bool, tmp_path: Path) -> None:
    name = kind.capitalize()
    config = getattr(transformers, f"{name}Config")(vocab_size=53, **NATIVE[kind])
    plain, ids = getattr(transformers, f"{name}ForCausalLM")(config).eval(), ids_of()
    plain.save_pretrained(tmp_path)
    if not prefixed:
        tensors = {part.removeprefix("transformer."): value for part, value in folders.stored(plain).items()}
        folders.save(tmp_path, tensors)
    found = load(tmp_path)
    linbias.patch(plain)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, plain(ids).logits)
        assert torch.equal(load(tmp_path, task="base")(ids)[0], plain.transformer(ids)[0])
