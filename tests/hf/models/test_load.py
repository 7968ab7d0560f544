# SPDX-License-Identifier: Apache-2.0
"""`load` gives back what was saved, by what config.json says, or says why it cannot; nothing is left random."""

import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.models import encoders, folders
from tests.hf.models.folders import WEIGHTS, rewrite

import linbias  # isort: skip
import transformers  # isort: skip
from linbias.hf import load  # isort: skip
from linbias.hf.models import published  # isort: skip
from linbias.hf.models.jina import JinaBertForMaskedLM, JinaBertModel  # isort: skip
from safetensors.torch import save_file  # isort: skip

A_KEY = "bert.encoder.layer.0.attention.self.key.bias"


@pytest.fixture
def model() -> Any:
    return folders.make("jina")


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, 53, (2, 7))


def publish(folder: Path, model: Any, **changes: Any) -> Path:
    return folders.publish(folder, "jina", model, **{"torch_dtype": "float32"} | changes)


def same(one: Any, other: Any) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_published_folder_gives_the_class_it_names(tmp_path: Path, model: Any, ids: torch.Tensor):
    found = load(str(publish(tmp_path, model)))
    assert type(found) is JinaBertForMaskedLM and not found.training and same(found, model)
    assert torch.equal(found(ids).logits, model(ids).logits)


def test_the_loaded_model_attends_with_the_bias(tmp_path: Path, model: Any, ids: torch.Tensor):
    found = load(publish(tmp_path, model), task="base", dtype=torch.float64)
    assert found.pooler is None
    with torch.no_grad():
        for row, vectors in zip(ids, found(ids).last_hidden_state, strict=True):
            encoders.assert_close(vectors, folders.states("jina", model.bert, row).numpy())


def test_a_task_takes_another_class_of_the_family(tmp_path: Path, model: Any):
    publish(tmp_path, model)
    assert same(load(tmp_path, task="base"), model.bert)
    assert same(load(tmp_path, task="masked-lm"), model)


def test_a_folder_that_names_a_head_and_holds_none_gives_the_base_model(tmp_path: Path, model: Any):
    """Jina's embedding models are published so: a masked LM by name, an encoder by its weights."""
    publish(tmp_path, model.bert)
    assert type(load(tmp_path)) is JinaBertModel and same(load(tmp_path), model.bert)
    with pytest.raises(ValueError, match=r"lack cls.predictions.bias, .*; that is its head: pass task='base'"):
        load(tmp_path, task="masked-lm")


def test_a_head_that_the_class_has_no_place_for_is_named(tmp_path: Path, model: Any):
    publish(tmp_path, model, architectures=["JinaBertModel"])
    with pytest.raises(ValueError, match=r"have cls.predictions.bias, .*; that is a head: .* task='base'"):
        load(tmp_path)
    assert same(load(tmp_path, task="base"), model.bert)


def test_what_was_saved_loads_again_and_by_auto_classes(tmp_path: Path, model: Any, ids: torch.Tensor):
    load(publish(tmp_path, model)).save_pretrained(tmp_path / "saved")
    facts = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert facts["model_type"] == "linbias_jina_bert" and "auto_map" not in facts
    assert same(load(tmp_path / "saved"), model)
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "saved")) is JinaBertModel
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_shards_are_one_model(tmp_path: Path, model: Any):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1 and same(load(tmp_path), model)
    index = tmp_path / "model.safetensors.index.json"
    facts = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": facts["weight_map"] | {"more": shards[0].name}}))
    with pytest.raises(ValueError, match="disagree on more"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {name: "../" + shards[0].name for name in facts["weight_map"]}}))
    with pytest.raises(ValueError, match="safetensors of its own folder"):
        load(tmp_path)
    index.write_text(json.dumps(facts))
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of the {len(shards)} files .*: {shards[1].name}"):
        load(tmp_path)


