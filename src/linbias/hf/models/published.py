# SPDX-License-Identifier: Apache-2.0
"""How a published folder finds its classes: a `Published` a family, looked through by `linbias.hf.load`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

# Modules of this package that hold a PUBLISHED each; a new family is named here and nowhere else.
_HOMES: tuple[str, ...] = (
    ".baichuan",
    ".btlm",
    ".jais",
    ".jina",
    ".jina_code",
    ".mosaic",
    ".mpt_foundry",
    ".refact",
)

Task = Literal["base", "masked-lm", "causal-lm", "sequence-classification", "token-classification"]
TASKS: tuple[str, ...] = get_args(Task)
# How the names of classes with a head end, and the Auto class of transformers that gives them out.
_HEADS = {
    "ForMaskedLM": ("masked-lm", "AutoModelForMaskedLM"),
    "ForCausalLM": ("causal-lm", "AutoModelForCausalLM"),
    "LMHeadModel": ("causal-lm", "AutoModelForCausalLM"),
    "ForSequenceClassification": ("sequence-classification", "AutoModelForSequenceClassification"),
    "ForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
}


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
    """A `PreTrainedConfig` that takes the published fields. Its `model_type` is one that transformers does not have:
    `save_pretrained` writes it, and it tells a saved folder apart."""
    classes: Mapping[str, type[Any]]
    """Name in `architectures` -> class whose parameters have the published names. The first is the base model."""
    harmless: Mapping[str, str] = field(default_factory=dict[str, str])
    """Pattern -> reason: tensors that published folders hold, and that the model rightly leaves aside."""


def families() -> list[Published]:
    """All of them, imported now, and known to transformers' Auto classes, which then read what `save_pretrained` wrote.

    No published folder changes its meaning by that: those that say ``"model_type": "bert"`` remain transformers' own to
    an Auto class, since nothing may claim that name.
    """
    found = [importlib.import_module(home, __package__).PUBLISHED for home in _HOMES]
    for family in found:
        _announce(family)
    return found


def task_of(architecture: str) -> str:
    """Which of `TASKS` a class is for, by its name."""
    return next((task for ending, (task, _) in _HEADS.items() if architecture.endswith(ending)), "base")


def _announce(family: Published) -> None:
    """Tell transformers' Auto classes of it; a second time changes nothing."""
    import transformers

    if transformers.CONFIG_MAPPING._extra_content.get(family.config.model_type) is family.config:
        return
    transformers.AutoConfig.register(family.config.model_type, family.config)
    for kind in dict.fromkeys(family.classes.values()):
        name = next((auto for ending, (_, auto) in _HEADS.items() if kind.__name__.endswith(ending)), "AutoModel")
        getattr(transformers, name).register(family.config, kind, exist_ok=True)
