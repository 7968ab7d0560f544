# SPDX-License-Identifier: Apache-2.0
"""`patch` and `unpatch`: give a model's own instances the classes of its `Family`, and take them back."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MethodType, TracebackType
from typing import Any, Literal

from torch import nn

from .families import Family, families_for
from .parity import FIDELITIES, check_parity

Fidelity = Literal["exact", "checkpoint"]
_SUPPORTED = "BLOOM, MPT and Falcon with alibi=True, and what linbias.hf.register was given"


@dataclass(frozen=True)
class PatchedDecoder:
    """One base model inside what was patched."""

    name: str
    """Its name in the model, "" for the model itself."""
    family: str
    """ "bloom", "mpt", "falcon", or a registered name."""
    layers: tuple[str, ...]
    """The names of the attention modules changed."""
    convention: str
    """Slopes, scale and positions."""
    not_covered: tuple[str, ...]
    """Options of the configuration that have no effect, as without the patch."""
    differences: tuple[str, ...]
    """Where results differ from the unpatched model's by more than rounding, and why."""


@dataclass(frozen=True)
class Report:
    """What `linbias.patch` did; as a context manager it undoes it at the end of the block."""

    model: nn.Module = field(repr=False)
    """What was patched."""
    fidelity: str
    """ "exact" or "checkpoint"."""
    decoders: tuple[PatchedDecoder, ...]
    """The base models found."""
    changed: tuple[nn.Module, ...] = field(repr=False)
    """The instances that got another class or a hook, and lose it at the end of a ``with`` block."""

    @property
    def layers(self) -> int:
        """How many attention layers were changed; at least 1."""
        return sum(len(decoder.layers) for decoder in self.decoders)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """All that the patch leaves without effect."""
        return tuple(line for decoder in self.decoders for line in decoder.not_covered)

    def __str__(self) -> str:
        lines = [f"{self.layers} attention layers changed, fidelity {self.fidelity!r}"]
        for decoder in self.decoders:
            lines.append(f"  {decoder.name or type(self.model).__name__} ({decoder.family}): {decoder.convention}")
            lines += [f"    differs: {line}" for line in decoder.differences]
            lines += [f"    not covered: {line}" for line in decoder.not_covered]
        return "\n".join(lines)

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Silent where the block unpatched the model itself: an error here would hide the block's own.
        _restore(self.changed, families_for(self.model))


def patch(model: nn.Module, *, fidelity: Fidelity = "exact") -> Report:
    """Make a transformers model with ALiBi attend through linbias: any length, memory linear in it, same logits.

    Weights, parameter names and configuration are not touched. The change belongs to the instances: it survives
    ``.to()``, ``.half()``, copying, pickling and ``save_pretrained``, and `unpatch` takes it back.

    Args:
        model: BLOOM, MPT or Falcon (``alibi=True``), with any head or none, or a model that contains one.
        fidelity: "exact": ``-slope * distance`` in float32 whatever the model's dtype. "checkpoint": the family's
            original formula, its rounding included, a block of query rows at a time: for those who must match the
            digits of the unpatched model. Its cost is quadratic in time, linear in memory.

    Returns:
        A `Report`: layers changed, convention, what is not covered. ``with linbias.patch(model):`` unpatches at the
        end of the block.

    Raises:
        TypeError: not a module.
        ValueError: nothing to change, an option that cannot be honoured, or a model of which some part is already
            patched; the message names it. The model is then as it was.
        NotImplementedError: with the installed transformers a tiny model gives something else patched than unpatched.
        ImportError: transformers is missing.

    >>> import linbias
    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2))
    >>> linbias.patch(model).layers
    2
    >>> linbias.unpatch(model)
    2
    """
    _check_model(model)
    _require_transformers()
    if fidelity not in FIDELITIES:
        raise ValueError(f"fidelity must be 'exact' or 'checkpoint', got {fidelity!r}")
    families = families_for(model)
    found = [(name, part, families[type(part)]) for name, part in model.named_modules() if type(part) in families]
    _check_unpatched(model, families)
    if not found:
        raise ValueError(_nothing_found(model, families))
    for name, decoder, family in found:
        _check(name, decoder, family, fidelity)
    needed = {old for _, _, family in found for old in family.swaps}
    swaps = {old: new for _, _, family in found for old, new in family.all_swaps(fidelity).items()}
    parts = _changeable(model, swaps, needed)
    for part in parts:
        _become(part, swaps[type(part)])
    for _, decoder, family in found:
        vars(decoder)["linbias_fidelity"] = fidelity
        parts += _hook(model, decoder, family)
    names = {id(part): name for name, part in model.named_modules()}
    return Report(
        model,
        fidelity,
        tuple(
            PatchedDecoder(
                name=name,
                family=family.name,
                layers=tuple(names[id(layer)] for layer in family.layers(decoder)),
                convention=family.convention,
                not_covered=tuple(family.not_covered(decoder)),
                differences=tuple(family.differences(decoder, fidelity)),
            )
            for name, decoder, family in found
        ),
        tuple(parts),
    )


def unpatch(model: nn.Module) -> int:
    """Undo `patch`: every instance gets its original class back.

    Args:
        model: what was patched, a copy of it, or a model that contains it.

    Returns:
        How many attention layers were restored.

    Raises:
        TypeError: not a module.
        ValueError: nothing in it is patched.
    """
    _check_model(model)
    families = families_for(model)
    back = _originals(families)
    if not any(type(part) in back for part in model.modules()):
        raise ValueError(f"nothing in this {type(model).__name__} is patched; linbias.patch(model) comes first")
    return _restore(model.modules(), families)


