# SPDX-License-Identifier: Apache-2.0
"""Positional schemes by name: the one choice in which the models of a comparison differ.

A scheme may change the embeddings (`embed`), the attention (`attend`), or nothing at all. To add one, write its class
here (or in a file of `schemes`) and name it in SCHEMES: commands, reports and plots take it from there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .schemes.alibi import Alibi, InterpolatedAlibi, NtkAlibi
from .schemes.base import Learned, Positions, Sinusoidal
from .schemes.relative import Kerple, T5Bias
from .schemes.rotary import DynamicRotary, LinearRotary, NtkRotary, Rotary, YarnRotary


class Shape(Protocol):
    """What a scheme may ask of a model: a `lab.config.ModelConfig`."""

    @property
    def heads(self) -> int:
        """Of each layer."""
        ...

    @property
    def width(self) -> int:
        """Of the embeddings."""
        ...


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to give positions to a trained model, by name."""

    name: str
    label: str
    """What tables and plots call it."""
    build: Callable[[Shape, int], Positions]
    """From the model's shape and the training length."""
    usual: bool = False
    """Whether `compare` takes it unasked."""
    trained_as: str | None = None
    """Set for schemes that only evaluate: the scheme whose trained weights they run with. Up to the training length
    they are that scheme."""
    change: str | None = None
    """Set with `trained_as`: what they change beyond the training length, for reports."""


_TRAINED = (
    Scheme(name="alibi", label="ALiBi", usual=True, build=lambda model, length: Alibi(model.heads)),
    Scheme(name="sinusoidal", label="sinusoidal", usual=True, build=lambda model, length: Sinusoidal()),
    Scheme(name="learned", label="learned", usual=True, build=lambda model, length: Learned(model.width, length)),
    Scheme(name="rope", label="RoPE", usual=True, build=lambda model, length: Rotary()),
    Scheme(name="none", label="no positions", usual=True, build=lambda model, length: Positions()),
    Scheme(name="t5", label="T5 buckets", build=lambda model, length: T5Bias(model.heads)),
    Scheme(name="kerple", label="KERPLE-log", build=lambda model, length: Kerple(model.heads)),
    Scheme(
        name="alibi-learned",
        label="ALiBi, learned slopes",
        build=lambda model, length: Alibi(model.heads, learned=True),
    ),
    Scheme(
        name="alibi-half",
        label="ALiBi, half the heads",
        build=lambda model, length: Alibi(model.heads, biased_heads=(model.heads + 1) // 2),
    ),
)
_AT_TEST_TIME = (
    Scheme(
        name="alibi-window",
        label="ALiBi, training window",
        build=lambda model, length: Alibi(model.heads, window=length),
        trained_as="alibi",
        change="each layer sees only as many of the last bytes as training had",
    ),
    Scheme(
        name="alibi-interpolated",
        label="ALiBi, interpolated slopes",
        build=lambda model, length: InterpolatedAlibi(model.heads, length),
        trained_as="alibi",
        change="every slope times training length over window length",
    ),
    Scheme(
        name="alibi-ntk",
        label="ALiBi, NTK-scaled slopes",
        build=lambda model, length: NtkAlibi(model.heads, length),
        trained_as="alibi",
        change="the flattest slope times training length over window length, the steepest as trained, the rest between",
    ),
    Scheme(
        name="rope-linear",
        label="RoPE, interpolated",
        usual=True,
        build=lambda model, length: LinearRotary(length),
        trained_as="rope",
        change="positions times training length over window length",
    ),
    Scheme(
        name="rope-ntk",
        label="RoPE, NTK-aware",
        usual=True,
        build=lambda model, length: NtkRotary(length),
        trained_as="rope",
        change="a larger base, so that the slowest angle is interpolated and the fastest is not",
    ),
    Scheme(
        name="rope-dynamic",
        label="RoPE, dynamic NTK",
        usual=True,
        build=lambda model, length: DynamicRotary(length),
        trained_as="rope",
        change="as NTK-aware, with twice the window over the training length, less 1, as the factor",
    ),
    Scheme(
        name="rope-yarn",
        label="RoPE, YaRN",
        usual=True,
        build=lambda model, length: YarnRotary(length),
        trained_as="rope",
        change="slow angles interpolated, fast ones as trained, scores sharpened by (0.1 ln factor + 1) squared",
    ),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (*_TRAINED, *_AT_TEST_TIME)}
"""Every scheme by name."""


def why_not(scheme: str, model: Shape, trained: int, length: int) -> str | None:
    """Return why `scheme` cannot run at `length` in a model trained at `trained` tokens, None if it can."""
    longest = SCHEMES[scheme].build(model, trained).longest
    if longest is None or length <= longest:
        return None
    return f"its table ends at the training length, {longest:,}"


def rule_change(scheme: str, trained: int) -> str | None:
    """Say that `scheme` runs the weights of another and what it changes in their rule; None if it was trained."""
    base = SCHEMES[scheme].trained_as
    if base is None:
        return None
    return (
        f"{SCHEMES[scheme].label}: not trained; the weights of {SCHEMES[base].label}, and beyond {trained:,} bytes "
        f"{SCHEMES[scheme].change}."
    )
