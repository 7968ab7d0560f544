# SPDX-License-Identifier: Apache-2.0
"""`patch` and `unpatch`: what they change, what they leave alone, what they survive, and what they refuse."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import linbias
from tests.hf.tiny import HEADS, base, every_family, every_kind, make, tokens, transformers


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(part) for name, part in model.named_modules()}


class TestReport:
    @every_kind
    def test_what_was_done(self, kind: str):
        model = make(kind, layers=3)
        report = linbias.patch(model)
        (decoder,) = report.decoders
        assert report.layers == 3 and report.fidelity == "exact" and report.not_covered == ()
        assert decoder.name == "transformer" and decoder.family == kind.split("-", maxsplit=1)[0]
        assert all(model.get_submodule(name).uses_alibi for name in decoder.layers)
        assert decoder.convention in str(report) and "3 attention layers" in str(report)

    @pytest.mark.parametrize("head", HEADS)
    @every_family
    def test_every_head_is_found(self, kind: str, head: str):
        assert linbias.patch(make(kind, head, layers=2)).layers == 2

    def test_two_models_in_one(self):
        pair = nn.ModuleDict({"bloom": make("bloom", layers=1), "mpt": make("mpt", layers=2)})
        report = linbias.patch(pair)
        assert report.layers == 3
        assert [decoder.family for decoder in report.decoders] == ["bloom", "mpt"]

    def test_differences_are_told(self):
        mpt = linbias.patch(make("mpt", attn_config={"alibi_bias_max": 16}))
        assert "alibi_bias_max=16" in mpt.decoders[0].differences[0]
        assert "bfloat16" in linbias.patch(make("bloom").bfloat16()).decoders[0].differences[0]
        assert linbias.patch(make("bloom")).decoders[0].differences == ()
        assert len(linbias.patch(make("falcon"), fidelity="checkpoint").decoders[0].differences) == 1

    @pytest.mark.parametrize(
        "name, value",
        [("resid_pdrop", 0.1), ("emb_pdrop", 0.2), ("embedding_fraction", 0.5), ("no_bias", False)]
        + [("expansion_ratio", 2)],
    )
    def test_what_has_no_effect_is_told(self, name: str, value: Any):
        report = linbias.patch(make("mpt", layers=1, **{name: value}))
        assert report.not_covered == (f"{name}={value}: transformers' MPT does not read it",)
        assert name in str(report)


class TestUndo:
    @every_kind
    def test_exactly(self, kind: str):
        model, ids = make(kind), tokens(2, 9)
        before, attributes = classes(model), {name: set(vars(part)) for name, part in model.named_modules()}
        with torch.no_grad():
            logits = model(ids).logits
        linbias.patch(model)
        assert classes(model) != before
        assert linbias.unpatch(model) == 3
        assert classes(model) == before
        assert {name: set(vars(part)) for name, part in model.named_modules()} == attributes
        with torch.no_grad():
            assert torch.equal(model(ids).logits, logits)

    def test_at_the_end_of_a_block_also_after_an_error(self):
        model = make("bloom")
        before = classes(model)
        with pytest.raises(RuntimeError, match="inside"), linbias.patch(model) as report:
            assert report.layers == 3
            raise RuntimeError("inside")
        assert classes(model) == before

    def test_the_end_of_a_block_undoes_what_its_call_did(self):
        """Not what was there before, and nothing where the block undid it: its own error must come through."""
        pair = nn.ModuleDict({"a": make("bloom", layers=1), "b": make("mpt", layers=1)})
        with linbias.patch(pair["b"]):
            linbias.patch(pair["a"], fidelity="checkpoint")
            patched = classes(pair["a"])
        assert classes(pair["a"]) == patched and base(pair["a"]).linbias_fidelity == "checkpoint"
        assert type(base(pair["b"])) is transformers.MptModel
        with pytest.raises(KeyError, match="the user's"), linbias.patch(pair["b"]):
            linbias.unpatch(pair["b"])
            raise KeyError("the user's")
        with linbias.patch(pair["b"]):
            linbias.unpatch(pair)
        assert type(base(pair["a"])) is transformers.BloomModel

    def test_nothing_to_undo(self):
        with pytest.raises(ValueError, match="nothing in this BloomForCausalLM is patched"):
            linbias.unpatch(make("bloom"))


class TestSurvival:
    @every_family
    def test_parameters_and_their_names(self, kind: str):
        model = make(kind)
        before = {name: parameter.data_ptr() for name, parameter in model.state_dict(keep_vars=True).items()}
        linbias.patch(model)
        after = {name: parameter.data_ptr() for name, parameter in model.state_dict(keep_vars=True).items()}
        assert before == after

    @pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
    @every_kind
    def test_copies_stay_patched(self, kind: str, way: str):
        model, ids = make(kind, layers=2), tokens(2, 9)
        linbias.patch(model)
        if way == "deepcopy":
            twin = copy.deepcopy(model)
        elif way == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert classes(twin) == classes(model)
        with torch.no_grad():
            assert torch.equal(twin(ids).logits, model(ids).logits)
        assert linbias.unpatch(twin) == 2
        assert base(model).linbias_fidelity == "exact", "the copy is not the model"

    @every_family
    def test_save_pretrained(self, kind: str, tmp_path: Path):
        model, ids = make(kind, layers=2), tokens(2, 9)
        model.save_pretrained(tmp_path / "plain")
        linbias.patch(model)
        model.save_pretrained(tmp_path / "patched")
        names = {file.name for file in (tmp_path / "plain").iterdir()}
        assert {file.name for file in (tmp_path / "patched").iterdir()} == names
        for name in names:
            assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes(), name
        loaded = type(model).from_pretrained(tmp_path / "patched").eval()
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "patched").eval()
        assert type(plain).__module__.startswith("transformers.")
        linbias.patch(plain)
        with torch.no_grad():
            assert torch.equal(plain(ids).logits, model(ids).logits)
        assert loaded.config.architectures == [type(plain).__name__]

    def test_the_largest_bias_comes_back_from_a_file(self, tmp_path: Path):
        """A checkpoint trained with 16 must not fall back to 8."""
        model, ids = make("mpt", layers=1, attn_config={"alibi_bias_max": 16}), tokens(2, 9)
        linbias.patch(model)
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert linbias.patch(loaded).decoders[0].differences
        assert torch.equal(base(loaded).alibi_slopes(), linbias.alibi_slopes(6, max_bias=16))
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids).logits)

    @every_family
    def test_what_transformers_asks_a_class(self, kind: str):
        """It reads the file a class is written in: whether it is custom code, and takes attention implementations."""
        model = make(kind, layers=1)

        def answers() -> list[bool]:
            parts = (type(model), type(base(model)))
            return [answer for part in parts for answer in (part.is_custom_code(), part._can_set_attn_implementation())]

        before = answers()
        linbias.patch(model)
        assert answers() == before

    @every_family
    def test_dtypes(self, kind: str):
        """Slopes come from their rule, so that no cast can round them."""
        model = make(kind)
        linbias.patch(model)
        slopes = base(model).alibi_slopes()
        for convert in ("half", "bfloat16", "double"):
            assert torch.equal(base(getattr(model, convert)()).alibi_slopes(), slopes)
            with torch.no_grad():
                assert model(tokens(2, 9)).logits.dtype == model.dtype

    @every_kind
    def test_meta_device_loading(self, kind: str):
        """Patched before there are weights, or after; no tensor of ours is left behind on meta."""
        real = make(kind, layers=2)
        with torch.device("meta"):
            empty = type(real)(real.config).eval()
            linbias.patch(empty)
            assert empty(torch.ones(2, 9, dtype=torch.int64)).logits.shape == (2, 9, 53)
        empty.load_state_dict(real.state_dict(), assign=True)
        empty.tie_weights()
        linbias.patch(real)
        ids = tokens(2, 9)
        with torch.no_grad():
            if kind.startswith("falcon"):
                empty.transformer.rotary_emb = real.transformer.rotary_emb  # a buffer of theirs, not in the state_dict
            assert torch.equal(empty(ids).logits, real(ids).logits)

    def test_a_default_device(self):
        """Slopes do not follow torch's default device away from the model."""
        model, ids = make("bloom"), tokens(2, 9)
        linbias.patch(model)
        with torch.device("meta"):
            assert model(ids).logits.device.type == "cpu"

    @pytest.mark.parametrize("removed", [False, True], ids=["hooked", "unhooked"])
    def test_hooks_of_accelerate(self, removed: bool):
        """Models loaded with a device_map carry hooks that hold on to the forward they wrapped."""
        hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is missing: pip install accelerate")
        model, ids = make("bloom", layers=2), tokens(2, 9)
        with torch.no_grad():
            plain = model(ids).logits
        for part in model.modules():
            hooks.add_hook_to_module(part, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
            if removed:
                hooks.remove_hook_from_module(part)
        attention = model.transformer.h[0].self_attention
        with (
            linbias.patch(model),
            torch.no_grad(),
            mock.patch("linbias.hf.decoder.attend_in_layer", side_effect=OSError("ours")),
        ):
            with pytest.raises(OSError, match="ours"):
                model(ids)
        assert type(attention).__module__.startswith("transformers.")
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain)


