# SPDX-License-Identifier: Apache-2.0
"""Which models `linbias.patch` knows: the `Family`, and the registry of them.

A family maps classes of a model to subclasses of them that call linbias. Patching sets an instance's class to the
subclass and unpatching sets it back, so weights, names and state_dict are never touched, and copies and pickles of a
patched model stay patched: classes are found again by import.
"""

import ast
import hashlib
import importlib
import inspect
import linecache
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
    versions: tuple[str, str] | None = None
    """Oldest and newest version of transformers that the family takes; None: of no concern. The newest goes as far as
    it is written: "5.24" has all patch releases of 5.24 in it, which `known_sources` should then tell apart."""
    sources: tuple[Any, ...] = ()
    """The originals that the subclasses replace or rely on."""
    known_sources: Mapping[str, str] = field(default_factory=dict)
    """`fingerprint(sources)` -> the versions that have it; empty: of no concern."""

    def all_swaps(self, fidelity: str) -> dict[type[nn.Module], type[nn.Module]]:
        """Original -> patched for a fidelity."""
        return {**self.swaps, **(self.exact_swaps if fidelity == "exact" else {})}

    def why_not(self) -> str | None:
        """Why the installed transformers cannot be patched, or None."""
        if self.versions is not None:
            import transformers
            from packaging.version import parse

            oldest, newest = self.versions
            installed, last = parse(transformers.__version__), parse(newest).release
            if not (parse(oldest) <= installed and installed.release[: len(last)] <= last):
                return f"transformers {transformers.__version__} is not among the tested versions {oldest} to {newest}"
        replaced = [name for source in self.sources for name in _replaced(source)]
        if replaced:
            return f"another patch has replaced {', '.join(replaced)}"
        if self.known_sources and (found := fingerprint(self.sources)) not in self.known_sources:
            return f"the source of its classes has changed (fingerprint {found} is none of those tested)"
        return None


def fingerprint(sources: Iterable[Any]) -> str:
    """16 hex digits of the source text of classes and functions.

    >>> fingerprint([fingerprint]) == fingerprint([fingerprint])
    True
    """
    files: dict[str, dict[str, str]] = {}
    try:
        text = "\n".join(_source(source, files) for source in sources)
    except OSError:
        return "unreadable"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(source: Any, files: dict[str, dict[str, str]]) -> str:
    """`inspect.getsource`, which would parse a class's whole file again for every class."""
    file = inspect.getsourcefile(inspect.unwrap(source)) or ""
    if file not in files:
        files[file] = _definitions(file)
    if source.__name__ in files[file] and source.__qualname__ == source.__name__:
        return files[file][source.__name__]
    return inspect.getsource(source)


def _definitions(file: str) -> dict[str, str]:
    """The text of the classes and functions that a file defines at its top level."""
    lines = linecache.getlines(file)
    found: dict[str, str] = {}
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            found[node.name] = "".join(lines[first - 1 : node.end_lineno])
    return found


def _replaced(source: Any) -> list[str]:
    """Methods of a class that were not defined where the class was."""
    if not inspect.isclass(source):
        return []
    methods = {name: inspect.unwrap(part) for name, part in vars(source).items() if inspect.isfunction(part)}
    return [f"{source.__name__}.{name}" for name, part in methods.items() if part.__module__ != source.__module__]


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