def _originals(families: dict[type[nn.Module], Family]) -> dict[type[nn.Module], type[nn.Module]]:
    """Patched class -> original."""
    return {new: old for family in families.values() for old, new in family.all_swaps("exact").items()}


def _restore(parts: Iterable[nn.Module], families: dict[type[nn.Module], Family]) -> int:
    """Give those that are patched their classes back; how many attention layers that restored."""
    back, hooks = _originals(families), [family.before_head for family in families.values()]
    restored = 0
    for part in parts:
        for number in [number for number, hook in part._forward_pre_hooks.items() if hook in hooks]:
            del part._forward_pre_hooks[number], part._forward_pre_hooks_with_kwargs[number]
        if type(part) not in back:
            continue
        _become(part, back[type(part)])
        vars(part).pop("linbias_fidelity", None)
        family = families.get(type(part))
        restored += len(list(family.layers(part))) if family else 0
    return restored


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = "an instance of it" if isinstance(model, type) else "a loaded model"
        raise TypeError(
            f"model must be a torch.nn.Module, got {model!r}; pass {hint}, such as "
            f"BloomForCausalLM.from_pretrained(...) returns"
        )


def _check_unpatched(model: nn.Module, families: dict[type[nn.Module], Family]) -> None:
    """Raise if any part is patched: two fidelities in one model, or half of it unpatched with the other, mislead."""
    patched = [family.swaps[family.decoder] for family in families.values()]
    names = [name for name, part in model.named_modules() if type(part) in patched]
    if not names:
        return
    whole = type(model).__name__
    if any(type(part) in families for part in model.modules()):
        raise ValueError(
            f"of this {whole}, {', '.join(map(repr, names))} is already patched: linbias.unpatch(model) first, or "
            f"patch the other parts one by one"
        )
    raise ValueError(f"this {whole} is already patched; linbias.unpatch(model) first")


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ImportError("linbias.patch needs transformers: pip install 'linbias[hf]'") from error


def _nothing_found(model: nn.Module, families: dict[type[nn.Module], Family]) -> str:
    kinds = {type(part) for part in model.modules()}
    for family in families.values():
        for kind in kinds:
            if issubclass(kind, family.decoder):
                return (
                    f"{kind.__qualname__} is a subclass of {family.decoder.__qualname__}, and what it changes is "
                    f"not known: patch before wrapping, or register a family of its own (linbias.hf.register)"
                )
    return f"nothing to patch in this {type(model).__name__}; supported are {_SUPPORTED}"


def _check(name: str, decoder: nn.Module, family: Family, fidelity: str) -> None:
    """Raise if this decoder cannot be patched as asked."""
    where = f"{family.name} model{f' {name!r}' if name else ''}"
    refusals = family.refusals(decoder)
    if refusals:
        raise ValueError(f"cannot patch the {where}: " + "; ".join(refusals))
    swaps = family.all_swaps(fidelity)
    if any(type(layer) in swaps.values() for layer in family.layers(decoder)):
        raise ValueError(
            f"cannot patch the {where}: another model that is patched already shares attention layers with it; "
            f"unpatch that one, then patch both at once: linbias.patch(torch.nn.ModuleList([one, other]))"
        )
    strange = sorted({type(layer).__qualname__ for layer in family.layers(decoder) if type(layer) not in swaps})
    if strange:
        raise ValueError(
            f"cannot patch the {where}: its attention layers are {', '.join(strange)}, not transformers' own; patch "
            f"before replacing them"
        )
    check_parity(family)


def _changeable(
    model: nn.Module, swaps: dict[type[nn.Module], type[nn.Module]], needed: set[type[nn.Module]]
) -> list[nn.Module]:
    """What will get another class; raises where one that must would show no effect of it."""
    parts: list[nn.Module] = []
    for part in model.modules():
        if type(part) not in swaps:
            continue
        if not _is_shadowed(part, swaps[type(part)]):
            parts.append(part)
        elif type(part) in needed:
            raise ValueError(
                f"the forward of a {type(part).__qualname__} was replaced on the instance, so its class cannot take "
                f"effect: remove that first, patch, then apply it again"
            )
    return parts


def _hook(model: nn.Module, decoder: nn.Module, family: Family) -> list[nn.Module]:
    """Let the models around a decoder hand on to it what their own forward would not."""
    if family.before_head is None:
        return []
    heads = [part for part in model.modules() if part is not decoder and getattr(part, "base_model", None) is decoder]
    for head in heads:
        head.register_forward_pre_hook(family.before_head, with_kwargs=True)
    return heads


def _is_shadowed(part: nn.Module, kind: type[Any]) -> bool:
    """Whether somebody's own function on the instance stands before the forward that `kind` would give it."""
    shadow = _shadows(part)
    return kind.forward is not type(part).forward and bool(shadow) and shadow[-1][1] is None


def _shadows(part: nn.Module) -> list[tuple[str, MethodType | None]]:
    """Attributes that stand before the class's forward, the innermost last; None: not the class's own forward.

    accelerate keeps the method it wraps as `_old_forward`, and leaves it as `forward` when its hook is removed.
    """
    found: list[tuple[str, MethodType | None]] = []
    for attribute in ("forward", "_old_forward"):
        if attribute in vars(part):
            method = vars(part)[attribute]
            own = isinstance(method, MethodType) and method.__func__ is type(part).forward
            found.append((attribute, method if own else None))
    return found


def _become(part: nn.Module, kind: type[Any]) -> None:
    """Change the class of an instance, and of the bound methods that accelerate stored on it."""
    bound = [attribute for attribute, method in _shadows(part) if method is not None]
    part.__class__ = kind
    for attribute in bound:
        setattr(part, attribute, MethodType(kind.forward, part))
