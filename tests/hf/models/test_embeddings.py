# SPDX-License-Identifier: Apache-2.0
"""Sentence embeddings and late chunks are what their definitions make of the dense formula's vectors, in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linbias.hf import late_chunks, load, sentence_transformer, token_spans
from tests.hf.models import encoders, folders
from tests.hf.models.folders import WORDS

from linbias.hf import load_tokenizer  # isort: skip

TEXTS = ["the sun rose over a quiet town", "bark", "every dog in it began to bark at once, the sun"]
KIND = "jina"


@pytest.fixture(scope="module")
def base() -> Any:
    return folders.make(KIND, "Model").double()


@pytest.fixture
def folder(tmp_path: Path, base: Any) -> Path:
    folders.tokenize(folders.publish(tmp_path, KIND, base, torch_dtype="float64"))
    return tmp_path


def library() -> Any:
    return pytest.importorskip("sentence_transformers", reason="the extra embeddings is not installed")


def pooled(folder: Path, mode: str, *, normal: bool = False, settings: Any = None, **options: Any) -> Path:
    """As published: modules.json with pooling, in the fields of sentence-transformers 2, and perhaps Normalize."""
    facts = {f"pooling_mode_{name}": name.startswith(mode) for name in ("cls_token", "mean_tokens", "max_tokens")}
    facts |= {"word_embedding_dimension": 24, **options}
    modules = [("1_Pooling", "sentence_transformers.models.Pooling", facts)]
    modules += [("2_Normalize", "sentence_transformers.models.Normalize", {})] if normal else []
    folders.sentence_settings(folder, modules=modules, **({"max_seq_length": 8192} if settings is None else settings))
    return folder


def vectors(folder: Path, base: Any, text: str, most: int | None = None) -> Tensor:
    """(T, width) of a text's tokens, cut after so many; without padding."""
    ids = load_tokenizer(folder)(text, truncation=most is not None, max_length=most)["input_ids"]
    return folders.states(KIND, base, torch.tensor(ids))


def encode(model: Any, texts: list[str], **options: Any) -> Tensor:
    return torch.as_tensor(model.encode(texts, show_progress_bar=False, **options))


@pytest.mark.parametrize("normal", [False, True], ids=["", "normalised"])
@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_texts_are_pooled_as_the_folder_says_and_again_once_saved(mode: str, normal: bool, folder: Path, base: Any):
    library()
    model = sentence_transformer(pooled(folder, mode, normal=normal), device="cpu")
    found = encode(model, TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        states = vectors(folder, base, text)
        exact = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0)}[mode]
        encoders.assert_close(vector, (exact / exact.norm() if normal else exact).numpy())
    model.save(str(folder / "saved"))
    again = sentence_transformer(folder / "saved", device="cpu")
    assert again.max_seq_length == model.max_seq_length == 8192
    assert torch.equal(encode(again, TEXTS), found)