class TestAccelerate:
    """What people load and train these models with."""

    @every_family
    def test_weights_that_are_elsewhere(self, kind: str):
        """Offloaded: on the meta device between calls, and brought in by hooks for each one."""
        accelerate = pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
        model, ids = make(kind, layers=2), tokens(2, 9)
        with torch.no_grad():
            with linbias.patch(model):
                expected = model(ids).logits
            accelerate.cpu_offload(model, execution_device="cpu")
            assert all(parameter.is_meta for parameter in base(model).parameters())
            linbias.patch(base(model))
            assert torch.equal(model(ids).logits, expected)

    @every_family
    def test_training(self, kind: str):
        """The same steps as in a loop of one's own."""
        accelerate = pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
        model, ids = make(kind, layers=1), tokens(2, 9)
        linbias.patch(model)
        twin = copy.deepcopy(model)

        def steps(model: Any, optimizer: Any, backward: Any) -> list[float]:
            losses = []
            for _ in range(3):
                loss = model(ids, labels=ids).loss
                backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        expected = steps(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda loss: loss.backward())
        accelerator = accelerate.Accelerator(cpu=True)
        prepared = accelerator.prepare(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
        assert steps(*prepared, accelerator.backward) == expected
        assert expected[2] < expected[0]

    @every_family
    def test_prepared_before_it_is_patched(self, kind: str):
        """accelerate wraps the forward of the outermost model, which a patch leaves as it is: in every family."""
        accelerate = pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
        model, ids = make(kind, layers=1), tokens(1, 12)
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
        expected = copy.deepcopy(model)
        linbias.patch(expected)
        accelerate.state.AcceleratorState._reset_state(True)
        prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
        forward, before = vars(prepared)["forward"], classes(prepared)
        try:
            with linbias.patch(prepared) as report, torch.no_grad():
                assert report.layers == 1 and vars(prepared)["forward"] is forward
                found = prepared(ids, position_ids=positions).logits
                with torch.autocast("cpu", torch.bfloat16):
                    right = expected(ids, position_ids=positions).logits
                assert found.dtype == torch.float32 and torch.equal(found, right.float())
        finally:
            accelerate.state.AcceleratorState._reset_state(True)
        assert classes(prepared) == before and vars(prepared)["forward"] is forward


class TestBuiltAnew:
    """Classes of a patched model, instantiated: transformers' own, and whole."""

    @pytest.mark.parametrize("head", HEADS)
    @every_family
    def test_from_pretrained_and_from_a_configuration(self, kind: str, head: str, tmp_path: Path):
        model, ids = make(kind, head, layers=1), tokens(1, 9)
        plain = classes(model)
        with torch.no_grad():
            expected = model(ids)[0]
            model.save_pretrained(tmp_path)
            linbias.patch(model)
            loaded = type(model).from_pretrained(tmp_path).eval()
            assert classes(loaded) == plain and torch.equal(loaded(ids)[0], expected)
            assert linbias.patch(loaded).layers == 1 and torch.equal(loaded(ids)[0], model(ids)[0])
            for built in (type(model)(model.config), type(model)._from_config(model.config)):
                assert classes(built) == plain
            decoder = type(base(model))(model.config)
            assert type(decoder).__module__.startswith("transformers.") and linbias.patch(decoder).layers == 1


class TestRefusals:
    @pytest.mark.parametrize("model", [nn.Linear(2, 3), nn.TransformerEncoderLayer(8, 2)], ids=["linear", "encoder"])
    def test_nothing_to_patch(self, model: nn.Module):
        """No effect is an error."""
        with pytest.raises(ValueError, match="nothing to patch in this .*; supported are BLOOM"):
            linbias.patch(model)

    def test_rotary_falcon(self):
        with pytest.raises(ValueError, match="alibi=False: this Falcon has rotary embeddings"):
            linbias.patch(_rotary())

    @pytest.mark.parametrize(
        "name, options",
        [
            ("attn_config.alibi", {"attn_config": {"alibi": False}}),
            ("attn_config.qk_ln", {"attn_config": {"qk_ln": True}}),
            ("attn_config.prefix_lm", {"attn_config": {"prefix_lm": True}}),
            ("attn_config.attn_type", {"attn_config": {"attn_type": "multiquery_attention"}}),
            ("attn_config.kv_n_heads", {"attn_config": {"kv_n_heads": 2}}),
            ("attn_config.attn_uses_sequence_id", {"attn_config": {"attn_uses_sequence_id": True}}),
            ("logit_scale", {"logit_scale": 0.5}),
            ("norm_type", {"norm_type": "low_precision_rmsnorm"}),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_mpt_options(self, name: str, options: dict[str, Any]):
        model = make("mpt", **options)
        before = classes(model)
        with pytest.raises(ValueError, match=f"{name}=.* cannot be honoured"):
            linbias.patch(model)
        assert classes(model) == before, "a refused model stays as it was"

    def test_one_refusal_leaves_all_alone(self):
        pair = nn.ModuleDict({"good": make("bloom"), "bad": make("mpt", logit_scale=2.0)})
        before = classes(pair)
        with pytest.raises(ValueError, match="mpt model 'bad.transformer'.*logit_scale"):
            linbias.patch(pair)
        assert classes(pair) == before

    def test_twice(self):
        model = make("bloom")
        linbias.patch(model)
        with pytest.raises(ValueError, match="already patched"):
            linbias.patch(model)

    @pytest.mark.parametrize("fidelity", ["exact", "checkpoint"])
    def test_a_part_of_it_twice(self, fidelity: str):
        pair = nn.ModuleDict({"a": make("bloom", layers=1), "b": make("mpt", layers=1)})
        linbias.patch(pair["a"], fidelity="checkpoint")
        before = classes(pair)
        with pytest.raises(ValueError, match=r"of this ModuleDict, 'a\.transformer' is already patched"):
            linbias.patch(pair, fidelity=fidelity)
        assert classes(pair) == before
        assert base(pair["a"]).linbias_fidelity == "checkpoint"

    @every_family
    def test_a_layer_of_another_model(self, kind: str):
        """Patched with one of the two it would fail in the other: both or none."""
        one, other, ids = make(kind, "base", layers=2), make(kind, "base", layers=2), tokens(2, 9)
        blocks = [part.blocks if kind == "mpt" else part.h for part in (one, other)]
        blocks[1][0] = blocks[0][0]
        before, pair = classes(other), nn.ModuleList([one, other])
        with torch.no_grad():
            expected = [model(ids).last_hidden_state for model in pair]
        with linbias.patch(one):
            with pytest.raises(ValueError, match="another model that is patched already shares attention layers"):
                linbias.patch(other)
            with pytest.raises(TypeError, match="must be an AttentionMask in a patched.*the model around it is not"):
                other(ids)
        assert classes(other) == before
        with torch.no_grad(), linbias.patch(pair):
            for model, hidden in zip(pair, expected, strict=True):
                torch.testing.assert_close(model(ids).last_hidden_state, hidden, atol=2e-5, rtol=0)
        assert classes(other) == before

    def test_the_head_after_the_base_model(self):
        model = make("falcon", layers=1)
        linbias.patch(base(model))
        with pytest.raises(ValueError, match="this FalconForCausalLM is already patched"):
            linbias.patch(model)

    @pytest.mark.parametrize("change", [linbias.patch, linbias.unpatch])
    @pytest.mark.parametrize("model", [None, "bloom", transformers.BloomModel], ids=["None", "name", "class"])
    def test_what_is_no_model(self, change: Any, model: Any):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, got .*; pass .*from_pretrained"):
            change(model)

    def test_fidelity(self):
        with pytest.raises(ValueError, match="fidelity must be 'exact' or 'checkpoint', got 'fast'"):
            linbias.patch(make("bloom"), fidelity="fast")

    def test_a_subclass(self):
        model = make("bloom", "base")
        model.__class__ = type("Mine", (type(model),), {})
        with pytest.raises(ValueError, match="Mine is a subclass of BloomModel"):
            linbias.patch(model)

    def test_attention_of_another_class(self):
        model = make("bloom")
        layer = model.transformer.h[1].self_attention
        layer.__class__ = type("Mine", (type(layer),), {})
        with pytest.raises(ValueError, match="its attention layers are Mine"):
            linbias.patch(model)

    def test_a_forward_on_the_instance(self):
        model = make("bloom")
        layer = model.transformer.h[1].self_attention
        layer.forward = lambda *args, **kwargs: None
        before = classes(model)
        with pytest.raises(ValueError, match="forward of a BloomAttention was replaced on the instance"):
            linbias.patch(model)
        assert classes(model) == before

    def test_a_forward_on_a_part_that_may_stay(self):
        """Only the MLP's speed hangs on its class, so what somebody put there is kept, and so it is afterwards."""
        model = make("bloom")
        part = model.transformer.h[1].mlp
        part.forward = mine = lambda hidden_states, residual: residual
        report = linbias.patch(model)
        assert part not in report.changed and type(part) is type(make("bloom").transformer.h[1].mlp)
        assert part.forward is mine
        assert linbias.unpatch(model) == 3

    def test_no_transformers(self):
        with mock.patch.dict(sys.modules, {"transformers": None}):
            with pytest.raises(ImportError, match=r"pip install 'linbias\[hf\]'"):
                linbias.patch(nn.Linear(2, 3))


def _rotary() -> nn.Module:
    model = make("falcon")
    model.config.alibi = False
    return model


@pytest.mark.slow
def test_importing_linbias_imports_no_transformers():
    code = "import sys; sys.modules['transformers'] = None; import linbias, linbias.hf; linbias.patch, linbias.unpatch"
    subprocess.run([sys.executable, "-c", code], check=True)
