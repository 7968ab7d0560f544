# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts: a folder's tokenizer, a folder as a `SentenceTransformer`, and late chunking."""

import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...semantics.checks import check_count
from .folder import open_folder, read_json, read_object, refuse_pickles
from .load import require_transformers

# Modules that only reckon with vectors: they load no model of their own, and no code of a folder.
_AFTER = ("Pooling", "Normalize", "Dense", "LayerNorm", "Dropout")
_SETTINGS = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")


def sentence_transformer(
    folder: str | os.PathLike[str],
    *,
    pooling: str | None = None,
    max_seq_length: int | None = None,
    dtype: Any = None,
    device_map: Any = None,
    **options: Any,
) -> Any:
    """A folder as a `sentence_transformers.SentenceTransformer` over the model that `linbias.hf.load` gives.

    Pooling, normalisation and dense layers are those of the folder's modules.json; prompts and similarity those of its
    config_sentence_transformers.json.

    Args:
        folder: a model with its tokenizer.
        pooling: where the folder has no modules.json: "mean", "cls", "max" or another of the library's.
        max_seq_length: texts are cut after so many tokens. None: as sentence_bert_config.json or the tokenizer says.
            Any length works, beyond the one that the model was trained with too.
        dtype: as `linbias.hf.load` takes it.
        device_map: as `linbias.hf.load` takes it.
        options: of `SentenceTransformer`: device, prompts, default_prompt_name, similarity_fn_name, truncate_dim.

    Raises:
        FileNotFoundError, ValueError: as `linbias.hf.load` and `load_tokenizer` raise them; a module that could run
            code or is not whole; no modules.json and no `pooling`, or both.
        ImportError: transformers or sentence-transformers is missing.
    """
    require_transformers("sentence_transformer")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            "linbias.hf.sentence_transformer needs sentence-transformers: pip install 'linbias[hf,embeddings]'"
        ) from error
    from .sentences import AlibiEncoder

    if max_seq_length is not None and check_count("max_seq_length", max_seq_length) < 1:
        raise ValueError("max_seq_length must be at least 1, got 0: a text of no token has no vector")
    path = open_folder(folder)
    listed = _modules(path, pooling)
    home = _inside(path, listed[0][1]) if listed else path
    encoder = AlibiEncoder.read(home, max_seq_length=max_seq_length, dtype=dtype, device_map=device_map)
    width = encoder.get_embedding_dimension()
    after: list[nn.Module] = [_module(path, *module, width=width) for module in listed[1:]]
    if pooling is not None:
        after = [_pooling(width, pooling)]
    # With a device map the parts stand where it put them.
    if device_map is not None:
        options = {"device": encoder.model.device} | options
    return SentenceTransformer(modules=[encoder, *after], local_files_only=True, **(_settings(path) | options))


def _modules(path: Path, pooling: str | None) -> list[tuple[str, str]]:
    """(class, folder) in order, by modules.json; none, if there is no such file and `pooling` stands for it."""
    listed = path / "modules.json"
    if listed.is_file() and pooling is not None:
        raise ValueError(f"{listed} says how this model pools; leave pooling={pooling!r} out")
    if not listed.is_file() and pooling is None:
        raise ValueError(
            f"{path} has no modules.json that says how to pool: pass pooling='mean', or what it is made for"
        )
    if not listed.is_file():
        return []
    parts = read_json(listed)
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("type"), str) and isinstance(part.get("path"), str)
        for part in parts
    ):
        raise ValueError(f"{listed} must be a list of modules, each with its type and path; copy or download it again")
    found: list[tuple[str, str]] = [(part["type"], part["path"]) for part in parts]
    names = [kind.rpartition(".")[2] for kind, _ in found]
    strange = [kind for (kind, _), name in zip(found[1:], names[1:], strict=True) if name not in _AFTER]
    if not found or names[0] not in ("Transformer", "AlibiEncoder") or strange:
        raise ValueError(
            f"{listed} must name a Transformer, and then only {', '.join(_AFTER)}, got "
            f"{', '.join(kind for kind, _ in found)}: others would load models or code that linbias does not know"
        )
    return found


def _module(path: Path, kind: str, place: str, *, width: int) -> nn.Module:
    """One module after the encoder."""
    from sentence_transformers.sentence_transformer import modules

    name, home = kind.rpartition(".")[2], _inside(path, place)
    facts = read_object(home / "config.json") if name != "Normalize" else {}
    modes = {key: on for key, on in facts.items() if key.startswith("pooling_mode")}
    if name == "Pooling" and not any(modes.values()):
        raise ValueError(f"{home / 'config.json'} names no pooling_mode that is on: it has {sorted(modes)}")
    if home.is_dir():
        refuse_pickles(home)
    found = getattr(modules, name).load(str(path), subfolder=place, local_files_only=True)
    if name == "Pooling" and found.embedding_dimension != width:
        raise ValueError(
            f"{home / 'config.json'} pools {found.embedding_dimension} numbers, and the model gives {width}"
        )
    return found