def test_dtype_is_the_folder_s_unless_asked(tmp_path: Path, model: Any):
    publish(tmp_path, model, torch_dtype="bfloat16")
    assert load(tmp_path).dtype == torch.bfloat16
    assert load(tmp_path, dtype=torch.float32).dtype == torch.float32
    publish(tmp_path, model.to(torch.float16), torch_dtype=None)  # then the tensors say
    assert load(tmp_path).dtype == torch.float16


def test_a_device_map_spreads_the_model(tmp_path: Path, model: Any, ids: torch.Tensor):
    pytest.importorskip("accelerate", reason="transformers needs accelerate for a device_map")
    publish(tmp_path, model)
    found = load(tmp_path, device_map={"": "cpu"})
    assert torch.equal(found(ids).logits, model(ids).logits)


def test_what_transformers_holds_comes_patched(tmp_path: Path):
    config = transformers.BloomConfig(vocab_size=31, hidden_size=16, n_layer=2, n_head=2)
    plain = transformers.BloomForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    found = load(tmp_path)
    assert linbias.unpatch(found) == 2
    assert type(found) is transformers.BloomForCausalLM and same(found, plain)


def test_a_falcon_with_rotary_positions_is_refused(tmp_path: Path):
    facts = {"model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": False}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="alibi=False: this Falcon has rotary positions"):
        load(tmp_path)