def test_a_folder_without_modules_is_pooled_as_asked(folder: Path, base: Any):
    library()
    with pytest.raises(ValueError, match="no modules.json that says how to pool"):
        sentence_transformer(folder)
    found = encode(sentence_transformer(folder, pooling="mean", device="cpu"), TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        encoders.assert_close(vector, vectors(folder, base, text).mean(0).numpy())
    with pytest.raises(ValueError, match="says how this model pools; leave pooling='cls' out"):
        sentence_transformer(pooled(folder, "mean"), pooling="cls")


@pytest.mark.parametrize("most", [None, 7])
def test_texts_are_cut_as_the_folder_says_or_as_asked(most: int | None, folder: Path, base: Any):
    library()
    settings = {"max_seq_length": 5, "do_lower_case": True}
    model = sentence_transformer(pooled(folder, "mean", settings=settings), device="cpu", max_seq_length=most)
    assert model.max_seq_length == (most or 5)
    found = encode(model, [TEXTS[2].upper()])[0]
    encoders.assert_close(found, vectors(folder, base, TEXTS[2], most or 5).mean(0).numpy())


@pytest.mark.parametrize("included", [True, False], ids=["", "left out of the mean"])
def test_prompts_come_before_texts(included: bool, folder: Path, base: Any):
    library()
    facts = {"prompts": {"query": "the sun "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(facts))
    model = sentence_transformer(pooled(folder, "mean", include_prompt=included), device="cpu")
    assert model.similarity_fn_name == "dot"
    # [CLS] the sun
    first, found = 0 if included else 3, encode(model, TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        encoders.assert_close(vector, vectors(folder, base, "the sun " + text)[first:].mean(0).numpy())
    model.save(str(folder / "saved"))
    assert torch.equal(encode(sentence_transformer(folder / "saved", device="cpu"), TEXTS), found)


def test_padding_on_the_left_does_not_move_the_first_token(folder: Path, base: Any):
    library()
    folders.tokenize(folder, padding_side="left")
    found = encode(sentence_transformer(pooled(folder, "cls"), device="cpu"), TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        encoders.assert_close(vector, vectors(folder, base, text)[0].numpy())


_LISTED = "sentence_transformers.models.Transformer"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"modules.json": {}}, "modules.json must be a list of modules, each with its type and path"),
    "no path": ({"modules.json": [{"type": _LISTED}]}, "modules.json must be a list of modules"),
    "nothing": ({"modules.json": []}, "modules.json must name a Transformer, and then only Pooling, Normalize"),
    "outside": ({"modules.json": [{"type": _LISTED, "path": "../.."}]}, "must name folders inside"),
    "own code": (
        {"modules.json": [{"type": _LISTED, "path": ""}, {"type": "custom_st.Transformer", "path": "1_Pooling"}]},
        "got sentence_transformers.models.Transformer, custom_st.Transformer: others would load",
    ),
    "another model": (
        {"modules.json": [{"type": _LISTED, "path": ""}, {"type": "sentence_transformers.models.LSTM", "path": "1"}]},
        "got .*models.LSTM: others would load models or code",
    ),
    "no pooling": (
        {"1_Pooling/config.json": {"word_embedding_dimension": 24, "pooling_mode_cls_token": False}},
        r"names no pooling_mode that is on: it has \['pooling_mode_cls_token'\]",
    ),
    "unknown pooling": (
        {"1_Pooling/config.json": {"word_embedding_dimension": 24, "pooling_mode": "spam"}},
        "spam",
    ),
    "another width": (
        {"1_Pooling/config.json": {"word_embedding_dimension": 25, "pooling_mode_mean_tokens": True}},
        "pools 25 numbers, and the model gives 24",
    ),
    "settings a list": ({"sentence_bert_config.json": []}, "sentence_bert_config.json must hold an object"),
    "length a text": (
        {"sentence_bert_config.json": {"max_seq_length": "512"}},
        "max_seq_length of .*sentence_bert_config.json must be null or a whole number above 0, got '512'",
    ),
    "prompts a list": ({"config_sentence_transformers.json": []}, "must hold an object, got list"),
    "another kind": (
        {"config_sentence_transformers.json": {"model_type": "SparseEncoder"}},
        "is of a SparseEncoder, not of a SentenceTransformer",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case: str, folder: Path):
    library()
    files, message = BAD[case]
    pooled(folder, "mean")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        sentence_transformer(folder)


@pytest.mark.parametrize("most", [0, -1, 2.5])
def test_a_length_that_none_can_have_is_refused(most: Any, folder: Path):
    library()
    with pytest.raises(ValueError, match="max_seq_length must be"):
        sentence_transformer(folder, pooling="mean", max_seq_length=most)


def test_late_chunks_are_means_of_one_pass(folder: Path, base: Any):
    text, parts = "the sun rose. every dog began to bark.", ["the sun rose.", "every dog began to bark."]
    ids, spans = token_spans(load_tokenizer(folder), text, parts)
    assert spans == [(1, 5), (5, 11)]
    with torch.no_grad():
        found, normal = (late_chunks(load(folder), ids, spans, normalize=normal) for normal in (False, True))
    states = folders.states(KIND, base, ids)
    for (start, end), vector, unit in zip(spans, found, normal, strict=True):
        exact = states[start:end].mean(0)
        encoders.assert_close(vector, exact.numpy())
        encoders.assert_close(unit, (exact / exact.norm()).numpy())


def test_late_chunks_go_past_the_length_of_training(folder: Path, base: Any):
    """9,603 tokens of a model made for 8,192: the text around a chunk reaches it, and what is far does not change."""
    text = " ".join(WORDS) + " "
    ids, spans = token_spans(load_tokenizer(folder), text * 600, [(0, len(text)), (500 * len(text), 501 * len(text))])
    assert len(ids) > 9600
    model = load(folder, dtype=torch.float32)
    with torch.inference_mode():
        found = late_chunks(model, ids, spans)
        whole = model(ids[None]).last_hidden_state[0]
    for (start, end), vector in zip(spans, found, strict=True):
        assert torch.equal(vector, whole[start:end].mean(0))
    # By the flattest slope, 1/256, a token 2,000 places away weighs less than e^-7 of a neighbour: the same words amid
    # another long text have nearly the same vectors, and those at the start of a text have others.
    start = spans[1][0] - 2000
    with torch.inference_mode():
        near = model(ids[None, start : spans[1][1] + 1000]).last_hidden_state[0, 2000:-1000]
    assert (near.mean(0) - found[1]).norm() < 0.02 * (found[0] - found[1]).norm()


@pytest.mark.parametrize("span", [(0, 0), (3, 2), (-1, 2), (2, 8)])
def test_spans_outside_the_text_are_refused(folder: Path, span: tuple[int, int]):
    with pytest.raises(ValueError, match=r"spans\[0\] must be \(start, end\)"):
        late_chunks(load(folder, task="base"), [1] * 7, [span])


def test_chunks_that_are_not_of_the_text_are_refused(folder: Path):
    tokenizer = load_tokenizer(folder)
    for chunks, message in (
        (["dog", "the sun"], r"chunks\[1\] must follow in the text after character"),
        ([(0, 400)], r"chunks\[0\] must lie in the text's 30 characters"),
        ([(3, 4)], r"chunks\[0\] has no token of its own: ' '"),
    ):
        with pytest.raises(ValueError, match=message):
            token_spans(tokenizer, "the sun rose over the town dog", chunks)


def test_a_model_with_a_head_gives_no_chunks(tmp_path: Path):
    folders.publish(tmp_path, KIND, folders.make(KIND))
    with pytest.raises(TypeError, match=r"must be a base model, .* got JinaBertForMaskedLM: .*task='base'"):
        late_chunks(load(tmp_path), [1, 2, 3], [(0, 2)])


class TestTokenizers:
    def test_one_that_is_code_of_the_folder_says_what_to_convert(self, tmp_path: Path):
        folder = folders.publish(tmp_path, "baichuan", folders.make("baichuan"))
        (folder / "tokenizer.model").write_bytes(b"sentencepiece")
        code = {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]}
        (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": code}))
        with pytest.raises(ValueError, match=r"Convert it to tokenizer.json once, where its code may run"):
            load_tokenizer(folder)

    @pytest.mark.parametrize("kind", ["baichuan", "jais", "mpt", "refact"])
    @pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "NobodysTokenizer"}], ids=["", "of nobody"])
    def test_a_tokenizer_json_is_enough_in_every_family(self, kind: str, settings: Any, tmp_path: Path):
        """Whatever transformers makes of config.json, which it reads as a family of its own."""
        from tokenizers import Tokenizer, models

        folder = folders.publish(tmp_path, kind, folders.make(kind))
        Tokenizer(models.WordLevel({"sun": 4, "[UNK]": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert load_tokenizer(folder)("sun")["input_ids"] == [4]

    @pytest.mark.parametrize(
        ("files", "error", "message"),
        [
            ({}, FileNotFoundError, "holds no vocabulary: none of tokenizer.json, .*; it has bert_layers.py, "),
            ({"vocab.txt": ""}, FileNotFoundError, "holds no vocabulary"),
            ({"tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}'}, FileNotFoundError, "holds no vocabula"),
            ({"vocab.txt": "a", "tokenizer_config.json": "{"}, ValueError, "tokenizer_config.json is not JSON"),
            ({"tokenizer.json": "{"}, ValueError, "tokenizer.json is not JSON .* copy or download it again"),
        ],
    )
    def test_what_is_not_whole_is_named(self, files: dict[str, str], error: Any, message: str, tmp_path: Path):
        folders.publish(tmp_path, KIND, folders.make(KIND))
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        with pytest.raises(error, match=message):
            load_tokenizer(tmp_path)

    def test_one_of_another_model_is_told_by_its_size(self, tmp_path: Path):
        library()
        folder = folders.publish(tmp_path, KIND, folders.make(KIND, "Model", vocab_size=11), vocab_size=11)
        folders.tokenize(folder)
        with pytest.raises(ValueError, match=r"the tokenizer has \d+ tokens, and the model has vectors for 11"):
            sentence_transformer(folder, pooling="mean")