def _pooling(width: int, mode: str) -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return Pooling(width, mode)  # pyright: ignore[reportArgumentType]


def _inside(path: Path, place: str) -> Path:
    """A folder in it."""
    found = (path / place).resolve()
    if not found.is_relative_to(path.resolve()):
        raise ValueError(f"{path / 'modules.json'} must name folders inside {path}, got {place!r}")
    return found


def _settings(path: Path) -> dict[str, Any]:
    """What of config_sentence_transformers.json a constructor takes."""
    written = path / "config_sentence_transformers.json"
    facts = read_object(written) if written.is_file() else {}
    kind = facts.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ValueError(
            f"{written} is of a {kind}, not of a SentenceTransformer; its model loads with linbias.hf.load"
        )
    return {name: facts[name] for name in _SETTINGS if facts.get(name) is not None}


def token_spans(
    tokenizer: Any, text: str, chunks: Sequence[str] | Iterable[tuple[int, int]]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """The tokens of a whole text, and which of them each chunk of it has: what `late_chunks` takes.

    Args:
        tokenizer: of transformers, with offsets: every one that has a tokenizer.json does.
        text: is not cut.
        chunks: parts of the text in their order, or (start, end) in its characters. A token belongs to the chunk in
            which it begins; special tokens to none.

    Returns:
        ids (T,), and (start, end) in tokens for every chunk.

    Raises:
        ValueError: a part that does not follow in the text, characters outside it, or a chunk without a token.
    """
    # A length beyond the model's usual one is meant.
    encoded = tokenizer(text, return_offsets_mapping=True, truncation=False, verbose=False)
    starts = [start if end > start else -1 for start, end in encoded["offset_mapping"]]
    spans: list[tuple[int, int]] = []
    after = 0
    for number, chunk in enumerate(chunks):
        if isinstance(chunk, str):
            first = text.find(chunk, after)
            if first < 0:
                raise ValueError(
                    f"chunks[{number}] must follow in the text after character {after}, got {chunk[:40]!r}"
                )
            after = first + len(chunk)
        else:
            first, after = chunk
            if not 0 <= first <= after <= len(text):
                raise ValueError(f"chunks[{number}] must lie in the text's {len(text)} characters, got {chunk}")
        inside = [place for place, start in enumerate(starts) if first <= start < after]
        if not inside:
            raise ValueError(f"chunks[{number}] has no token of its own: {text[first:after][:40]!r}")
        spans.append((inside[0], inside[-1] + 1))
    return torch.tensor(encoded["input_ids"]), spans


def late_chunks(model: Any, ids: Tensor | Sequence[int], spans: Any, *, normalize: bool = False) -> Tensor:
    """A vector for each chunk of a text, from one pass over the whole of it: the mean of its tokens' last states.

    Every chunk's vector so knows the text around it (late chunking, https://arxiv.org/abs/2409.04701). The text may be
    longer than the model was made for: memory is linear in its length. Wrap the call in ``torch.inference_mode()``
    unless it is trained through.

    Args:
        model: a base model, such as ``linbias.hf.load(folder, task="base")``, or a `SentenceTransformer` over one.
        ids: (T,) tokens of one text, special tokens among them.
        spans: (start, end) in tokens, the end not included, for every chunk; they may overlap. See `token_spans`.
        normalize: scale every vector to length 1.

    Returns:
        (chunks, width), of the model's dtype; means are taken in float32.

    Raises:
        TypeError: a model with a head.
        ValueError: ids that are not one text, or a span that is empty or lies outside of it.
    """
    model = getattr(model, "transformers_model", model)
    tokens = torch.as_tensor(ids)
    if tokens.dim() == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.dim() != 1 or tokens.is_floating_point() or not len(tokens):
        raise ValueError(f"ids must be the tokens of one text, integers of shape (T,), got {tuple(tokens.shape)}")
    pairs = [_span(number, span, len(tokens)) for number, span in enumerate(spans)]
    cached = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}
    out = model(input_ids=tokens[None].to(model.device), **cached)
    if getattr(out, "last_hidden_state", None) is None:
        raise TypeError(
            f"model must be a base model, which gives last_hidden_state, got {type(model).__name__}: "
            f"linbias.hf.load(folder, task='base')"
        )
    states = out.last_hidden_state[0]
    wide = torch.promote_types(states.dtype, torch.float32)
    means = [states[start:end].mean(0, dtype=wide) for start, end in pairs]
    found = torch.stack(means) if means else states.new_empty(0, states.shape[-1], dtype=wide)
    return (nn.functional.normalize(found, dim=-1) if normalize else found).to(states.dtype)


def _span(number: int, span: Any, tokens: int) -> tuple[int, int]:
    start, end = map(operator.index, span)
    if not 0 <= start < end <= tokens:
        raise ValueError(
            f"spans[{number}] must be (start, end) with 0 <= start < end <= {tokens}, the number of tokens, got "
            f"({start}, {end})"
        )
    return start, end