def test_a_configuration_that_transformers_refuses_is_named(tmp_path: Path):
    facts = {"model_type": "bloom", "architectures": ["BloomModel"], "vocab_size": "53"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    save_file({"ln_f.bias": torch.ones(3)}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match="config.json is not a configuration of bloom: .*'vocab_size'"):
        load(tmp_path)


def test_what_is_raised_or_rightly_left_out_is_not_printed_too(tmp_path: Path, model: Any):
    """transformers would print its LOAD REPORT, which calls missing weights newly initialised."""
    publish(tmp_path, model)
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    theirs = logging.getLogger("transformers.modeling_utils")
    theirs.addHandler(listener)
    try:
        load(tmp_path, task="base")
        with pytest.raises(ValueError, match="lack classifier"):
            load(tmp_path, task="token-classification")
        assert said == [] and not theirs.filters
        JinaBertModel.from_pretrained(tmp_path)  # which shows that they speak
        assert "LOAD REPORT" in said[0]
    finally:
        theirs.removeHandler(listener)


@pytest.mark.parametrize("kind", ["jina", "jina-code"])
def test_tensors_tell_the_layouts_apart_where_the_code_lies_in_the_folder(kind: str, tmp_path: Path):
    """As of a model that was trained on and saved with its code: no repository names the layout."""
    model, local = folders.make(kind), {"AutoModel": "modeling_bert.JinaBertModel"}
    folders.publish(tmp_path, kind, model, auto_map=local, _name_or_path="somebody/embeddings")
    assert type(load(tmp_path)) is type(model)


# Bad input: a change to a good folder, and what the error says.
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no folder": (lambda folder: folder / "nowhere", FileNotFoundError, "is not there; linbias downloads nothing"),
    "a file": (lambda folder: folder / "config.json", FileNotFoundError, "is a file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "holds no config.json; it has "),
    "config cut": (lambda folder: (folder / "config.json").write_text("{"), ValueError, "is not JSON"),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), ValueError, "must hold an object"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), FileNotFoundError, "holds no weights: neither"),
    "pickled": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        ValueError,
        r"pickled only \(pytorch_model.bin\), and linbias never unpickles.*save_file",
    ),
    "truncated": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5]),
        ValueError,
        "not a whole safetensors file of .* bytes .* download it again",
    ),
    "header damaged": (
        lambda folder: (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**40) + b"{}"),
        ValueError,
        "not a whole safetensors file of 10 bytes",
    ),
    "lfs": (
        lambda folder: (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ValueError,
        "pointer of Git LFS: git lfs pull",
    ),
    "adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        ValueError,
        "holds an adapter .* peft.PeftModel",
    ),
    "missing": (lambda folder: rewrite(folder, **{A_KEY: None}), ValueError, f"lack {A_KEY}"),
    "unexpected": (
        lambda folder: rewrite(folder, **{"bert.spam.weight": torch.ones(3)}),
        ValueError,
        "have bert.spam.weight, which it has no place for",
    ),
    "mismatched": (
        lambda folder: rewrite(folder, **{"cls.predictions.bias": torch.ones(54)}),
        ValueError,
        r"other shapes than config.json gives it: cls.predictions.bias \(54,\) and \(53,\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case: str, tmp_path: Path, model: Any):
    change, error, message = BAD[case]
    folder = publish(tmp_path, model)
    changed = change(folder)
    with pytest.raises(error, match=message):
        load(changed if case in ("no folder", "a file") else folder)


def test_the_advice_for_pickled_weights_makes_them_loadable(tmp_path: Path, model: Any, monkeypatch: Any):
    """Tied tensors, stored under both names, among them."""
    torch.save(dict(model.state_dict()), publish(tmp_path, model) / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="pickled only") as refusal:
        load(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(str(refusal.value).partition("trust their source: ")[2])
    assert same(load(tmp_path), model)


def test_tensors_known_to_be_harmless_are_left_aside(tmp_path: Path, model: Any):
    rewrite(publish(tmp_path, model), **{"bert.embeddings.position_ids": torch.arange(40)})
    assert same(load(tmp_path), model)


BERT = {"auto_map": {}, "architectures": ["BertForMaskedLM"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {**BERT, "position_embedding_type": "absolute"},
            "'absolute', not ALiBi: transformers.AutoModel",
        ),
        (BERT, r"of no family that linbias knows \(Baichuan-13B, .*, Refact, bloom, mpt, falcon\): it says"),
        ({"position_embedding_type": "rotary"}, "cannot load the JinaBERT model of .*position_embedding_type='rotary'"),
        ({"architectures": ["JinaBertForQuestionAnswering"]}, "and JinaBERT has JinaBertModel, .*: pass task="),
        ({"architectures": None}, "pass task=, one of base, "),
        ({"vocab_size": "53"}, "vocab_size='53' must be int"),
        ({"hidden_size": None}, "hidden_size=None must be int"),
        ({"layer_norm_eps": "1e-12"}, "layer_norm_eps='1e-12' must be float or int"),
        ({"emb_pooler": True}, "emb_pooler=True must be str or null"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"pad_token_id": 99}, "pad_token_id=99 lies outside of the vocabulary of 53"),
        ({"torch_dtype": "float7"}, "dtype='float7' is none of torch's"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights are not read here"),
    ],
)
def test_configs_that_cannot_be_honoured(changes: dict[str, Any], message: str, tmp_path: Path, model: Any):
    publish(tmp_path, model, **changes)
    with pytest.raises(ValueError, match=message.replace("task=,", r"task=\.\.\.,")):
        load(tmp_path)


def test_a_config_of_another_family_is_told_by_its_weights(tmp_path: Path, model: Any):
    """A BLOOM's config.json beside this model's weights."""
    transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, architectures=["BloomModel"]).save_pretrained(
        tmp_path
    )
    save_file(folders.stored(model), tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=r"bloom weights of .*, read as BloomModel, lack .*; and have bert\."):
        load(tmp_path)


def test_tasks_are_named(tmp_path: Path, model: Any):
    publish(tmp_path, model)
    with pytest.raises(ValueError, match="task must be None or one of base, masked-lm"):
        load(tmp_path, task="feature-extraction")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="task 'causal-lm' has no class here: JinaBERT has JinaBertModel"):
        load(tmp_path, task="causal-lm")


def test_two_claims_to_one_folder_are_an_error(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(published, "_HOMES", (".jina", ".jina"))
    publish(tmp_path, model)
    with pytest.raises(ValueError, match="is of several families: JinaBERT, JinaBERT"):
        load(tmp_path)


def test_every_family_of_ours_has_a_model_type_of_its_own():
    ours = published.families()
    names = [family.config.model_type for family in ours]
    assert len(set(names)) == len(names)
    for family in ours:
        assert family.config.model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        assert published.task_of(next(iter(family.classes))) == "base"
