# SPDX-License-Identifier: Apache-2.0
"""The module that stands first in a `SentenceTransformer` of ours. Importing this imports sentence-transformers."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentence_transformers.base.modules import InputModule
from torch import Tensor

from .folder import read_object
from .load import load, load_tokenizer

_UNLIMITED = int(1e30)


class AlibiEncoder(InputModule):
    """Texts to the last states of their tokens, by a model and a tokenizer that are there already.

    The library's own module would ask an Auto class for the model, which for most of these folders is another model.
    """

    config_file_name = "sentence_bert_config.json"
    config_keys = ["max_seq_length", "do_lower_case"]
    save_in_root = True
    tokenizer: Any

    def __init__(
        self, model: Any, tokenizer: Any, *, max_seq_length: int | None = None, do_lower_case: bool = False
    ) -> None:
        super().__init__()
        if len(tokenizer) > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, and the model has vectors for {model.config.vocab_size}: "
                f"they are not of the same folder"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.do_lower_case = do_lower_case
        limit = tokenizer.model_max_length if max_seq_length is None else max_seq_length
        self.max_seq_length = None if limit >= _UNLIMITED else limit
        self._takes = set(inspect.signature(model.forward).parameters)

    @classmethod
    def read(
        cls, folder: Path, *, max_seq_length: int | None = None, dtype: Any = None, device_map: Any = None
    ) -> "AlibiEncoder":
        """From a folder with model, tokenizer and perhaps sentence_bert_config.json."""
        written = folder / cls.config_file_name
        facts = read_object(written) if written.is_file() else {}
        longest = facts.get("max_seq_length")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise ValueError(f"max_seq_length of {written} must be null or a whole number above 0, got {longest!r}")
        model = load(folder, task="base", dtype=dtype, device_map=device_map)
        if getattr(model.config, "use_cache", False):
            model.config.use_cache = False
        return cls(
            model,
            load_tokenizer(folder),
            max_seq_length=longest if max_seq_length is None else max_seq_length,
            do_lower_case=facts.get("do_lower_case", False),
        )

    @classmethod
    def load(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, model_name_or_path: str, subfolder: str = "", model_kwargs: dict[str, Any] | None = None, **_: Any
    ) -> "AlibiEncoder":
        """What `SentenceTransformer(folder, trust_remote_code=True)` calls for a folder that `save` wrote."""
        return cls.read(Path(model_name_or_path, subfolder), **(model_kwargs or {}))

    def preprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs: Sequence[str], prompt: str | None = None, processing_kwargs: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Tokens of a batch, padded to its longest text."""
        strange = [text for text in inputs if not isinstance(text, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
        if strange or processing_kwargs:
            got = type(strange[0]).__name__ if strange else "processing_kwargs"
            raise TypeError(f"inputs must be texts, without processing_kwargs, got {got}")
        texts = [(prompt or "") + text for text in inputs]
        encoded: dict[str, Any] = dict(self._tokens(texts, padding=True, return_tensors="pt"))
        if prompt:
            alone = self._tokens([prompt])["input_ids"][0]
            # What closes a text does not close a prompt.
            encoded["prompt_length"] = len(alone) - (alone[-1] in self.tokenizer.all_special_ids)
        return encoded

    def _tokens(self, texts: list[str], **options: Any) -> Any:
        texts = [text.lower() for text in texts] if self.do_lower_case else texts
        cut = self.max_seq_length is not None
        return self.tokenizer(texts, truncation=cut, max_length=self.max_seq_length, verbose=False, **options)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Adds `token_embeddings` (B, T, width)."""
        given = {name: value for name, value in features.items() if name in self._takes and isinstance(value, Tensor)}
        features["token_embeddings"] = self.model(**given).last_hidden_state
        return features

    def get_embedding_dimension(self) -> int:
        """The width of a token's vector."""
        return self.model.config.hidden_size

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Model, tokenizer and settings, so that `linbias.hf.sentence_transformer` reads them again."""
        if not safe_serialization:
            raise ValueError("safe_serialization=False would write a pickle, which linbias never reads again")
        self.model.save_pretrained(output_path)
        self.save_tokenizer(output_path)
        self.save_config(output_path)
