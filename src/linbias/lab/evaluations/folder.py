# SPDX-License-Identifier: Apache-2.0
"""A transformers causal language model from a folder, with its tokenizer, as the evaluations need it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import ConfigError
from ..data import DataError, Text
from ..extras import need

_CHUNK = 256
"""Tokens given at once to a model that keeps a cache."""


@dataclass(frozen=True, kw_only=True)
class FolderModel:
    """A model, opened."""

    model: Any
    tokenizer: Any
    path: Path
    how: str
    """How its attention runs."""
    patched: bool
    """Whether it attends through linbias, so that `AlibiCache` can drop keys."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device

    def tokens(self, text: Text, most: int) -> Tensor:
        """Return the first tokens of a text, (N,) int64, on the CPU, N at most `most`.

        Raises: DataError if the text is no UTF-8.
        """
        try:
            # No token of any vocabulary is longer than this many bytes on average.
            part = text.content[: 16 * most].decode(errors="strict" if 16 * most >= len(text.content) else "ignore")
        except UnicodeDecodeError as error:
            raise DataError(f"data must be UTF-8 for a model with a tokenizer, got {text.name}: {error}") from error
        return torch.tensor(self.encode(part)[:most])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def bytes_of(self, tokens: Tensor) -> int:
        """Return how many bytes of UTF-8 the tokens stand for."""
        decoded = self.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        return len(decoded.encode())

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Return logits (B, T, V), float32."""
        with torch.no_grad():
            return self.model(tokens_BT.to(self.device), use_cache=False).logits.float()

    def nats(self, tokens_BT: Tensor) -> Tensor:
        """Return the loss of each token after the first, (B, T - 1), on the CPU."""
        return _nats(self.logits(tokens_BT[:, :-1]), tokens_BT[:, 1:].to(self.device))

    def streaming(self, window: int, sinks: int) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return what reads a text (1, N + 1) and gives its losses (N,), for each way of keeping keys."""
        modes: dict[str, dict[str, Any]] = {
            "full": {},
            "window": {"window": (window - 1, 0)},
            "window and sinks, text distance": {"window": (window - 1, 0), "sinks": sinks, "distance": "text"},
            "window and sinks, cache distance": {"window": (window - 1, 0), "sinks": sinks, "distance": "cache"},
        }
        return {mode: lambda tokens, options=options: self._read(tokens, options) for mode, options in modes.items()}

    def _read(self, tokens_1T: Tensor, options: dict[str, Any]) -> Tensor:
        from ...hf.cache import AlibiCache
        from ...hf.decoder import CACHE

        cache, pieces = AlibiCache(**options), []
        tokens_1T = tokens_1T.to(self.device)
        for start in range(0, tokens_1T.shape[1] - 1, _CHUNK):
            seen = tokens_1T[:, start : min(start + _CHUNK, tokens_1T.shape[1] - 1)]
            with torch.no_grad():
                logits = self.model(seen, use_cache=True, **{CACHE: cache}).logits.float()
            pieces.append(_nats(logits, tokens_1T[:, start + 1 : start + 1 + seen.shape[1]]))
        return torch.cat(pieces, dim=1)[0]

    def slopes(self) -> dict[str, Any] | None:
        """Return heads and max_bias of its ALiBi, None if it has none that is known here."""
        facts = self.model.config.to_dict()
        attention = facts.get("attn_config") or {}
        kind = facts.get("model_type")
        if kind == "mpt" and attention.get("alibi", True):
            return {"heads": facts["n_heads"], "max_bias": float(attention.get("alibi_bias_max", 8))}
        if kind == "bloom" or (kind == "falcon" and facts.get("alibi")):
            return {"heads": facts.get("n_head") or facts["num_attention_heads"], "max_bias": 8.0}
        return None


def open_folder_model(path: Path, device: str) -> FolderModel:
    """Open a causal language model and its tokenizer, through linbias where it knows the family.

    Raises:
        ConfigError: the folder holds no causal language model with a tokenizer that transformers can read as it is.
        MissingExtra: transformers is missing.
    """
    transformers = need("transformers")
    from ...hf import load, load_tokenizer
    from ...hf.models.folder import read_config
    from ...hf.models.load import family_of

    if not (path / "config.json").is_file():
        raise ConfigError(f"model must be a folder with a config.json, got {str(path)!r}")
    try:
        family = family_of(read_config(path), path).name
    except ValueError:
        family = None
    try:
        if family is not None:
            model = load(path)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
            )
        tokenizer = load_tokenizer(path)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model must be a folder with a causal language model and its tokenizer, got {str(path)!r}: {error}"
        ) from error
    if not model.can_generate():
        raise ConfigError(f"model must be a causal language model, got {type(model).__name__} in {str(path)!r}")
    how = f"{type(model).__name__}, " + (
        f"family {family}, through linbias" if family else "as transformers runs it: no family that linbias knows"
    )
    return FolderModel(
        model=model.eval().to(device), tokenizer=tokenizer, path=path, how=how, patched=family is not None
    )


def plant_tokens(filler: Sequence[int], needle: Sequence[int], question: Sequence[int], depth: float) -> list[int]:
    """Return the filler with a needle at `depth` of the way from its start (0) to its end (1), and the question."""
    place = round(depth * len(filler))
    return [*filler[:place], *needle, *filler[place:], *question]


def _nats(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    return losses.view_as(targets_BT).cpu()
