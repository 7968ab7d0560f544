# SPDX-License-Identifier: Apache-2.0
"""What the heads of a trained model reach on a text, by the norms of its queries and keys there."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import hf
from ..semantics.problem import OPERAND_NAMES, OPTION_NAMES
from .config import ConfigError
from .data import load_corpus, printable, require_bytes
from .train import load_checkpoint

_BYTES_PER_TOKEN = 16
"""Enough text for as many tokens as were asked for, in any language."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One call of attention: a value a head, (H,) fp64."""

    slopes: Tensor
    query_norms: Tensor
    """The largest."""
    key_norms: Tensor
    content: Tensor
    """By how much a content score can exceed that of the query's own key, at most: the norms' bound over all rows."""
    causal: bool


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a model did with a text."""

    name: str
    text: str
    length: int
    """Tokens."""
    layers: tuple[Layer, ...]


def measure(model: Path, data: Path | None, length: int) -> Measured:
    """Run a model over the start of the test text and return what its layers asked of attention.

    Args:
        model: a checkpoint of `train`, a folder that holds one trained with ALiBi, or a folder of a published model.
        data: the text; the embedded novels if None.
        length: tokens; a published model may get fewer if the text has no more.

    Raises:
        CheckpointError, ConfigError, DataError: no such model, one that does not attend with ALiBi, or too little text.
    """
    text = load_corpus(data).test
    path = _checkpoint_in(model)
    if path is None:
        decoder, tokens = _published(model, text.content[: _BYTES_PER_TOKEN * length], length)
    else:
        require_bytes(text, length, f"to read {length:,}")
        decoder, tokens = load_checkpoint(path).decoder(), text.tensor()[None, :length].long()
    with torch.no_grad(), _watching() as layers:
        decoder(tokens)
    if not layers:
        raise ConfigError(f"model must attend with ALiBi, got {printable(path or model)!r}, which has no biases")
    return Measured(name=printable(path or model), text=text.name, length=tokens.shape[1], layers=tuple(layers))


def _checkpoint_in(model: Path) -> Path | None:
    """The checkpoint that a path means, None for a folder of a published model."""
    if not model.is_dir():
        return model
    if (model / "config.json").is_file():
        return None
    found = [path for folder in (model, model / "checkpoints") for path in sorted(folder.glob("alibi*.safetensors"))]
    finished = [path for path in found if not path.name.endswith(".partial.safetensors")]
    if len(finished) != 1:
        names = ", ".join(printable(path.relative_to(model)) for path in finished) or "none"
        raise ConfigError(
            "model must be a checkpoint, a folder with one checkpoint trained with ALiBi, or a folder with a published "
            f"model's config.json, got {printable(model)!r}, which holds {names}; name one"
        )
    return finished[0]


def _published(folder: Path, content: bytes, length: int) -> tuple[Any, Tensor]:
    """The model in a folder, and the first tokens of a text (1, T) as its own tokenizer has them."""
    try:
        decoder, tokenizer = hf.load(folder), hf.load_tokenizer(folder)
        if hasattr(decoder.config, "use_cache"):
            decoder.config.use_cache = False
        tokens = tokenizer(content.decode("utf-8", "replace"), truncation=True, max_length=length)["input_ids"]
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model must be one that linbias.hf.load reads, got {printable(folder)!r}: {error}"
        ) from error
    if not tokens:
        raise ConfigError(f"data must have a token for the model in {printable(folder)!r}, got none")
    return decoder, torch.tensor([tokens])


@contextmanager
def _watching() -> Generator[list[Layer]]:
    """Collect every call of our attention made inside, in order."""
    layers: list[Layer] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.linbias.attention.default:
                layers.append(_layer(dict(zip((*OPERAND_NAMES, *OPTION_NAMES), args, strict=False))))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield layers


def _layer(call: dict[str, Any]) -> Layer:
    query, key = (call[name][0].double() for name in ("query", "key"))
    key = key.repeat_interleave(len(query) // len(key), dim=0)
    lengths, far = query.norm(dim=-1), key.norm(dim=-1)
    # Among the keys that a row sees; the own key's score, whose bias is 0, bounds the row's log-sum-exp from below.
    largest = far.cummax(dim=-1).values if call["causal"] else far.amax(dim=-1, keepdim=True)
    bound, own = abs(call["scale"]) * lengths * largest, call["scale"] * (query * key).sum(-1)
    if call["softcap"] is not None:
        bound, own = (call["softcap"] * torch.tanh(score / call["softcap"]) for score in (bound, own))
    return Layer(
        slopes=call["slopes"][0].double(),
        query_norms=lengths.amax(-1),
        key_norms=far.amax(-1),
        content=(bound - own).amax(-1),
        causal=call["causal"],
    )
