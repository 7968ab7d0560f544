# SPDX-License-Identifier: Apache-2.0
"""A family of two small classes, as a published folder would need it, and folders of it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

import linbias
import linbias.hf
from linbias.hf.models import published
from linbias.hf.models.published import Published

WORDS = "the sun rose over a quiet town and every dog in it began to bark at once".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class TinyConfig(PreTrainedConfig):
    model_type = "tests-tiny"
    vocab_size: int = 31
    hidden_size: int = 24
    num_attention_heads: int = 3
    position_embedding_type: str = "alibi"
    max_position_embeddings: int = 40


class TinyBase(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "bert"

    def _init_weights(self, module: nn.Module) -> None:
        for part in module.parameters(recurse=False):
            nn.init.normal_(part, std=0.5)


class TinyModel(TinyBase):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Any = None, **_: Any
    ) -> BaseModelOutput:
        hidden = self.words(input_ids)
        heads = self.config.num_attention_heads
        query, key, value = self.qkv(hidden).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        real = None if attention_mask is None else attention_mask.bool()
        out = linbias.alibi_attention(query, key, value, linbias.alibi_slopes(heads), causal=False, key_mask=real)
        return BaseModelOutput(self.norm(hidden + out.transpose(1, 2).flatten(2)))


class TinyForMaskedLM(TinyBase):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.bert = TinyModel(config)
        self.cls = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor, **options: Any) -> MaskedLMOutput:
        return MaskedLMOutput(logits=self.cls(self.bert(input_ids, **options).last_hidden_state))


def refusals(facts: Any) -> list[str]:
    found = facts.get("position_embedding_type", "alibi")
    return [] if found == "alibi" else [f"position_embedding_type={found!r}: only 'alibi' is computed here"]


PUBLISHED = Published(
    name="tiny",
    claims=lambda facts: "TinyModel" in facts.get("auto_map", {}).get("AutoModel", ""),
    refusals=refusals,
    config=TinyConfig,
    classes={"TinyModel": TinyModel, "TinyForMaskedLM": TinyForMaskedLM},
    harmless={r"(bert\.)?position_ids": "a range, kept by older versions"},
)


def teach(monkeypatch: Any) -> None:
    """`load` knows this family, and no other of ours."""
    monkeypatch.setattr(published, "_HOMES", (__name__,))


def publish(folder: Path, model: PreTrainedModel, **changes: Any) -> Path:
    """As its authors would have: model_type of another model, code beside it, tensors of `model`."""
    model.save_pretrained(folder)
    facts = json.loads((folder / "config.json").read_text())
    facts |= {"model_type": "bert", "auto_map": {"AutoModel": "modeling_tiny.TinyModel"}, **changes}
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "modeling_tiny.py").write_text("raise AssertionError('code of the folder was run')\n")
    return folder


def tokenize(folder: Path, **settings: Any) -> None:
    """A WordPiece tokenizer over `WORDS`, as vocab.txt and tokenizer_config.json."""
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *dict.fromkeys(WORDS), "##s", "##ing", ".", ","]) + "\n")
    facts = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 40, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def sentence_settings(folder: Path, *, modules: list[tuple[str, str, dict[str, Any]]], **settings: Any) -> None:
    """modules.json, a folder for each module after the first, and sentence_bert_config.json."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (path, kind, facts) in enumerate(modules, start=1):
        listed.append({"idx": number, "name": str(number), "path": path, "type": kind})
        (folder / path).mkdir()
        if facts:
            (folder / path / "config.json").write_text(json.dumps(facts))
    (folder / "modules.json").write_text(json.dumps(listed))
    if settings:
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))


def dense(model: TinyModel, ids: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """(T, width): the formula of `TinyModel` over one text, written out."""
    state = {name: part.to(dtype) for name, part in model.state_dict().items()}
    hidden = state["words.weight"][ids]
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    query, key, value = (
        part.reshape(len(ids), heads, -1).transpose(0, 1)
        for part in (hidden @ state["qkv.weight"].T + state["qkv.bias"]).split(width, -1)
    )
    places = torch.arange(len(ids))
    bias = -linbias.alibi_slopes(heads).to(dtype)[:, None, None] * (places[:, None] - places).abs()
    weights = (query @ key.transpose(1, 2) * (width // heads) ** -0.5 + bias).softmax(-1)
    out = hidden + (weights @ value).transpose(0, 1).flatten(1)
    return nn.functional.layer_norm(out, (width,), state["norm.weight"], state["norm.bias"], 1e-5)


def load_base(folder: Path) -> TinyModel:
    """Its base model, by `linbias.hf.load`."""
    return linbias.hf.load(folder, task="base")
