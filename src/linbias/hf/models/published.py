# SPDX-License-Identifier: Apache-2.0
"""How a published folder finds its classes: a `Published` a family, looked through by `linbias.hf.load`."""

import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

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
    holds: Callable[[frozenset[str]], bool] = lambda names: True
    """Whether a folder's tensors may be of this family; asked where config.json leaves a choice of several."""
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


# What a model is built of, by any of its published names.
_SIZES = re.compile(
    r"(type_)?vocab_size|(hidden|intermediate)_size|num_(hidden_layers|attention_heads)|n_(embd|layers?|heads?)|d_model"
)


def mistakes(kind: type[Any], facts: Mapping[str, Any]) -> list[str]:
    """What of a config.json has another type than the fields of our configurations, or is a size that nothing has."""
    ours = [part for part in reversed(kind.__mro__) if not part.__module__.startswith("transformers.")]
    hints = {name: hint for part in ours for name, hint in vars(part).get("__annotations__", {}).items()}
    found: list[str] = []
    for name, value in facts.items():
        own = kind.attribute_map.get(name, name)
        types = [get_origin(part) or part for part in _alternatives(hints.get(own, Any))]
        if Any not in types and type(value) not in types:
            wanted = " or ".join("null" if part is NoneType else part.__name__ for part in types)
            found.append(f"{name}={value!r} must be {wanted}")
        elif _SIZES.fullmatch(name) and isinstance(value, int) and value < 1:
            found.append(f"{name}={value!r} must be at least 1")
    words, padding = facts.get("vocab_size"), facts.get("pad_token_id")
    # Where it is no field of ours, no embedding is told of it.
    if "pad_token_id" in hints and not found and words and padding and not 0 <= padding < words:
        found.append(f"pad_token_id={padding} lies outside of the vocabulary of {words}")
    return found


def misfits(config: Mapping[str, Any], width: str, heads: str, activation: str, *own: str) -> list[str]:
    """What of the fields of these names makes no heads of one width, or is no activation of transformers or its own."""
    from transformers.activations import ACT2FN

    found: list[str] = []
    size, count, act = (config.get(name) for name in (width, heads, activation))
    if size and count and size % count:
        found.append(f"{width}={size} is no multiple of {heads}={count}: every head has one width")
    if act is not None and act not in own and act not in ACT2FN:
        found.append(f"{activation}={act!r} is no activation of transformers")
    return found


def is_number(value: Any) -> bool:
    """Whether it is a finite one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _alternatives(hint: Any) -> list[Any]:
    """The types that a field takes; a whole number is a float too."""
    types = list(get_args(hint)) if isinstance(hint, UnionType) else [hint]
    return [*types, int] if float in types and int not in types else types


def _announce(family: Published) -> None:
    """Tell transformers' Auto classes of it; a second time changes nothing."""
    import transformers

    if transformers.CONFIG_MAPPING._extra_content.get(family.config.model_type) is family.config:
        return
    transformers.AutoConfig.register(family.config.model_type, family.config)
    for kind in dict.fromkeys(family.classes.values()):
        name = next((auto for ending, (_, auto) in _HEADS.items() if kind.__name__.endswith(ending)), "AutoModel")
        getattr(transformers, name).register(family.config, kind, exist_ok=True)
