# SPDX-License-Identifier: Apache-2.0
"""Which models `linbias.patch` knows: the `Family`, and the registry of them.

A family maps classes of a model to subclasses of them that call linbias. Patching sets an instance's class to the
subclass and unpatching sets it back, so weights, names and state_dict are never touched, and copies and pickles of a
patched model stay patched: classes are found again by import.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_BUILT_IN = {
    "transformers.models.bloom.modeling_bloom": "linbias.hf.bloom",
    "transformers.models.mpt.modeling_mpt": "linbias.hf.mpt",
    "transformers.models.falcon.modeling_falcon": "linbias.hf.falcon",
}
_REGISTERED: "dict[type[nn.Module], Family]" = {}


def _nothing(*_: Any) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model, and how it is patched."""

    name: str
    """What reports and errors call it."""
    decoder: type[nn.Module]
    """The class that holds the layers and builds their bias and mask. Only instances of exactly this class are
    patched: what a subclass changed cannot be known."""
    layers: Callable[[Any], Iterable[nn.Module]]
    """The attention modules of a decoder, in order; each must be of a class in `swaps`."""
    swaps: Mapping[type[nn.Module], type[nn.Module]]
    """Original class -> its subclass that calls linbias; for the decoder, its parts, and the heads around it."""
    exact_swaps: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    """The same, for fidelity "exact" only: parts whose rounding differs from the original's. Nothing depends on them,
    so an instance whose forward somebody has replaced stays as it is."""
    convention: str
    """Slopes, scale and positions, in a line."""
    refusals: Callable[[Any], list[str]] = _nothing
    """What of a decoder's configuration cannot be honoured: option, value, reason."""
    not_covered: Callable[[Any], list[str]] = _nothing
    """What of a decoder's configuration has no effect, as without the patch."""
    differences: Callable[[Any, str], list[str]] = _nothing
    """Where a decoder's results will differ from the unpatched model's by more than rounding, for a fidelity."""
    before_head: Callable[..., Any] | None = None
    """A forward pre-hook, with keyword arguments, for the models around a decoder: what their forward does not hand on
    to the decoder, though it must know."""
    example: Callable[[], tuple[nn.Module, Callable[[nn.Module], Any]]] | None = None
    """A tiny random decoder and what runs it: patched in either fidelity it must give what it gives unpatched, which is
    tried once a process. None: not tried."""

    def all_swaps(self, fidelity: str) -> dict[type[nn.Module], type[nn.Module]]:
        """Original -> patched for a fidelity."""
        return {**self.swaps, **(self.exact_swaps if fidelity == "exact" else {})}


def register(family: Family) -> None:
    """Teach `linbias.patch` another family; see docs/models/families.md for a whole example.

    Args:
        family: replaces one that was registered for the same decoder class.

    Raises:
        TypeError: a patched class that is not a subclass of the original: an instance could not change into it.
        ValueError: the decoder class is not among the swaps.
    """
    for original, patched in family.all_swaps("exact").items():
        if not (issubclass(patched, original) and patched is not original):
            raise TypeError(
                f"family {family.name!r}: swaps must map a class to a subclass of it, got {original.__qualname__} -> "
                f"{patched.__qualname__}; an instance can only become what it already is, and more"
            )
    if family.decoder not in family.swaps:
        raise ValueError(f"family {family.name!r}: swaps must contain the decoder {family.decoder.__qualname__}")
    _REGISTERED[family.decoder] = family


def families_for(model: nn.Module) -> "dict[type[nn.Module], Family]":
    """The registered families, and of the built-in ones those whose classes occur in `model` or are inherited from."""
    homes = {base.__module__ for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    for home, ours in _BUILT_IN.items():
        if home in homes:
            family = importlib.import_module(ours).FAMILY
            if family.decoder not in _REGISTERED:
                register(family)
    return dict(_REGISTERED)
