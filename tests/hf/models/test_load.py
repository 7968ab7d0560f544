# SPDX-License-Identifier: Apache-2.0
"""`load` gives back what was saved, by what config.json says, or says why it cannot; nothing is left random."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import linbias
from linbias.hf import load
from linbias.hf.models import published
from linbias.testing import assert_within_budget
from tests.hf.models import encoder
from tests.hf.models.encoder import TinyConfig, TinyForMaskedLM, TinyModel, publish

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder.teach(monkeypatch)


@pytest.fixture
def model() -> TinyForMaskedLM:
    return TinyForMaskedLM(TinyConfig()).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(31, (2, 7))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Tensors of the folder replaced, added or, by None, left out."""
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({name: part for name, part in tensors.items() if part is not None}, folder / WEIGHTS, {"format": "pt"})


def same(one: Any, other: Any) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_published_folder_gives_the_class_it_names(tmp_path: Path, model: TinyForMaskedLM, ids: torch.Tensor):
    found = load(str(publish(tmp_path, model)))
    assert type(found) is TinyForMaskedLM and not found.training and same(found, model)
    assert torch.equal(found(ids).logits, model(ids).logits)


def test_the_loaded_model_attends_with_the_bias(tmp_path: Path, model: TinyForMaskedLM, ids: torch.Tensor):
    found = load(publish(tmp_path, model), task="base")(ids).last_hidden_state
    exact = torch.stack([encoder.dense(model.bert, row) for row in ids])
    plain = torch.stack([encoder.dense(model.bert, row, torch.float32) for row in ids])
    assert_within_budget(found, exact, plain, "last_hidden_state")


def test_a_task_takes_another_class_of_the_family(tmp_path: Path, model: TinyForMaskedLM):
    publish(tmp_path, model)
    assert same(load(tmp_path, task="base"), model.bert)
    assert same(load(tmp_path, task="masked-lm"), model)


def test_a_folder_that_names_a_head_and_holds_none_gives_the_base_model(tmp_path: Path, model: TinyForMaskedLM):
    """Jina's embedding models are published so: a masked LM by name, an encoder by its weights."""
    publish(tmp_path, model.bert, architectures=["TinyForMaskedLM"])
    assert type(load(tmp_path)) is TinyModel and same(load(tmp_path), model.bert)
    with pytest.raises(ValueError, match=r"lack cls.bias, cls.weight; that is its head: pass task='base'"):
        load(tmp_path, task="masked-lm")


def test_a_head_that_the_class_has_no_place_for_is_named(tmp_path: Path, model: TinyForMaskedLM):
    publish(tmp_path, model, architectures=["TinyModel"])
    with pytest.raises(ValueError, match=r"have cls.bias, cls.weight, .*; that is a head: .* task='base'"):
        load(tmp_path)
    assert same(load(tmp_path, task="base"), model.bert)


def test_what_was_saved_loads_again_and_by_auto_classes(tmp_path: Path, model: TinyForMaskedLM, ids: torch.Tensor):
    load(publish(tmp_path / "published", model)).save_pretrained(tmp_path / "saved")
    facts = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert facts["model_type"] == "tests-tiny" and "auto_map" not in facts
    assert same(load(tmp_path / "saved"), model)
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "saved")) is TinyModel
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_shards_are_one_model(tmp_path: Path, model: TinyForMaskedLM):
    model.save_pretrained(tmp_path, max_shard_size="8KB")
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


def test_dtype_is_the_folder_s_unless_asked(tmp_path: Path, model: TinyForMaskedLM):
    publish(tmp_path, model.to(torch.bfloat16))
    assert load(tmp_path).dtype == torch.bfloat16
    assert load(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_device_map_spreads_the_model(tmp_path: Path, model: TinyForMaskedLM, ids: torch.Tensor):
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
    "missing": (lambda folder: rewrite(folder, **{"bert.qkv.bias": None}), ValueError, "lack bert.qkv.bias"),
    "unexpected": (
        lambda folder: rewrite(folder, **{"bert.pooler.weight": torch.ones(3)}),
        ValueError,
        "have bert.pooler.weight, which it has no place for",
    ),
    "mismatched": (
        lambda folder: rewrite(folder, **{"cls.bias": torch.ones(32)}),
        ValueError,
        r"other shapes than config.json gives it: cls.bias \(32,\) and \(31,\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case: str, tmp_path: Path, model: TinyForMaskedLM):
    change, error, message = BAD[case]
    folder = publish(tmp_path, model)
    changed = change(folder)
    with pytest.raises(error, match=message):
        load(changed if case in ("no folder", "a file") else folder)


def test_tensors_known_to_be_harmless_are_left_aside(tmp_path: Path, model: TinyForMaskedLM):
    rewrite(publish(tmp_path, model), **{"bert.position_ids": torch.arange(40)})
    assert same(load(tmp_path), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {}, "position_embedding_type": "absolute"}, "'absolute', not ALiBi: transformers.AutoModel"),
        ({"auto_map": {}}, r"of no family that linbias knows \(tiny, bloom, mpt, falcon\): it says"),
        ({"position_embedding_type": "rotary"}, "cannot load the tiny model of .*position_embedding_type='rotary'"),
        ({"architectures": ["TinyForQuestionAnswering"]}, "and tiny has TinyModel, TinyForMaskedLM: pass task="),
        ({"architectures": None}, "pass task=, one of base, "),
    ],
)
def test_configs_that_cannot_be_honoured(changes: dict[str, Any], message: str, tmp_path: Path, model: TinyForMaskedLM):
    publish(tmp_path, model, **changes)
    with pytest.raises(ValueError, match=message.replace("task=,", r"task=\.\.\.,")):
        load(tmp_path)


def test_a_config_of_another_family_is_told_by_its_weights(tmp_path: Path, model: TinyForMaskedLM):
    """A BLOOM's config.json beside this model's weights."""
    transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, architectures=["BloomModel"]).save_pretrained(
        tmp_path
    )
    save_file(model.state_dict(), tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=r"bloom weights of .*, read as BloomModel, lack .*; and have bert\."):
        load(tmp_path)


def test_tasks_are_named(tmp_path: Path, model: TinyForMaskedLM):
    publish(tmp_path, model)
    with pytest.raises(ValueError, match="task must be None or one of base, masked-lm"):
        load(tmp_path, task="feature-extraction")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="task 'causal-lm' has no class here: tiny has TinyModel"):
        load(tmp_path, task="causal-lm")


def test_two_claims_to_one_folder_are_an_error(tmp_path: Path, model: TinyForMaskedLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(published, "_HOMES", (encoder.__name__, encoder.__name__))
    publish(tmp_path, model)
    with pytest.raises(ValueError, match="is of several families: tiny, tiny"):
        load(tmp_path)


def test_every_family_of_ours_has_a_model_type_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    ours = published.families()
    names = [family.config.model_type for family in ours]
    assert len(set(names)) == len(names)
    for family in ours:
        assert family.config.model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        assert published.task_of(next(iter(family.classes))) == "base"
