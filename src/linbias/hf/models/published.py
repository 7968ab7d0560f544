# SPDX-License-Identifier: Apache-2.0
"""How a published folder finds its classes: a `Published` a family, looked through by `linbias.hf.load`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Modules of this package that hold a PUBLISHED each; a new family is named here and nowhere else.
_HOMES: tuple[str, ...] = (".jina", ".jina_code", ".mosaic")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One family of checkpoints as their authors published them."""

    name: str
    """What reports and errors call it."""
    claims: Callable[[Mapping[str, Any]], bool]
    """Whether a folder's config.json is of this family: by its facts (`auto_map`, `architectures`, the fields that only
    this family has), because several of them say ``"model_type": "bert"``."""
    refusals: Callable[[Mapping[str, Any]], list[str]]
    """What of a config.json that is claimed cannot be honoured: option, value, reason and remedy."""
    config: type[Any]
    """A `PreTrainedConfig` that takes the published fields."""
    classes: Mapping[str, type[Any]]
    """Name in `architectures` -> class whose parameters have the published names. The first is the base model."""


def families() -> list[Published]:
    """All of them, imported now."""
    return [importlib.import_module(home, __package__).PUBLISHED for home in _HOMES]
